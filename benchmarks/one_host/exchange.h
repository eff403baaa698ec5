// An exchange of cache lines between two cores: each stores its own and waits for the other's. The
// time tells where the cores are; see docs/benchmarks.md.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "options.h"

namespace one_host {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct alignas(128) ExchangeLine {
  std::atomic<uint64_t> round{0};  // released by its owner, acquired by the other
};

// Rounds begin with 1 and grow.
inline void exchange(ExchangeLine& mine, const ExchangeLine& theirs, uint64_t round) {
  constexpr uint64_t kSpins = 100'000'000;  // seconds, after which the other core counts as absent
  mine.round.store(round, std::memory_order_release);  // pairs with the load below, of the other
  for (uint64_t spins = 0; theirs.round.load(std::memory_order_acquire) < round; ++spins) {
    pause();
    if (spins == kSpins) fail("the other core did not answer");
  }
}

// The median, of at least one number.
inline double middle(std::vector<double> numbers) {
  const auto half = numbers.begin() + static_cast<std::ptrdiff_t>(numbers.size() / 2);
  std::nth_element(numbers.begin(), half, numbers.end());
  return *half;
}

}  // namespace one_host
