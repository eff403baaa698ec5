#include "core/types/reduce_op.h"

#include "core/types/unknown_name.h"

namespace dscomm {
namespace {

Status no_meaning(const Reduction& reduction, const char* instead) {
  return make_status(Code::kUnsupported, "%s of %s has no meaning; %s",
                     reduce_op_name(reduction.op), dtype_name(reduction.dtype), instead);
}

}  // namespace

const char* reduce_op_name(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "SUM";
    case ReduceOp::kProduct:
      return "PRODUCT";
    case ReduceOp::kMin:
      return "MIN";
    case ReduceOp::kMax:
      return "MAX";
    case ReduceOp::kAvg:
      return "AVG";
    case ReduceOp::kBand:
      return "BAND";
    case ReduceOp::kBor:
      return "BOR";
    case ReduceOp::kBxor:
      return "BXOR";
    case ReduceOp::kPremulSum:
      return "PREMUL_SUM";
  }
  return unknown_name(static_cast<uint8_t>(op));
}

Status check_reduction(const Reduction& reduction) {
  const DType dtype = reduction.dtype;
  const ReduceOp op = reduction.op;
  if (static_cast<uint8_t>(op) >= kReduceOpCount) {
    return make_status(Code::kUnsupported,
                       "%s of %s is not supported: the operators are SUM, PRODUCT, MIN, MAX, AVG, "
                       "BAND, BOR, BXOR and PREMUL_SUM",
                       reduce_op_name(op), dtype_name(dtype));
  }
  if (static_cast<uint8_t>(dtype) >= kDTypeCount) {
    return make_status(Code::kUnsupported,
                       "%s of %s is not supported: dscomm reduces bool, the integers of 8 to 64 "
                       "bits, float16, bfloat16, float32, float64, complex64 and complex128",
                       reduce_op_name(op), dtype_name(dtype));
  }
  if (is_float8(dtype)) {
    return make_status(Code::kUnsupported,
                       "%s of %s is not supported: float8 can be moved but not reduced; convert to "
                       "bfloat16 first",
                       reduce_op_name(op), dtype_name(dtype));
  }

  const bool has_fractions = is_floating(dtype) || is_complex(dtype);
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kProduct:
      return {};
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      if (!is_complex(dtype)) return {};
      return no_meaning(reduction,
                        "reduce absolute values, or real and imaginary parts, as a floating dtype");
    case ReduceOp::kAvg:
      if (has_fractions) return {};
      return no_meaning(reduction, "use SUM and divide, or a floating dtype");
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor:
      if (!has_fractions) return {};
      return no_meaning(reduction,
                        "bitwise operators take bool and integers; view the tensor as an integer "
                        "dtype of the same size");
    case ReduceOp::kPremulSum:
      if (has_fractions) return {};
      return no_meaning(reduction, "use SUM and multiply, or a floating dtype");
  }
  return {};  // Not reached: op was checked to be in range.
}

}  // namespace dscomm
