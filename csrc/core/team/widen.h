// Float16 and bfloat16 to float32 and back, for sums that are to be rounded once at the end though
// several Teams, or several hops, add to them.
#pragma once

#include <cstddef>

#include "core/types/dtype.h"

namespace dscomm {

// `halves` need not be aligned, the floats must be. The two do not overlap, but narrow()'s may
// begin at the same place. dtype is that of the halves.
void widen(float* floats, const std::byte* halves, size_t count, DType dtype);
void narrow(std::byte* halves, const float* floats, size_t count, DType dtype);

}  // namespace dscomm
