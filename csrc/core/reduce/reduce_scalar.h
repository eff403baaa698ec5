// The scalar kernels without the guard around them, for reduce() to call where a vector kernel
// would not earn its size: products of 8-bit, 64-bit and complex elements, and processors that have
// none of the instruction sets we build for.
#pragma once

#include "core/reduce/operands.h"

namespace dscomm {

// The caller holds a ScopedFloatEnvironment; not inlined, so that the arithmetic stays under it.
[[gnu::noinline]] void reduce_elements(const Operands& operands, const Reduction& reduction,
                                       int divisor);

}  // namespace dscomm
