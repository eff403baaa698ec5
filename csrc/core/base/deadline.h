// Time: one monotonic clock, and the moment at which a wait gives up.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <ctime>

namespace dscomm {

// Nanoseconds of CLOCK_MONOTONIC; the same clock in every process of a host.
inline int64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// Nanoseconds since the epoch, for records that people read. Never used to wait.
inline int64_t wall_clock_ns() {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// A deadline starts with the first question, so that a call that never waits reads no clock. Copies
// that are made before it start with their own.
class Deadline {
 public:
  static Deadline after(std::chrono::milliseconds timeout) {
    return Deadline(std::min(timeout.count(), kLongestMs) * 1'000'000);
  }

  bool expired() const { return remaining_ns() <= 0; }
  int64_t remaining_ns() const {
    int64_t now = monotonic_ns();
    if (end_ns_ == 0) end_ns_ = now + timeout_ns_;
    return end_ns_ - now;
  }
  // Of the whole, for messages.
  int64_t timeout_ms() const { return timeout_ns_ / 1'000'000; }
  // The same, ending so much later. Starts it.
  Deadline later(int64_t ns) const {
    remaining_ns();
    Deadline copy = *this;
    copy.end_ns_ += ns;
    copy.later_ns_ += ns;
    return copy;
  }
  // Whether the end has passed that this one is later than. Starts it.
  bool is_overtime() const { return remaining_ns() <= later_ns_; }

 private:
  static constexpr int64_t kLongestMs = int64_t{1} << 42;  // some 139 years; in range as ns

  explicit Deadline(int64_t timeout_ns) : timeout_ns_(timeout_ns) {}
  int64_t timeout_ns_;
  int64_t later_ns_ = 0;
  mutable int64_t end_ns_ = 0;
};

}  // namespace dscomm
