// Runs the body of a DscommBackend's call. Separate from backend.h because only the calls need it.
#pragma once

#include <stdexcept>
#include <utility>

#include "torch/backend.h"

namespace dscomm {

// Runs the body of a call. If it throws, the engine aborts the group, which tells the other ranks.
// Rethrows a c10::Error without its C++ backtrace, so that the reason fits one line.
template <typename Body>
Status run_body(Body& body, Team& team, const CallOptions& options) {
  try {
    return body(team, options);
  } catch (const c10::Error& error) {
    throw std::runtime_error(error.what_without_backtrace());
  }
}

template <typename Body>
c10::intrusive_ptr<c10d::Work> DscommBackend::submit(const CallInfo& call, Body body,
                                                     at::TensorList inputs,
                                                     at::TensorList outputs) {
  if (call.info.asynchronous || coalescing()) {
    // A copy of a std::function copies its target, but the buffers must exist only once.
    auto shared = std::make_shared<Body>(std::move(body));
    auto work = start(
        call,
        [shared](Team& team, const CallOptions& options) {
          return run_body(*shared, team, options);
        },
        inputs, outputs);
    if (!call.info.asynchronous) return {};
    return work;
  }
  std::optional<ProfiledParameters> parameters;
  std::optional<ProfiledCall> event;
  if (profiled()) {
    parameters.emplace(call, identity(), group_->sequence() + 1, inputs, outputs);
    event.emplace(call, inputs);
  }
  // A single captured reference fits into std::function without an allocation.
  Status status = group_->run(
      call.info,
      [&body](Team& team, const CallOptions& options) { return run_body(body, team, options); },
      call.timeout);
  if (!status.ok()) raise_error(status, call.info.title, *group_);
  return {};
}

}  // namespace dscomm
