// The only arithmetic in dscomm: n sources -> one destination, element by element.
//
// The result of an element is op(...op(op(s0, s1), s2)..., s[n-1]): the order of the sources is the
// order of the arithmetic, whatever the instruction set, so that every rank gets the same bits.
// fp16 and bf16 accumulate in fp32 and round once (to nearest even). AVG divides by `divisor` (the
// group's size) after the sum, in the accumulator's type: double for fp64 and complex128, float for
// the others. PREMUL_SUM's factor is rounded to that type first. Of complex numbers, divisor and
// factor scale both parts, and products are (ac - bd, ad + bc). Integers wrap. In MIN and MAX, -0
// is less than +0. NaN payloads are left open, all other bits are fixed.
//
// Flush-to-zero and denormals-are-zero are off and rounding is to nearest while a kernel runs,
// whatever the calling thread has set, and the thread's mode is restored afterwards.
// -ffp-contract=off: no fused multiply-add is formed.
#pragma once

#include <cstddef>

#include "core/types/reduce_op.h"

namespace dscomm {

// dst[i] = op(sources[0][i], ..., sources[n-1][i]) for i < count.
// n >= 1 (n == 1 copies, and applies AVG's division and PREMUL_SUM's factor). dst may be the same
// pointer as any of the sources; any other overlap is not allowed. No alignment is asked for.
// The reduction must have passed check_reduction(). divisor is used by AVG alone.
void reduce(void* dst, const void* const* sources, int n, size_t count, const Reduction& reduction,
            int divisor);

// The same, one element at a time, in plain C++ without SIMD: the reference that tests compare
// with.
void reduce_scalar(void* dst, const void* const* sources, int n, size_t count,
                   const Reduction& reduction, int divisor);

// Name of the instruction set that reduce() runs on here, as Highway calls it: "AVX2", "AVX3".
const char* reduce_target_name();

}  // namespace dscomm
