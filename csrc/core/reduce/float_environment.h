// Sets the floating-point mode of kernels, whatever the calling thread's mode.
//
// Flush-to-zero, denormals-are-zero and the rounding direction are bits of a register of each
// thread. A training script that calls torch.set_flush_denormal(True) sets the first two in the
// calling thread, not in a worker thread that may run the collective. Without this guard the result
// would depend on the thread that computes it, and differ between ranks.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace dscomm {

#if defined(__x86_64__)

using FloatControl = uint32_t;
inline FloatControl read_float_control() { return _mm_getcsr(); }
inline void write_float_control(FloatControl control) { _mm_setcsr(control); }
// MXCSR: flush to zero is bit 15, denormals are zero is bit 6, rounding is bits 13 and 14.
inline constexpr FloatControl kFlushBits = 1u << 15 | 1u << 6;
inline constexpr FloatControl kRoundingBits = 3u << 13;

#elif defined(__aarch64__)

using FloatControl = uint64_t;
inline FloatControl read_float_control() {
  uint64_t control;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  return control;
}
inline void write_float_control(FloatControl control) {
  asm volatile("msr fpcr, %0" : : "r"(control) : "memory");
}
// FPCR: FIZ is bit 0 (flushes inputs), FZ16 is bit 19, FZ is bit 24, rounding is bits 22 and 23.
inline constexpr FloatControl kFlushBits = 1u << 24 | 1u << 19 | 1u << 0;
inline constexpr FloatControl kRoundingBits = 3u << 22;

#else
#error "dscomm does not know how this processor is told to keep denormals: add it above"
#endif

// For its lifetime, keeps denormals and rounds to nearest even; then restores the thread's mode.
// Exception flags that are raised within its lifetime stay raised, as after any arithmetic.
//
// The compiler may move arithmetic across the change of the register, but not out of a function
// that it does not inline. So call a noinline kernel under a guard; do no arithmetic in its scope.
class ScopedFloatEnvironment {
 public:
  ScopedFloatEnvironment() : saved_(read_float_control()) {
    if (saved_ & kModeBits) write_float_control(saved_ & ~kModeBits);
  }
  ~ScopedFloatEnvironment() {
    if (saved_ & kModeBits) write_float_control(read_float_control() | (saved_ & kModeBits));
  }
  ScopedFloatEnvironment(const ScopedFloatEnvironment&) = delete;
  ScopedFloatEnvironment& operator=(const ScopedFloatEnvironment&) = delete;

 private:
  // Zero in these bits is the required mode on both architectures.
  static constexpr FloatControl kModeBits = kFlushBits | kRoundingBits;
  FloatControl saved_;
};

}  // namespace dscomm
