// The reduction operators, and the dtypes that each supports.
//
// - SUM, PRODUCT: all but float8; for bool, SUM is "or" and PRODUCT is "and".
// - MIN, MAX: all but complex and float8; for bool, MIN is "and", MAX is "or". A NaN gives NaN.
// - AVG: floating and complex: the sum, divided by the number of ranks.
// - BAND, BOR, BXOR: integers and bool.
// - PREMUL_SUM: floating and complex: each rank's values are multiplied by the factor, then summed.
#pragma once

#include <cstdint>

#include "core/base/status.h"
#include "core/types/dtype.h"

namespace dscomm {

// Values are part of a call's record: append, never renumber.
enum class ReduceOp : uint8_t {
  kSum = 0,
  kProduct = 1,
  kMin = 2,
  kMax = 3,
  kAvg = 4,
  kBand = 5,
  kBor = 6,
  kBxor = 7,
  kPremulSum = 8,
};
inline constexpr int kReduceOpCount = 9;

const char* reduce_op_name(ReduceOp op);  // "SUM", "PREMUL_SUM"

// The parameters of a reduction: all but the data.
struct Reduction {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  double factor = 1.0;  // PREMUL_SUM only
};

// OK, or kUnsupported with a message that names the operator, the dtype, and what to use instead.
Status check_reduction(const Reduction& reduction);

}  // namespace dscomm
