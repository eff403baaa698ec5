// A memory fence. Omitted under ThreadSanitizer, except in tests/schedules, which supports fences.
#pragma once

#include <atomic>

namespace dscomm {

inline void fence(std::memory_order order) {
#if defined(__SANITIZE_THREAD__) && !defined(DSCOMM_KNOWS_FENCES)
  (void)order;
#else
  std::atomic_thread_fence(order);
#endif
}

}  // namespace dscomm
