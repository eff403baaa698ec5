// The scalar kernels without the floating-point guard. reduce() uses them where a vector kernel is
// not worth its code size: products of 8-bit, 64-bit and complex elements, and processors without
// any of the supported instruction sets.
#pragma once

#include "core/reduce/operands.h"

namespace dscomm {

// The caller must hold a ScopedFloatEnvironment; noinline keeps the arithmetic inside its scope.
[[gnu::noinline]] void reduce_elements(const Operands& operands, const Reduction& reduction,
                                       int divisor);

}  // namespace dscomm
