// FirstCause: the first error that ended a Team. It is set once. Any thread may set and read it.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "core/base/deadline.h"
#include "core/base/status.h"
#include "core/team/team.h"

namespace dscomm {

// How long a rank that sees a death, or another consequence of a failure, waits for data or causes
// in flight: data that the dead member sent earlier, or the cause from a rank with direct evidence.
inline constexpr int64_t kCauseGraceNs = 200'000'000;

// How long, on an overloaded machine, members may need for a call that an abort should not end.
inline constexpr int64_t kLateCallNs = 5'000'000'000;

// Decides, each time that a wait checks for aborts, whether an abort ends it. If the member that
// aborted had finished the call (see Team::failure_in()), the abort ends it only after kLateCallNs:
// the members that are still in the call, or about to make it, need nothing from that member.
// Another member that gives up before it has finished the call publishes an abort that ends the
// wait at once.
class AbortMonitor {
 public:
  // failure_in(call) is Team::failure_in().
  template <typename FailureIn>
  Status check(uint64_t call, const FailureIn& failure_in) {
    DSCOMM_RETURN_IF_ERROR(failure_in(call));
    const Status later = failure_in(kAnyCall);
    if (later.ok()) return {};
    const int64_t now = monotonic_ns();
    if (seen_ns_ == 0) seen_ns_ = now;
    return now - seen_ns_ < kLateCallNs ? Status() : later;
  }

 private:
  int64_t seen_ns_ = 0;  // when check() first saw an abort after the call; 0: it has seen none
};

class FirstCause {
 public:
  // Keeps the cause if it is the first; returns the first one.
  Status keep(const Status& cause) {
    std::lock_guard lock(mutex_);
    if (cause_.ok()) cause_ = cause;
    // Release, with the acquire in get(): a reader that sees the flag finds the cause.
    is_set_.store(!cause_.ok(), std::memory_order_release);
    return cause_;
  }

  // OK if there is none; this costs one load.
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
