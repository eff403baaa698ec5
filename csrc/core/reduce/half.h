// Converts float16 and bfloat16 to float32 and back, one element at a time.
//
// Conversion to float32 is exact. Conversion from float32 rounds to nearest even, keeps denormals
// and infinities, overflows to infinity, and makes every NaN a quiet NaN. All is integer arithmetic
// except one exact multiplication, so the bits do not depend on the instruction set.
#pragma once

#include <bit>
#include <cstdint>

namespace dscomm {

// value / 2^shift, to nearest even. 1 <= shift <= 31, and value < 2^31 so that the sum fits.
inline uint32_t shift_right_to_nearest_even(uint32_t value, uint32_t shift) {
  const uint32_t just_below_half = (1u << (shift - 1)) - 1;
  const uint32_t is_odd = (value >> shift) & 1;
  return (value + just_below_half + is_odd) >> shift;
}

inline float float_from_bfloat16(uint16_t bfloat16) {
  return std::bit_cast<float>(uint32_t{bfloat16} << 16);
}

inline uint16_t bfloat16_from_float(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  // A NaN is not rounded: the result could be an infinity, or carry into the sign.
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7fc0);
  return static_cast<uint16_t>(sign | shift_right_to_nearest_even(magnitude, 16));
}

inline float float_from_float16(uint16_t float16) {
  const uint32_t sign = uint32_t{float16} << 16 & 0x80000000;
  const uint32_t exponent = float16 >> 10 & 0x1f;
  const uint32_t fraction = float16 & 0x3ff;
  uint32_t magnitude;
  if (exponent == 0) {
    magnitude = std::bit_cast<uint32_t>(static_cast<float>(fraction) * 0x1p-24f);
  } else if (exponent == 0x1f) {
    magnitude = 0x7f800000 | fraction << 13;
  } else {
    magnitude = (exponent + 127 - 15) << 23 | fraction << 13;
  }
  return std::bit_cast<float>(sign | magnitude);
}

inline uint16_t float16_from_float(float value) {
  constexpr uint32_t kInfinity = 0x7f800000;
  constexpr uint32_t kTwoToThe16 = (127 + 16) << 23;      // overflows with any rounding
  constexpr uint32_t kSmallestNormal = (127 - 14) << 23;  // 2^-14
  constexpr uint32_t kRebias = (127 - 15) << 23;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;

  uint32_t rounded;
  if (magnitude > kInfinity) {
    rounded = 0x7e00;
  } else if (magnitude >= kTwoToThe16) {
    rounded = 0x7c00;
  } else if (magnitude >= kSmallestNormal) {
    // A carry from the fraction correctly enters the exponent; from 65520 on, this gives infinity.
    rounded = shift_right_to_nearest_even(magnitude - kRebias, 13);
  } else {
    // Denormals are multiples of 2^-24; the value is significand * 2^(exponent - 150). Anything
    // below half a unit, which includes every denormal float32, becomes 0.
    const uint32_t exponent = magnitude >> 23;
    const uint32_t significand = (magnitude & 0x7fffff) | 0x800000;
    const uint32_t shift = 150 - 24 - exponent;
    rounded = shift <= 24 ? shift_right_to_nearest_even(significand, shift) : 0;
  }
  return static_cast<uint16_t>(sign | rounded);
}

}  // namespace dscomm
