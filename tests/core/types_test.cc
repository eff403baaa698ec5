// Names, sizes and kinds of dtypes, and which operator is defined for which dtype.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "core/types/dtype.h"
#include "core/types/reduce_op.h"

namespace dscomm {
namespace {

DType dtype_of(int value) { return static_cast<DType>(value); }
ReduceOp op_of(int value) { return static_cast<ReduceOp>(value); }

TEST(Types, NamesAndSizesMatchPyTorch) {
  const struct {
    DType dtype;
    std::string name;
    size_t bytes;
  } expected[] = {
      {DType::kBool, "bool", 1},
      {DType::kUInt8, "uint8", 1},
      {DType::kInt8, "int8", 1},
      {DType::kUInt16, "uint16", 2},
      {DType::kInt16, "int16", 2},
      {DType::kUInt32, "uint32", 4},
      {DType::kInt32, "int32", 4},
      {DType::kUInt64, "uint64", 8},
      {DType::kInt64, "int64", 8},
      {DType::kFloat16, "float16", 2},
      {DType::kBFloat16, "bfloat16", 2},
      {DType::kFloat32, "float32", 4},
      {DType::kFloat64, "float64", 8},
      {DType::kComplex64, "complex64", 8},
      {DType::kComplex128, "complex128", 16},
      {DType::kFloat8E4M3FN, "float8_e4m3fn", 1},
      {DType::kFloat8E5M2, "float8_e5m2", 1},
      {DType::kFloat8E4M3FNUZ, "float8_e4m3fnuz", 1},
      {DType::kFloat8E5M2FNUZ, "float8_e5m2fnuz", 1},
      {DType::kFloat8E8M0FNU, "float8_e8m0fnu", 1},
  };
  ASSERT_EQ(std::size(expected), static_cast<size_t>(kDTypeCount));
  for (const auto& row : expected) {
    EXPECT_EQ(dtype_name(row.dtype), row.name);
    EXPECT_EQ(dtype_bytes(row.dtype), row.bytes) << row.name;
  }
}

TEST(Types, EveryDTypeExceptBoolHasOneKind) {
  const std::set<DType> floating = {DType::kFloat16, DType::kBFloat16, DType::kFloat32,
                                    DType::kFloat64};
  const std::set<DType> complex = {DType::kComplex64, DType::kComplex128};
  for (int value = 0; value < kDTypeCount; ++value) {
    const DType dtype = dtype_of(value);
    SCOPED_TRACE(dtype_name(dtype));
    EXPECT_EQ(is_floating(dtype), floating.count(dtype) == 1);
    EXPECT_EQ(is_complex(dtype), complex.count(dtype) == 1);
    EXPECT_EQ(is_integral(dtype), dtype >= DType::kUInt8 && dtype <= DType::kInt64);
    EXPECT_EQ(is_float8(dtype), dtype >= DType::kFloat8E4M3FN);
    const int kinds =
        is_floating(dtype) + is_complex(dtype) + is_integral(dtype) + is_float8(dtype);
    EXPECT_EQ(kinds, dtype == DType::kBool ? 0 : 1);
  }
}

TEST(Types, UnknownDTypesAndOperatorsHaveOnlyAName) {
  for (int value = kDTypeCount; value < 256; ++value) {
    const DType dtype = dtype_of(value);
    EXPECT_EQ(dtype_name(dtype), "unknown(" + std::to_string(value) + ")");
    EXPECT_EQ(dtype_bytes(dtype), 0u);
    EXPECT_FALSE(is_floating(dtype) || is_complex(dtype) || is_integral(dtype) || is_float8(dtype));
  }
  for (int value = kReduceOpCount; value < 256; ++value) {
    EXPECT_EQ(reduce_op_name(op_of(value)), "unknown(" + std::to_string(value) + ")");
  }
}

TEST(Types, OperatorNamesMatchPyTorch) {
  const std::string expected[] = {"SUM",  "PRODUCT", "MIN",  "MAX",       "AVG",
                                  "BAND", "BOR",     "BXOR", "PREMUL_SUM"};
  ASSERT_EQ(std::size(expected), static_cast<size_t>(kReduceOpCount));
  for (int value = 0; value < kReduceOpCount; ++value) {
    EXPECT_EQ(reduce_op_name(op_of(value)), expected[value]);
  }
}

// The table in reduce_op.h, row by row.
bool has_a_meaning(DType dtype, ReduceOp op) {
  if (is_float8(dtype)) return false;
  const bool whole = dtype == DType::kBool || is_integral(dtype);
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kProduct:
      return true;
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return !is_complex(dtype);
    case ReduceOp::kAvg:
    case ReduceOp::kPremulSum:
      return !whole;
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor:
      return whole;
  }
  return false;
}

TEST(Types, EveryUnsupportedPairIsRefusedWithBothNames) {
  for (int d = 0; d < kDTypeCount; ++d) {
    for (int o = 0; o < kReduceOpCount; ++o) {
      const Reduction reduction{dtype_of(d), op_of(o)};
      const std::string pair =
          std::string(reduce_op_name(reduction.op)) + " of " + dtype_name(reduction.dtype);
      const Status status = check_reduction(reduction);
      EXPECT_EQ(status.ok(), has_a_meaning(reduction.dtype, reduction.op)) << pair;
      if (!status.ok()) {
        EXPECT_EQ(status.code(), Code::kUnsupported);
        EXPECT_EQ(status.message().find(pair), 0u) << status.message();
      }
    }
  }
}

TEST(Types, RefusalNamesTheRemedy) {
  EXPECT_EQ(check_reduction({DType::kInt32, ReduceOp::kAvg}).message(),
            "AVG of int32 has no meaning; use a floating dtype (integers: SUM and divide)");
  EXPECT_EQ(check_reduction({DType::kFloat8E4M3FN, ReduceOp::kSum}).message(),
            "SUM of float8_e4m3fn is not supported: float8 can be moved but not reduced; convert "
            "to bfloat16 first");
  EXPECT_EQ(check_reduction({DType::kComplex64, ReduceOp::kMax}).message(),
            "MAX of complex64 has no meaning; reduce absolute values, or real and imaginary parts, "
            "as a floating dtype");
  EXPECT_EQ(check_reduction({DType::kFloat32, ReduceOp::kBxor}).message(),
            "BXOR of float32 has no meaning; bitwise operators take bool and integers; view the "
            "tensor as an integer dtype of the same size");
  EXPECT_EQ(check_reduction({DType::kBool, ReduceOp::kPremulSum}).message(),
            "PREMUL_SUM of bool has no meaning; use a floating dtype (integers: SUM and scale)");
}

TEST(Types, UnknownDTypesAndOperatorsAreRefused) {
  const Status dtype = check_reduction({dtype_of(77), ReduceOp::kSum});
  EXPECT_EQ(dtype.code(), Code::kUnsupported);
  EXPECT_EQ(dtype.message().find("SUM of unknown(77) is not supported: dscomm reduces"), 0u);
  const Status op = check_reduction({DType::kInt8, op_of(9)});
  EXPECT_EQ(op.code(), Code::kUnsupported);
  EXPECT_EQ(op.message().find("unknown(9) of int8 is not supported: the operators are SUM"), 0u);
}

}  // namespace
}  // namespace dscomm
