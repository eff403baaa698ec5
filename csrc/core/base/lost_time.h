// LostTime: when this process did not run, though it was not waiting for anything: all of it was
// stopped (SIGSTOP), frozen with its cgroup, or paused with its machine.
//
// No signal tells a process that it went on, but a sleep that lasted much longer than it was asked
// to does. Every wait that sleeps in slices notes how long they took; deadlines leave such time
// out. So a job that is stopped as a whole goes on where it was. A rank that is stopped alone is
// missed by the others, which run.
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

  // A wait that was to be over at `expected_ns` was over at `ended_ns`, on CLOCK_MONOTONIC. Less
  // than half a second longer is a busy machine.
  void note(int64_t expected_ns, int64_t ended_ns) {
    if (ended_ns - expected_ns >= kLeastNs) add(expected_ns, ended_ns);
  }

  // How much was lost since then.
  int64_t since(int64_t start_ns) const {
    // Relaxed: a thread finds what it has noted itself; what another one notes at the same time
    // counts a slice later.
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
  std::array<Interval, 16> intervals_;  // the last ones, which do not overlap, the newest first
  std::atomic<int64_t> last_end_ns_{0};
};

}  // namespace dscomm
