// Float16 and bfloat16 to float32 and back, for sums to which several Teams, or several hops,
// contribute, and which are rounded once, at the end.
#pragma once

#include <cstddef>

#include "core/types/reduce_op.h"

namespace dscomm {

// Whether sums of this reduction are float32 although its values are halves: always if they are
// multiplied or divided, which would round once more and may exceed the range of halves.
bool is_widened(const Reduction& reduction, bool halves_as_float32);

// `halves` may be unaligned; the floats must be aligned. The two must not overlap, except that
// those of narrow() may begin at the same address. dtype is that of the halves.
void widen(float* floats, const std::byte* halves, size_t count, DType dtype);
void narrow(std::byte* halves, const float* floats, size_t count, DType dtype);

}  // namespace dscomm
