// Time: one monotonic clock, and deadlines of waits.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <string>

#include "core/base/duration.h"
#include "core/base/lost_time.h"

namespace dscomm {

inline constexpr int64_t kMs = 1'000'000;  // in nanoseconds

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

// When a wait ends. Group makes the deadline of a call from the call's timeout. A deadline starts
// at its first query, so a call that never waits reads no clock. A copy that was made before the
// first query starts separately. Time in which the process did not run (LostTime) does not count.
class Deadline {
 public:
  static Deadline after(std::chrono::milliseconds timeout) {
    return Deadline(std::min(timeout.count(), kLongestMs) * 1'000'000);
  }

  bool expired() const { return remaining_ns() <= 0; }
  int64_t remaining_ns() const {
    const int64_t now = monotonic_ns();
    if (start_ns_ == 0) start_ns_ = now;
    seen_.ns = now;
    return remaining_at(now);
  }
  // The whole timeout, not what is left of it.
  int64_t timeout_ms() const { return timeout_ns_ / 1'000'000; }
  std::string timeout_text() const { return duration_text(timeout_ms()); }
  // A copy whose end is `ns` later. Counts as a query, so it starts this deadline.
  Deadline later(int64_t ns) const {
    remaining_ns();
    Deadline copy = *this;
    copy.later_ns_ += ns;
    return copy;
  }
  // For a copy from later(): whether the original deadline has passed. Counts as a query.
  bool is_overtime() const { return remaining_ns() <= later_ns_; }

  // Call after each slice of a wait: one sleep or yield, which began at `began_ns` and should have
  // taken at most `asked_ns`. An excess of half a second or more counts as LostTime.
  void note_slice(int64_t began_ns, int64_t asked_ns) const {
    seen_.ns = monotonic_ns();
    lost_->note(began_ns + asked_ns, seen_.ns);
  }
  // Sleeps for `ns`, and notes the sleep as one slice of a wait.
  void nap(int64_t ns) const {
    const int64_t began_ns = monotonic_ns();
    const timespec time{static_cast<time_t>(ns / 1'000'000'000),
                        static_cast<long>(ns % 1'000'000'000)};
    nanosleep(&time, nullptr);
    note_slice(began_ns, ns);
  }
  void nap(std::chrono::nanoseconds time) const { nap(time.count()); }
  // Call at the start of a wait, in a call that spins or computes between its waits. If half a
  // second or more has passed since the last query or slice, this time does not count, because no
  // slice of sleep could have shown whether the process ran.
  void leave_out_time_since_last_look() const {
    if (start_ns_ == 0 || seen_.ns == 0) return;
    const int64_t now = monotonic_ns();
    const int64_t unseen_ns = now - seen_.ns - lost_->since(seen_.ns);
    if (unseen_ns < LostTime::kLeastNs) return;
    // Restarts at `now`. Then a stop that a slice of another thread notes is not left out again.
    charged_ns_ = timeout_ns_ + later_ns_ - remaining_at(now) - unseen_ns;
    start_ns_ = seen_.ns = now;
  }

 private:
  static constexpr int64_t kLongestMs = int64_t{1} << 42;  // some 139 years; in range as ns

  explicit Deadline(int64_t timeout_ns) : timeout_ns_(timeout_ns), lost_(&LostTime::of_process()) {}
  int64_t remaining_at(int64_t now) const {
    return start_ns_ + timeout_ns_ + later_ns_ - charged_ns_ + lost_->since(start_ns_) - now;
  }

  int64_t timeout_ns_;
  int64_t later_ns_ = 0;
  mutable int64_t start_ns_ = 0;
  mutable int64_t charged_ns_ = 0;  // part of the timeout used before start_ns_
  // When the deadline was last queried, or a slice last ended (note_slice()); 0: never. Copies
  // start at 0, because the thread may have waited since then, with another copy.
  struct Seen {
    Seen() = default;
    Seen(const Seen&) {}
    Seen& operator=(const Seen&) {
      ns = 0;
      return *this;
    }
    int64_t ns = 0;
  };
  mutable Seen seen_;
  // The LostTime of the library that made this deadline. The MPI module, another library, has a
  // separate LostTime; its waits must note their slices in this one.
  LostTime* lost_;
};

// How much longer a polling wait continues: to its deadline. The wait gets one more second if the
// deadline passed before the wait began, or more than half a second before a query. In both cases
// this rank has computed, copied or been stopped when the deadline passed. The other ranks may have
// been stopped, too, and may continue a little later than this rank.
class TimeLeft {
 public:
  explicit TimeLeft(const Deadline& deadline)
      : deadline_(deadline),
        least_end_ns_(deadline.expired() ? monotonic_ns() + kLeastWaitNs : 0) {}

  int64_t ns() {
    const int64_t left_ns = deadline_.remaining_ns();
    if (left_ns > 0) return left_ns;
    if (least_end_ns_ == 0 && left_ns < -LostTime::kLeastNs)
      least_end_ns_ = monotonic_ns() + kLeastWaitNs;
    return std::max(left_ns, least_end_ns_ == 0 ? left_ns : least_end_ns_ - monotonic_ns());
  }
  bool is_over() { return ns() <= 0; }

  static constexpr int64_t kLeastWaitNs = 1'000'000'000;

 private:
  const Deadline& deadline_;
  int64_t least_end_ns_;  // end of the extra second; 0: none
};

// Whether a deadline is in overtime (see Deadline::is_overtime()), for a polling wait. If the
// deadline is in overtime at the first query, all ranks may have been stopped. counts() then
// returns false for one more second, the second that TimeLeft adds.
class Overtime {
 public:
  bool counts(const Deadline& deadline) {
    const bool is_overtime = deadline.is_overtime();
    if (counts_from_ns_ == 0)
      counts_from_ns_ = is_overtime ? monotonic_ns() + TimeLeft::kLeastWaitNs : 1;
    return is_overtime && monotonic_ns() >= counts_from_ns_;
  }

 private:
  int64_t counts_from_ns_ = 0;  // 0: no query yet
};

}  // namespace dscomm
