// Float16 and bfloat16 to float32 and back, for sums to which several Teams, or several hops,
// contribute, and which are rounded once, at the end.
#pragma once

#include <cstddef>

#include "core/types/dtype.h"

namespace dscomm {

// `halves` may be unaligned; the floats must be aligned. The two must not overlap, except that
// those of narrow() may begin at the same address. dtype is that of the halves.
void widen(float* floats, const std::byte* halves, size_t count, DType dtype);
void narrow(std::byte* halves, const float* floats, size_t count, DType dtype);

}  // namespace dscomm
