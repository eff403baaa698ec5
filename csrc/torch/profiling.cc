#include "torch/profiling.h"

#include <ATen/core/ivalue.h>

#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

#include "torch/backend.h"

namespace dscomm {

ProfiledCall::ProfiledCall(const CallInfo& call, at::TensorList inputs)
    : record_(at::RecordScope::USER_SCOPE) {
  if (!record_.isActive()) return;
  // All backends set this, since an event may end on another thread; tools look for this mark.
  record_._setAsync();
  const std::vector<c10::IValue> values(inputs.begin(), inputs.end());
  record_.before(call.profiling_title, &values);
}

#if DSCOMM_TORCH_2

namespace {
int64_t elements_of(at::TensorList tensors) {
  int64_t elements = 0;
  for (const at::Tensor& tensor : tensors) elements += tensor.numel();
  return elements;
}
}  // namespace

ProfiledParameters::ProfiledParameters(const CallInfo& call, const GroupIdentity& group,
                                       uint64_t sequence, at::TensorList inputs,
                                       at::TensorList outputs) {
  const std::tuple<std::string, std::string> name(group.name, group.description);
  const std::vector<int64_t> no_splits;
  // Start and stride describe the members if their global ranks are evenly spaced.
  int first = 0, stride = 1;
  if (!group.global_ranks.empty()) first = group.global_ranks[0];
  if (group.global_ranks.size() > 1) stride = group.global_ranks[1] - first;
  auto info = make_profiled_info<torch::ParamCommsDebugInfo>(
      call.info.asynchronous, name, group.rank, std::string(call.info.title), elements_of(inputs),
      elements_of(outputs), inputs.empty() ? at::kByte : inputs[0].scalar_type(), no_splits,
      no_splits, first, stride, group.size);
  set_sequence(*info, static_cast<int64_t>(sequence), c10d::isP2POp(call.type));
  debug_info_.emplace(c10::DebugInfoKind::PARAM_COMMS_INFO, info);

  record_.emplace(at::RecordScope::FUNCTION);
  if (!record_->isActive()) return;
  const auto number = std::make_tuple(static_cast<int64_t>(sequence), c10d::isP2POp(call.type));
  std::vector<c10::IValue> values{c10::IValue(inputs),
                                  c10::IValue(number),
                                  c10::IValue(name),
                                  c10::IValue(static_cast<int64_t>(group.rank)),
                                  c10::IValue(std::string(call.info.title)),
                                  c10::IValue(no_splits),
                                  c10::IValue(no_splits),
                                  c10::IValue(static_cast<int64_t>(first)),
                                  c10::IValue(static_cast<int64_t>(stride)),
                                  c10::IValue(static_cast<int64_t>(group.size)),
                                  c10::IValue(call.info.asynchronous)};
  record_->before(at::kParamCommsCallName, &values);
  if (record_->needsOutputs())
    record_->setOutputs(std::vector<c10::IValue>(1, c10::IValue(outputs)));
}

#else

// The profiler of torch 1.13 reads these parameters only from NCCL.
ProfiledParameters::ProfiledParameters(const CallInfo&, const GroupIdentity&, uint64_t,
                                       at::TensorList, at::TensorList) {}

#endif

}  // namespace dscomm
