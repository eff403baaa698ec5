// What torch's profiler sees of a call: one event titled "dscomm:<op>" with the shapes of its
// inputs, and record_param_comms beside it, from which tools read group, sizes and dtype.
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

// Whether anybody listens; all that a call pays when nobody does.
inline bool profiled() { return at::hasCallbacks(); }

// The event of a synchronous call, for as long as this lives. (Of an asynchronous one, Work holds
// it.)
class ProfiledCall {
 public:
  ProfiledCall(const CallInfo& call, at::TensorList inputs);
  ProfiledCall(const ProfiledCall&) = delete;
  ProfiledCall& operator=(const ProfiledCall&) = delete;

 private:
  at::RecordFunction record_;
};

// record_param_comms, for as long as this lives.
class ProfiledParameters {
 public:
  ProfiledParameters(const CallInfo& call, const GroupIdentity& group, uint64_t sequence,
                     at::TensorList inputs, at::TensorList outputs);

 private:
  std::optional<c10::DebugInfoGuard> debug_info_;
  std::optional<at::RecordFunction> record_;
};

}  // namespace dscomm
