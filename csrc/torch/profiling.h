// Records a call for torch's profiler: an event "dscomm:<op>" with the shapes of the inputs, and a
// record_param_comms event, from which tools read the group, sizes and dtype.
#pragma once

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <optional>
#include <string>
#include <vector>

#include "torch/compat.h"

namespace dscomm {

struct CallInfo;

struct GroupIdentity {
  std::string name;
  std::string description;
  int rank = 0;
  int size = 1;
  std::vector<int> global_ranks;
};

// Whether a profiler listens; the only cost of profiling when none does.
inline bool profiled() { return at::hasCallbacks(); }

// The event of a synchronous call; ends with this object. (Work holds an asynchronous call's.)
class ProfiledCall {
 public:
  ProfiledCall(const CallInfo& call, at::TensorList inputs);

 private:
  at::RecordFunction record_;
};

// The record_param_comms event of a call; ends with this object.
class ProfiledParameters {
 public:
  ProfiledParameters(const CallInfo& call, const GroupIdentity& group, uint64_t sequence,
                     at::TensorList inputs, at::TensorList outputs);

 private:
  std::optional<c10::DebugInfoGuard> debug_info_;
  std::optional<at::RecordFunction> record_;
};

}  // namespace dscomm
