// Futex calls on the low half of a 64-bit word that several processes may map.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <climits>
#include <cstdint>

namespace dscomm {

// The address of the low half, which changes whenever the word grows.
inline const uint32_t* futex_half(const std::atomic<uint64_t>& word) {
  return reinterpret_cast<const uint32_t*>(&word) +
         (std::endian::native == std::endian::big ? 1 : 0);
}

// Sleeps while the low half of `word` equals that of `seen`, at most timeout_ns (0: until woken).
// It may return early; the caller must check the word again.
inline void futex_sleep(const std::atomic<uint64_t>& word, uint64_t seen, int64_t timeout_ns) {
  timespec timeout{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  syscall(SYS_futex, futex_half(word), FUTEX_WAIT, static_cast<uint32_t>(seen),
          timeout_ns > 0 ? &timeout : nullptr, nullptr, 0);
}

inline void futex_wake_all(const std::atomic<uint64_t>& word) {
  syscall(SYS_futex, futex_half(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace dscomm
