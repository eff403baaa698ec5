// Passes views with a conjugate or negative bit, and zero tensors, to the backend unchanged.
//
// Such a view is the original memory plus a mark "conjugate" (t.conj()) or "negate"
// (t.conj().imag). For an operator that does not know the marks, torch's dispatcher makes a
// materialised copy. The schemas of c10d's operators do not say which tensors they write, so the
// result would land in the copy and be lost. This backend reads and writes such views itself, so
// for its groups the kernels below pass them on; for every other group they do what torch would do.
// A zero tensor is a shape without memory. torch materialises it in the same way and loses the
// result; this backend reads it as zeros and refuses to write it.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "torch/backend.h"

namespace dscomm {
namespace {

bool carried_by_dscomm(const c10::IValue& value) {
  if (!value.isObject()) return false;
  static const auto type = c10::getCustomClassType<c10::intrusive_ptr<c10d::ProcessGroup>>();
  if (value.type() != type) return false;
  auto group = value.toCustomClass<c10d::ProcessGroup>();
#if DSCOMM_TORCH_2
  const std::vector<c10::Device> devices = group->getDeviceTypes();
  if (!std::ranges::count(devices, c10::DeviceType::CPU, &c10::Device::type)) return false;
  return group->getBackend(c10::DeviceType::CPU)->getBackendName() == kBackendName;
#else
  return group->getBackendName() == kBackendName;
#endif
}

template <c10::DispatchKey key>
bool has_bit(const at::Tensor& tensor) {
  if (!tensor.defined()) return false;
  if constexpr (key == c10::DispatchKey::Conjugate) return tensor.is_conj();
  if constexpr (key == c10::DispatchKey::Negative) return tensor.is_neg();
  return tensor._is_zerotensor();
}

template <c10::DispatchKey key>
at::Tensor materialised(const at::Tensor& tensor) {
  if constexpr (key == c10::DispatchKey::ZeroTensor)
    return at::zeros({}, tensor.options()).expand(tensor.sizes());  // as torch does
  return at::clone(tensor);
}

template <c10::DispatchKey key>
void redispatch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  bool is_ours = false;
  for (const c10::IValue& argument : arguments) is_ours = is_ours || carried_by_dscomm(argument);
  const size_t first = stack->size() - arguments.size();
  for (size_t i = first; !is_ours && i < stack->size(); ++i) {
    c10::IValue& argument = (*stack)[i];
    if (argument.isTensor()) {
      if (has_bit<key>(argument.toTensor())) argument = materialised<key>(argument.toTensor());
    } else if (argument.isTensorList()) {
      auto tensors = argument.toTensorList().copy();
      for (size_t k = 0; k < tensors.size(); ++k)
        if (has_bit<key>(tensors.get(k))) tensors.set(k, materialised<key>(tensors.get(k)));
      argument = std::move(tensors);
    }
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key), stack);
}

template <c10::DispatchKey key>
void register_for_all(torch::Library& library) {
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames())
    if (name.name.rfind("c10d::", 0) == 0)
      library.impl(name.name.c_str(),
                   torch::CppFunction::makeFromBoxedFunction<&redispatch<key>>());
}

TORCH_LIBRARY_IMPL(c10d, Conjugate, library) {
  register_for_all<c10::DispatchKey::Conjugate>(library);
}
TORCH_LIBRARY_IMPL(c10d, Negative, library) {
  register_for_all<c10::DispatchKey::Negative>(library);
}
TORCH_LIBRARY_IMPL(c10d, ZeroTensor, library) {
  register_for_all<c10::DispatchKey::ZeroTensor>(library);
}

}  // namespace
}  // namespace dscomm
