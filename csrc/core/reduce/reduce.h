// All arithmetic of dscomm: n sources -> one destination, element by element.
//
// An element's result is op(...op(op(s0, s1), s2)..., s[n-1]): sources are combined in their order
// on every instruction set, so every rank gets the same bits. fp16 and bf16 accumulate in fp32 and
// round once (to nearest even). AVG divides by `divisor` (the group's size) after the sum, in the
// accumulator's type: double for fp64 and complex128, else float. PREMUL_SUM's factor is rounded to
// that type first. For complex numbers, divisor and factor scale both parts, and products are (ac -
// bd, ad + bc). Integers wrap. In MIN and MAX, -0 is less than +0. NaN payloads are unspecified;
// all other bits are fixed.
//
// Kernels run with flush-to-zero and denormals-are-zero off and rounding to nearest, whatever the
// calling thread's mode, which is restored afterwards. They are built with -ffp-contract=off: no
// fused multiply-add.
#pragma once

#include <cstddef>

#include "core/types/reduce_op.h"

namespace dscomm {

// dst[i] = op(sources[0][i], ..., sources[n-1][i]) for i < count. n >= 1; n == 1 copies, but still
// applies AVG's division and PREMUL_SUM's factor, and makes bool 0 or 1. dst may equal any of the
// sources; no other overlap is allowed. Pointers may be unaligned. The reduction must have passed
// check_reduction(). Only AVG uses divisor.
void reduce(void* dst, const void* const* sources, int n, size_t count, const Reduction& reduction,
            int divisor);

// reduce() in plain C++ without SIMD, one element at a time: the reference for tests.
void reduce_scalar(void* dst, const void* const* sources, int n, size_t count,
                   const Reduction& reduction, int divisor);

// The instruction set that reduce() uses here, by Highway's name: "AVX2", "AVX3".
const char* reduce_target_name();

}  // namespace dscomm
