// WireReduction: the form in which values travel in reductions by MPI, by pairs and along a chain,
// and the conversions on each side.
//
//   PREMUL_SUM: values are multiplied first, then travel as SUM
//   AVG: travels as SUM; every rank then divides the same bits by the same number
//   bool: travels as 0 or 1
//   float16, bfloat16: travel as they are, rounded once per hop (by pairs only at the end); or as
//     float32, rounded once at the end: see is_widened()
#pragma once

#include <cstddef>

#include "core/types/reduce_op.h"

namespace dscomm {

class WireReduction {
 public:
  // The reduction must have passed check_reduction().
  WireReduction(const Reduction& whole, int ranks, bool halves_as_float32);

  DType dtype() const { return dtype_; }
  ReduceOp op() const { return op_; }
  size_t wire_bytes() const { return dtype_bytes(dtype_); }         // of a travelling element
  size_t value_bytes() const { return dtype_bytes(whole_.dtype); }  // of a caller's element

  // Converts the caller's values for travel. `wire` is aligned for its dtype.
  void enter(std::byte* wire, const std::byte* values, size_t count) const;
  // Converts travelled values back; overwrites `wire`.
  void leave(std::byte* results, std::byte* wire, size_t count) const;

 private:
  const Reduction whole_;
  const int ranks_;
  const bool is_widened_;
  DType dtype_;
  ReduceOp op_;
};

}  // namespace dscomm
