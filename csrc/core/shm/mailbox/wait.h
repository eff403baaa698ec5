// The wait of the collectives: until a word that another rank writes has reached a value.
//
// Spins while that is likely to pay, then yields the core, then sleeps on a futex. Between slices
// of sleep, a WaitMonitor checks whether waiting still makes sense: every member's abort record,
// the life of the ranks that the call needs. A wait is ended by the deadline, by the WaitMonitor,
// or by the rank that stores the word, which wakes sleepers.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/base/deadline.h"
#include "core/base/settings.h"
#include "core/base/status.h"
#include "core/shm/mailbox/layout.h"

namespace dscomm {

// How long each stage of a wait lasts.
struct WaitPolicy {
  int spin_pauses = 100;
  int64_t yield_ns = 200'000;
  int64_t slice_ns = 10'000'000;  // the longest sleep; 0: sleep until woken

  // For `local_ranks` ranks that share `usable_cores` cores.
  static WaitPolicy choose(const Settings& settings, int local_ranks, int usable_cores);
};

// Decides between slices of sleep whether a wait goes on.
class WaitMonitor {
 public:
  // If not OK, the wait ends with this status.
  virtual Status check() = 0;
  // The error of a wait whose deadline has passed.
  virtual Status timed_out() = 0;

 protected:
  ~WaitMonitor() = default;
};

inline void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // some ten ns; `yield` takes no time on cores without hardware threads
#endif
}

// On x86, waits some 20 ns between a call's first post and the first poll: polling too early steals
// the cache line from its writer, which then has to fetch it back. (8 bytes with cache-far cores:
// 0.57 us without the wait, 0.30 with it.)
inline void back_off() {
#if defined(__x86_64__) || defined(__i386__)
  const uint64_t began = __builtin_ia32_rdtsc();
  while (__builtin_ia32_rdtsc() - began < 50) {
  }
#endif
}

// Returns OK once word >= target. `sleepers` is this rank's own counter in its mailbox.
Status wait_slowly(const std::atomic<uint64_t>& word, uint64_t target,
                   std::atomic<uint32_t>& sleepers, const WaitPolicy& policy,
                   const Deadline& deadline, WaitMonitor& monitor);

// Spins, then calls `slowly`, which calls wait_slowly(). Each look also prefetches the cache line
// after the word's, so that it has arrived when the word is seen.
template <typename Slowly>
Status wait_at_least(const std::atomic<uint64_t>& word, uint64_t target, const WaitPolicy& policy,
                     const Slowly& slowly) {
  const auto is_there = [&] {
    __builtin_prefetch(reinterpret_cast<const std::byte*>(&word) + kLinePairBytes / 2);
    return word.load(std::memory_order_acquire) >= target;  // pairs with the owner's exchange
  };
  if (is_there()) return {};
  for (int i = 0; i < policy.spin_pauses; ++i) {
    pause_core();
    if (is_there()) return {};
  }
  return slowly();
}

}  // namespace dscomm
