#include "core/team/widen.h"

#include <cstring>

#include "core/reduce/half.h"

namespace dscomm {

bool is_widened(const Reduction& reduction, bool halves_as_float32) {
  // MIN and MAX choose one of their sources, so there is nothing to round.
  const bool is_choice = reduction.op == ReduceOp::kMin || reduction.op == ReduceOp::kMax;
  const bool is_scaled = reduction.op == ReduceOp::kAvg || reduction.op == ReduceOp::kPremulSum;
  return is_half(reduction.dtype) && !is_choice && (halves_as_float32 || is_scaled);
}

void widen(float* floats, const std::byte* halves, size_t count, DType dtype) {
  auto convert = [&](auto float_from_half) {
    for (size_t i = 0; i < count; ++i) {
      uint16_t half;
      std::memcpy(&half, halves + i * sizeof half, sizeof half);
      floats[i] = float_from_half(half);
    }
  };
  if (dtype == DType::kBFloat16)
    convert(float_from_bfloat16);
  else
    convert(float_from_float16);
}

void narrow(std::byte* halves, const float* floats, size_t count, DType dtype) {
  auto convert = [&](auto half_from_float) {
    for (size_t i = 0; i < count; ++i) {
      uint16_t half = half_from_float(floats[i]);
      std::memcpy(halves + i * sizeof half, &half, sizeof half);
    }
  };
  if (dtype == DType::kBFloat16)
    convert(bfloat16_from_float);
  else
    convert(float16_from_float);
}

}  // namespace dscomm
