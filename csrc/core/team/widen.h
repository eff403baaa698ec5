// Converts float16 and bfloat16 to float32 and back, for sums over several Teams, or several hops,
// that are rounded only once, at the end.
#pragma once

#include <cstddef>

#include "core/types/reduce_op.h"

namespace dscomm {

// Whether sums of this reduction are float32 although its values are halves. Always for AVG and
// PREMUL_SUM, which would round halves once more and may exceed their range; never for MIN and MAX;
// else `halves_as_float32` decides.
bool is_widened(const Reduction& reduction, bool halves_as_float32);

// `halves` may be unaligned; the floats must be aligned. The two buffers must not overlap, except
// that in narrow() they may begin at the same address. dtype is that of the halves.
void widen(float* floats, const std::byte* halves, size_t count, DType dtype);
void narrow(std::byte* halves, const float* floats, size_t count, DType dtype);

}  // namespace dscomm
