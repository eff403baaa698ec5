#include "torch/convert.h"

#include <c10/util/Exception.h>

#include <utility>

#include "core/base/format.h"

namespace dscomm {
namespace {

template <typename Error>
std::exception_ptr make_exception(const std::string& message) {
  return std::make_exception_ptr(
      Error({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, message));
}

using Op = c10d::ReduceOp;

// Pairs of torch's and dscomm's operations and dtypes, the common ones first.
constexpr std::pair<Op::RedOpType, ReduceOp> kOps[] = {
    {Op::SUM, ReduceOp::kSum}, {Op::AVG, ReduceOp::kAvg},   {Op::PRODUCT, ReduceOp::kProduct},
    {Op::MIN, ReduceOp::kMin}, {Op::MAX, ReduceOp::kMax},   {Op::BAND, ReduceOp::kBand},
    {Op::BOR, ReduceOp::kBor}, {Op::BXOR, ReduceOp::kBxor}, {Op::PREMUL_SUM, ReduceOp::kPremulSum}};
constexpr std::pair<at::ScalarType, DType> kDTypes[] = {
    {at::kFloat, DType::kFloat32},
    {at::kBFloat16, DType::kBFloat16},
    {at::kHalf, DType::kFloat16},
    {at::kDouble, DType::kFloat64},
    {at::kLong, DType::kInt64},
    {at::kInt, DType::kInt32},
    {at::kByte, DType::kUInt8},
    {at::kBool, DType::kBool},
    {at::kChar, DType::kInt8},
    {at::kShort, DType::kInt16},
    {at::kComplexFloat, DType::kComplex64},
    {at::kComplexDouble, DType::kComplex128},
#if DSCOMM_TORCH_2
    {at::kUInt16, DType::kUInt16},
    {at::kUInt32, DType::kUInt32},
    {at::kUInt64, DType::kUInt64},
    {at::kFloat8_e4m3fn, DType::kFloat8E4M3FN},
    {at::kFloat8_e5m2, DType::kFloat8E5M2},
    {at::kFloat8_e4m3fnuz, DType::kFloat8E4M3FNUZ},
    {at::kFloat8_e5m2fnuz, DType::kFloat8E5M2FNUZ},
    {at::kFloat8_e8m0fnu, DType::kFloat8E8M0FNU},
#endif
};

ReduceOp to_reduce_op(Op::RedOpType op) {
  for (const auto& [theirs, ours] : kOps)
    if (theirs == op) return ours;
  raise_value_error(
      "op: got number {}, expected one of SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM",
      static_cast<int>(op));
}

double premul_factor(const c10d::ReduceOp& op) {
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (supplement == nullptr)
    raise_value_error(
        "op: PREMUL_SUM comes without a factor; make it with _make_nccl_premul_sum(factor)");
  std::vector<at::Tensor> tensors = premul_tensors(*supplement);
  if (tensors.empty()) return supplement->double_factor;
  if (tensors.size() != 1 || tensors[0].numel() != 1 || !tensors[0].device().is_cpu())
    raise_value_error(
        "op: the factor of PREMUL_SUM must be a number or one CPU tensor of one element");
  if (tensors[0].is_complex())
    raise_value_error("op: the factor of PREMUL_SUM is complex, expected a real number");
  return tensors[0].item<double>();
}

}  // namespace

std::string Argument::text() const {
  return index < 0 ? std::string(name) : format_text("{}[{}]", name, index);
}

void raise_value_error(const std::string& message) {
  std::rethrow_exception(make_exception<c10::ValueError>("dscomm: " + message));
}

void raise_type_error(const std::string& message) {
  std::rethrow_exception(make_exception<c10::TypeError>("dscomm: " + message));
}

DType to_dtype(at::ScalarType type, const Argument& argument) {
  for (const auto& [theirs, ours] : kDTypes)
    if (theirs == type) return ours;
  raise_type_error(argument.text() + ": got a tensor of dtype " + std::string(c10::toString(type)) +
                   ", expected bool, an integer, float16, bfloat16, float32, float64, complex64, "
                   "complex128 or a float8 (view the tensor as one of these to move its bytes)");
}

Reduction to_reduction(const c10d::ReduceOp& op, DType dtype) {
  Reduction reduction;
  reduction.dtype = dtype;
  reduction.op = to_reduce_op(op.op_);
  if (reduction.op == ReduceOp::kPremulSum) reduction.factor = premul_factor(op);
  if (Status status = check_reduction(reduction); !status.ok())
    std::rethrow_exception(to_exception(status, "op"));
  return reduction;
}

c10d::ReduceOp reduce_op_of_name(const std::string& name) {
  for (const auto& [theirs, ours] : kOps)
    if (theirs != Op::PREMUL_SUM && name == reduce_op_name(ours)) return Op(theirs);
  raise_value_error("op: got '" + name +
                    "', expected one of SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR");
}

std::exception_ptr to_exception(const Status& status, const std::string& where) {
  const std::string message = format_text("dscomm: {}: {}", where, status.message());
  switch (status.code()) {
    case Code::kInvalidArgument:
      return make_exception<c10::ValueError>(message);
    case Code::kUnsupported:
      return make_exception<c10::NotImplementedError>(message);
    default:
      return make_exception<DistBackendError>(message);
  }
}

}  // namespace dscomm
