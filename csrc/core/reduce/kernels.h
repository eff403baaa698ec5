// The common parts of the vector kernels (reduce.cc) and of their scalar twin, which computes the
// same reductions without SIMD (reduce_scalar.cc): the arguments of every kernel, two rules that
// reduce one dtype as another, and the entry point of the twin.
#pragma once

#include <cstddef>

#include "core/types/reduce_op.h"

namespace dscomm {

struct Operands {
  void* dst;
  const void* const* sources;
  int n;
  size_t count;  // elements
};

using Kernel = void (*)(const Operands& operands, const Reduction& reduction, int divisor);

// Of complex numbers, every operator except PRODUCT reduces real and imaginary parts separately.
// PREMUL_SUM's factor and AVG's divisor are real, so they scale both parts.
inline Operands as_real_numbers(const Operands& complex_numbers) {
  Operands real_numbers = complex_numbers;
  real_numbers.count *= 2;
  return real_numbers;
}

// bool has three operators (or, and, xor): SUM and MAX are "or", PRODUCT and MIN are "and".
inline ReduceOp bitwise_op_of_bool(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
      return ReduceOp::kBor;
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
      return ReduceOp::kBand;
    default:
      return op;
  }
}

// The scalar twin. reduce() uses it where a vector kernel is not worth its code size: for products
// of complex numbers and of 8-bit and 64-bit integers, and on processors without any of the
// supported instruction sets.
// The caller must hold a ScopedFloatEnvironment; noinline keeps the arithmetic inside its scope.
[[gnu::noinline]] void reduce_elements(const Operands& operands, const Reduction& reduction,
                                       int divisor);

}  // namespace dscomm
