#include "core/types/reduce_op.h"

#include <iterator>

namespace dscomm {
namespace {

// Indexed by the value of the enumerator.
constexpr const char* kReduceOpNames[] = {"SUM",  "PRODUCT", "MIN",  "MAX",       "AVG",
                                          "BAND", "BOR",     "BXOR", "PREMUL_SUM"};
static_assert(std::size(kReduceOpNames) == kReduceOpCount);

Status refused(const Reduction& reduction, const char* why) {
  return make_status(Code::kUnsupported, "{} of {} {}", reduce_op_name(reduction.op),
                     dtype_name(reduction.dtype), why);
}

}  // namespace

const char* reduce_op_name(ReduceOp op) {
  const auto value = static_cast<uint8_t>(op);
  return value < kReduceOpCount ? kReduceOpNames[value] : unknown_name(value);
}

Status check_reduction(const Reduction& reduction) {
  const DType dtype = reduction.dtype;
  const ReduceOp op = reduction.op;
  if (static_cast<uint8_t>(op) >= kReduceOpCount)
    return refused(reduction,
                   "is not supported: the operators are SUM, PRODUCT, MIN, MAX, AVG, BAND, BOR, "
                   "BXOR and PREMUL_SUM");
  if (static_cast<uint8_t>(dtype) >= kDTypeCount)
    return refused(reduction,
                   "is not supported: dscomm reduces bool, the integers of 8 to 64 bits, float16, "
                   "bfloat16, float32, float64, complex64 and complex128");
  if (is_float8(dtype))
    return refused(reduction,
                   "is not supported: float8 can be moved but not reduced; convert to bfloat16 "
                   "first");

  const bool has_fractions = is_floating(dtype) || is_complex(dtype);
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kProduct:
      return {};
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      if (!is_complex(dtype)) return {};
      return refused(reduction,
                     "has no meaning; reduce absolute values, or real and imaginary parts, as a "
                     "floating dtype");
    case ReduceOp::kAvg:
      if (has_fractions) return {};
      return refused(reduction, "has no meaning; use a floating dtype (integers: SUM and divide)");
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor:
      if (!has_fractions) return {};
      return refused(reduction,
                     "has no meaning; bitwise operators take bool and integers; view the tensor as "
                     "an integer dtype of the same size");
    case ReduceOp::kPremulSum:
      if (has_fractions) return {};
      return refused(reduction, "has no meaning; use a floating dtype (integers: SUM and scale)");
  }
  return {};  // Not reached: op was checked to be in range.
}

}  // namespace dscomm
