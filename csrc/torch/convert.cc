#include "torch/convert.h"

#include <c10/util/Exception.h>

namespace dscomm {
namespace {

template <typename Error>
std::exception_ptr make_exception(const std::string& message) {
  return std::make_exception_ptr(
      Error({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, message));
}

ReduceOp to_reduce_op(c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::kSum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::kAvg;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::kProduct;
    case c10d::ReduceOp::MIN:
      return ReduceOp::kMin;
    case c10d::ReduceOp::MAX:
      return ReduceOp::kMax;
    case c10d::ReduceOp::BAND:
      return ReduceOp::kBand;
    case c10d::ReduceOp::BOR:
      return ReduceOp::kBor;
    case c10d::ReduceOp::BXOR:
      return ReduceOp::kBxor;
    case c10d::ReduceOp::PREMUL_SUM:
      return ReduceOp::kPremulSum;
    default:
      break;
  }
  raise_value_error("op: got number " + std::to_string(static_cast<int>(op)) +
                    ", expected one of SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM");
}

double premul_factor(const c10d::ReduceOp& op) {
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (supplement == nullptr)
    raise_value_error(
        "op: PREMUL_SUM comes without a factor; make it with _make_nccl_premul_sum(factor)");
  std::vector<at::Tensor> tensors = premul_tensors(*supplement);
  if (tensors.empty()) return supplement->double_factor;
  if (tensors.size() != 1 || tensors[0].numel() != 1 || !tensors[0].device().is_cpu())
    raise_value_error("op: the factor of PREMUL_SUM is a number or one CPU tensor of one element");
  if (tensors[0].is_complex())
    raise_value_error("op: the factor of PREMUL_SUM is complex, expected a real number");
  return tensors[0].item<double>();
}

}  // namespace

std::string Argument::text() const {
  return index < 0 ? std::string(name) : std::string(name) + "[" + std::to_string(index) + "]";
}

void raise_value_error(const std::string& message) {
  std::rethrow_exception(make_exception<c10::ValueError>("dscomm: " + message));
}

void raise_type_error(const std::string& message) {
  std::rethrow_exception(make_exception<c10::TypeError>("dscomm: " + message));
}

DType to_dtype(at::ScalarType type, const Argument& argument) {
  switch (type) {
    case at::kBool:
      return DType::kBool;
    case at::kByte:
      return DType::kUInt8;
    case at::kChar:
      return DType::kInt8;
    case at::kShort:
      return DType::kInt16;
    case at::kInt:
      return DType::kInt32;
    case at::kLong:
      return DType::kInt64;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kComplexFloat:
      return DType::kComplex64;
    case at::kComplexDouble:
      return DType::kComplex128;
#if DSCOMM_TORCH_2
    case at::kUInt16:
      return DType::kUInt16;
    case at::kUInt32:
      return DType::kUInt32;
    case at::kUInt64:
      return DType::kUInt64;
    case at::kFloat8_e4m3fn:
      return DType::kFloat8E4M3FN;
    case at::kFloat8_e5m2:
      return DType::kFloat8E5M2;
    case at::kFloat8_e4m3fnuz:
      return DType::kFloat8E4M3FNUZ;
    case at::kFloat8_e5m2fnuz:
      return DType::kFloat8E5M2FNUZ;
    case at::kFloat8_e8m0fnu:
      return DType::kFloat8E8M0FNU;
#endif
    default:
      break;
  }
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
  using Op = c10d::ReduceOp;
  for (Op::RedOpType op :
       {Op::SUM, Op::AVG, Op::PRODUCT, Op::MIN, Op::MAX, Op::BAND, Op::BOR, Op::BXOR})
    if (name == reduce_op_name(to_reduce_op(op))) return Op(op);
  raise_value_error("op: got '" + name +
                    "', expected one of SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR");
}

std::exception_ptr to_exception(const Status& status, const std::string& where) {
  std::string message = "dscomm: " + where + ": " + status.message();
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
