// What every kernel takes, and the two rules that make one dtype's reduction another's. Both the
// vector kernels and the scalar twin use them.
#pragma once

#include <cstddef>

#include "core/types/reduce_op.h"

namespace dscomm {

struct Operands {
  void* dst;
  const void* const* sources;
  int n;
  size_t count;  // of elements
};

using Kernel = void (*)(const Operands& operands, const Reduction& reduction, int divisor);

// Real and imaginary parts are reduced each for itself, by every operator but PRODUCT. PREMUL_SUM's
// factor and AVG's divisor are real, so they scale both parts.
inline Operands as_real_numbers(const Operands& complex_numbers) {
  Operands real_numbers = complex_numbers;
  real_numbers.count *= 2;
  return real_numbers;
}

// The operators of bool are three: what SUM and MAX, or PRODUCT and MIN, do is one of them.
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

}  // namespace dscomm
