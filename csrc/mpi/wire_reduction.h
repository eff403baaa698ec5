// WireReduction: what of a reduction travels where MPI reduces, and what is done on each side of
// the wire.
//
//   PREMUL_SUM   every value is multiplied before it travels; then it is SUM
//   AVG          is SUM; every rank then divides the same bits by the same number
//   bool         travels as 0 or 1
//   halves       travel as they are, rounded once a hop; or as float32, rounded once, at the end:
//                where that is asked for, and with PREMUL_SUM and AVG
#pragma once

#include <cstddef>

#include "core/types/reduce_op.h"

namespace dscomm {

class WireReduction {
 public:
  // The reduction has passed check_reduction().
  WireReduction(const Reduction& whole, int ranks, bool halves_as_float32);

  DType dtype() const { return dtype_; }
  ReduceOp op() const { return op_; }
  size_t wire_bytes() const { return dtype_bytes(dtype_); }         // of an element that travels
  size_t value_bytes() const { return dtype_bytes(whole_.dtype); }  // of one of the caller's

  // From the caller's values to what travels. `wire` is aligned for its dtype.
  void enter(std::byte* wire, const std::byte* values, size_t count) const;
  // And back; uses up what travelled.
  void leave(std::byte* results, std::byte* wire, size_t count) const;

 private:
  const Reduction whole_;
  const int ranks_;
  const bool is_widened_;
  DType dtype_;
  ReduceOp op_;
};

}  // namespace dscomm
