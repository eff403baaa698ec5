#include "core/base/lost_time.h"

#include <algorithm>

namespace dscomm {

LostTime& LostTime::of_process() {
  static LostTime* const lost = new LostTime;  // never freed: threads may wait until the process
                                               // ends
  return *lost;
}

// Merges intervals, because several threads note the same stop, each from its own slice.
void LostTime::add(int64_t begin_ns, int64_t end_ns) {
  std::lock_guard lock(mutex_);
  Interval& newest = intervals_.front();
  if (begin_ns < newest.end_ns) {
    newest.begin_ns = std::min(newest.begin_ns, std::max(begin_ns, intervals_[1].end_ns));
    newest.end_ns = std::max(newest.end_ns, end_ns);
  } else {
    std::move_backward(intervals_.begin(), intervals_.end() - 1, intervals_.end());
    newest = {begin_ns, end_ns};
  }
  last_end_ns_.store(newest.end_ns, std::memory_order_relaxed);  // see since()
}

int64_t LostTime::sum_since(int64_t start_ns) const {
  std::lock_guard lock(mutex_);
  int64_t sum_ns = 0;
  for (const Interval& interval : intervals_)
    sum_ns += std::max<int64_t>(interval.end_ns - std::max(interval.begin_ns, start_ns), 0);
  return sum_ns;
}

}  // namespace dscomm
