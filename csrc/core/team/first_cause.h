// FirstCause: what ended a Team, kept once and for good. Any thread may set it, read it, or both.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "core/base/deadline.h"
#include "core/base/status.h"
#include "core/team/team.h"

namespace dscomm {

// How long who sees that a member died, or another consequence of a failure, waits for what is
// still on its way: what the member sent before, or the cause as a rank that knows it better tells
// it.
inline constexpr int64_t kCauseGraceNs = 200'000'000;

// How long members that an abort has left nothing to wait for may need to make the call that they
// share, on an overloaded machine.
inline constexpr int64_t kLateCallNs = 5'000'000'000;

// Asks, between the slices of one wait, whether an abort ends it. An abort of a member that had
// finished the call first (see Team::look()) ends it only after a while: the members that are still
// in the call, or about to make it, need nothing of the one that aborted. One that gives up before
// it has finished the call says so by an abort of its own.
class AbortWatch {
 public:
  // look(call) as Team::look().
  template <typename Look>
  Status ask(uint64_t call, const Look& look) {
    DSCOMM_RETURN_IF_ERROR(look(call));
    const Status later = look(kAnyCall);
    if (later.ok()) return {};
    const int64_t now = monotonic_ns();
    if (seen_ns_ == 0) seen_ns_ = now;
    return now - seen_ns_ < kLateCallNs ? Status() : later;
  }

 private:
  int64_t seen_ns_ = 0;  // when an abort after the call was first seen; 0: none
};

class FirstCause {
 public:
  // Keeps the cause unless there is one already; returns the one that is kept.
  Status keep(const Status& cause) {
    std::lock_guard lock(mutex_);
    if (cause_.ok()) cause_ = cause;
    // Release, with the acquire in get(): a reader that sees the flag finds the cause.
    is_set_.store(!cause_.ok(), std::memory_order_release);
    return cause_;
  }

  // OK while there is none; costs one load then.
  Status get() const {
    if (!is_set_.load(std::memory_order_acquire)) return {};
    std::lock_guard lock(mutex_);
    return cause_;
  }

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> is_set_{false};
  Status cause_;
};

}  // namespace dscomm
