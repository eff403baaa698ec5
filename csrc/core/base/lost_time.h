// LostTime: intervals in which this process could not run, because it was stopped (SIGSTOP), frozen
// with its cgroup, or paused with its virtual machine.
//
// A stop gives the library no notice, but a sleep then lasts much longer than requested. So each
// wait that sleeps in slices notes how long the slices took, and deadlines leave the excess out.
// A job that is stopped as a whole therefore continues where it was. If one rank alone is stopped,
// the others still run into their deadlines.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace dscomm {

class LostTime {
 public:
  static LostTime& of_process();

  // A sleep that should have ended at `expected_ns` ended at `ended_ns`, on CLOCK_MONOTONIC. A
  // delay of less than half a second is attributed to a busy machine.
  void note(int64_t expected_ns, int64_t ended_ns) {
    if (ended_ns - expected_ns >= kLeastNs) add(expected_ns, ended_ns);
  }

  // Time lost since `start_ns`.
  int64_t since(int64_t start_ns) const {
    // Relaxed: a thread sees its own notes; those of another thread may count one slice later.
    return last_end_ns_.load(std::memory_order_relaxed) <= start_ns ? 0 : sum_since(start_ns);
  }

  static constexpr int64_t kLeastNs = 500'000'000;

 private:
  struct Interval {
    int64_t begin_ns = 0, end_ns = 0;
  };

  void add(int64_t begin_ns, int64_t end_ns);
  int64_t sum_since(int64_t start_ns) const;

  mutable std::mutex mutex_;
  std::array<Interval, 16> intervals_;  // the last ones, newest first, disjoint
  std::atomic<int64_t> last_end_ns_{0};
};

}  // namespace dscomm
