// The element types that dscomm supports. Ranks exchange the values (in the record of a call), so
// they are fixed: append, never renumber. CONTRIBUTING.md lists the files that a new one changes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dscomm {

enum class DType : uint8_t {
  kBool = 0,
  kUInt8 = 1,
  kInt8 = 2,
  kUInt16 = 3,
  kInt16 = 4,
  kUInt32 = 5,
  kInt32 = 6,
  kUInt64 = 7,
  kInt64 = 8,
  kFloat16 = 9,
  kBFloat16 = 10,
  kFloat32 = 11,
  kFloat64 = 12,
  kComplex64 = 13,
  kComplex128 = 14,
  // Moved, never reduced.
  kFloat8E4M3FN = 15,
  kFloat8E5M2 = 16,
  kFloat8E4M3FNUZ = 17,
  kFloat8E5M2FNUZ = 18,
  kFloat8E8M0FNU = 19,
};
inline constexpr int kDTypeCount = 20;

// Bytes of one element; 0 for an out-of-range value from a peer.
size_t dtype_bytes(DType dtype);
// PyTorch's name without the prefix: "float32", "bfloat16"; "unknown(77)" for an out-of-range value
// from a peer.
const char* dtype_name(DType dtype);
// "unknown(77)", for a value from a peer that is out of range.
const char* unknown_name(uint8_t value);
bool is_floating(DType dtype);  // fp16, bf16, fp32, fp64
bool is_integral(DType dtype);  // (u)int8 to (u)int64; bool is not
bool is_complex(DType dtype);
bool is_float8(DType dtype);
inline bool is_half(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

}  // namespace dscomm
