// Distance: whether this rank's core shares a cache with those of the ranks that read its data, the
// last one or even the first ones.
//
// What is measured is how long a load takes that has to come out of another core's cache: each rank
// writes a latency probe now and then, and times a load of one other's. Topology cannot tell:
// virtual machines show one cache where there are several, and move between them while they run.
// Each rank decides for itself, as the answer changes only how and where it writes what the others
// read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/base/deadline.h"

namespace dscomm {

// A load of a word of 64 bits, timed by the clock that ranks of a host share, without what reading
// the clock takes.
struct TimedLoad {
  int64_t value, began_ns, took_ns;
};

// Lets no later load begin before earlier instructions are done: a processor that guesses that a
// wait is over would fetch the word before it reads the clock, and far would look near.
inline void finish_instructions() {
#if defined(__x86_64__)
  __builtin_ia32_lfence();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

template <typename Load>
TimedLoad time_load(Load load) {
  finish_instructions();
  const int64_t clock_began = monotonic_ns(), before = monotonic_ns();
  finish_instructions();
  const auto value = static_cast<int64_t>(load());
  const int64_t after = monotonic_ns();
  return {value, before, (after - before) - (before - clock_began)};
}

class Distance {
 public:
  explicit Distance(int members) : members_(static_cast<size_t>(members)) {}

  // One load of `member`'s latency probe took so long, without what reading the clock takes. Two in
  // a row are believed, since what interrupts a load only makes it slower.
  void add(int member, int64_t load_ns);

  // Whether most members that are known are far away.
  bool is_far() const { return far_ > near_; }
  // Whether there are known members and all run on this core, as its other hardware threads, or
  // take turns on it: what either writes is in the other's caches.
  bool is_same_core() const { return same_ > 0 && same_ == far_ + near_; }

 private:
  struct Member {
    bool known = false, far = false, same = false;
    bool last = false;  // what the last load said
    bool has_last = false;
    double mean_ns = 0;  // of its near loads, the last ones above all
    int loads = 0;       // near ones, up to kLoads
  };
  std::vector<Member> members_;
  int far_ = 0, near_ = 0;  // how many of them are
  int same_ = 0;            // of the near ones
};

}  // namespace dscomm
