// CacheDistance: whether this rank's core shares a cache with the readers of its data: the
// last-level cache (cache-near; else cache-far), or even the core's own caches.
//
// Each rank writes a latency probe now and then, and times the load of another rank's probe, which
// comes from that rank's cache. The topology is no evidence: a virtual machine may report one cache
// where the host has several, and its cores may move from one cache to another. Ranks may differ in
// the result, because it changes only how and where a rank writes its own data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/base/deadline.h"

namespace dscomm {

// A timed load of a 64-bit word, in ns of CLOCK_MONOTONIC. took_ns excludes reading the clock.
struct TimedLoad {
  int64_t value, began_ns, took_ns;
};

// Delays later loads until earlier instructions are done. Otherwise a processor that speculates
// that a wait is over could load the word before reading the clock: far cores would look near.
inline void fence_loads() {
#if defined(__x86_64__)
  __builtin_ia32_lfence();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

template <typename Load>
TimedLoad time_load(Load load) {
  fence_loads();
  const int64_t clock_began = monotonic_ns(), before = monotonic_ns();
  fence_loads();
  const auto value = static_cast<int64_t>(load());
  const int64_t after = monotonic_ns();
  return {value, before, (after - before) - (before - clock_began)};
}

class CacheDistance {
 public:
  explicit CacheDistance(int members) : members_(static_cast<size_t>(members)) {}

  // Adds a sample: how long a load of `member`'s latency probe took. Two samples in a row must
  // both be near, or both far, before they count, because an interruption makes a load slower.
  void add(int member, int64_t load_ns);

  // Whether most members with a known distance are cache-far.
  bool is_far() const { return far_ > near_; }
  // Whether all members with a known distance (at least one) run on this core, as hardware threads
  // or in turn, so that they share its first-level caches.
  bool is_same_core() const { return same_ > 0 && same_ == far_ + near_; }
  // A text for the log, a string literal.
  const char* describe() const {
    if (far_ + near_ == 0) return "distance not measured yet";
    if (is_far()) return "cache-far";
    return is_same_core() ? "same core" : "cache-near";
  }

 private:
  struct Member {
    bool known = false, far = false, same = false;
    std::optional<bool> last;  // whether the last sample was far
    double mean_ns = 0;        // moving average of its near samples
    int loads = 0;             // near samples, up to kLoads
  };
  std::vector<Member> members_;
  int far_ = 0, near_ = 0;  // numbers of members
  int same_ = 0;            // members of near_ on this core
};

}  // namespace dscomm
