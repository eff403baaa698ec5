// torch.ops.dscomm: calls that torch.compile can trace, with the group given by name.
//
// Each kernel calls the group's backend for the tensor's device, which need not be dscomm. For
// inference only: backward() raises at inference_all_reduce(), but ignores inference_all_reduce_().
#include "torch/compat.h"

#if DSCOMM_TORCH_2

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <string>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "torch/convert.h"

namespace dscomm {
namespace {

void inference_all_reduce_(at::Tensor& tensor, const std::string& op,
                           const std::string& group_name) {
  c10d::AllreduceOptions options;
  options.reduceOp = reduce_op_of_name(op);
  options.asyncOp = false;
  std::vector<at::Tensor> tensors{tensor};
  auto work = c10d::resolve_process_group(group_name)
                  ->getBackend(tensor.device().type())
                  ->allreduce(tensors, options);
  if (work) work->wait();
}

at::Tensor inference_all_reduce(const at::Tensor& tensor, const std::string& op,
                                const std::string& group_name) {
  at::Tensor result = tensor.clone(at::MemoryFormat::Contiguous);
  inference_all_reduce_(result, op, group_name);
  return result;
}

void no_data_(at::Tensor&, const std::string&, const std::string&) {}

at::Tensor no_data(const at::Tensor& tensor, const std::string&, const std::string&) {
  return at::empty_like(tensor, at::MemoryFormat::Contiguous);
}

// Increments the tensor's version as torch's in-place operators do, so that a backward pass that
// saved the earlier value raises. torch's fallbacks do this only for tensors that an operator
// returns; this one returns none.
void autograd_inference_all_reduce_(c10::DispatchKeySet keys, at::Tensor& tensor,
                                    const std::string& op, const std::string& group_name) {
  static const auto below = c10::Dispatcher::singleton()
                                .findSchemaOrThrow("dscomm::inference_all_reduce_", "")
                                .typed<void(at::Tensor&, const std::string&, const std::string&)>();
  torch::autograd::check_inplace(tensor, torch::autograd::compute_requires_grad(tensor));
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    below.redispatch(keys & c10::after_ADInplaceOrView_keyset, tensor, op, group_name);
  }
  torch::autograd::increment_version(tensor);
}

TORCH_LIBRARY(dscomm, library) {
  library.def("inference_all_reduce(Tensor tensor, str op, str group_name) -> Tensor");
  library.def("inference_all_reduce_(Tensor(a!) tensor, str op, str group_name) -> ()");
}

TORCH_LIBRARY_IMPL(dscomm, CompositeExplicitAutograd, library) {
  library.impl("inference_all_reduce", &inference_all_reduce);
  library.impl("inference_all_reduce_", &inference_all_reduce_);
}

TORCH_LIBRARY_IMPL(dscomm, Meta, library) {
  library.impl("inference_all_reduce", &no_data);
  library.impl("inference_all_reduce_", &no_data_);
}

TORCH_LIBRARY_IMPL(dscomm, Autograd, library) {
  library.impl("inference_all_reduce", torch::autograd::autogradNotImplementedFallback());
  library.impl("inference_all_reduce_", &autograd_inference_all_reduce_);
}

}  // namespace
}  // namespace dscomm

#endif
