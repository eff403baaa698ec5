#include "core/types/dtype.h"

#include <array>
#include <string>

#include "core/base/format.h"

namespace dscomm {
namespace {

enum class Kind : uint8_t { kUnknown, kBool, kIntegral, kFloating, kComplex, kFloat8 };

struct Row {
  const char* name;
  uint8_t bytes;
  Kind kind;
};

// Indexed by the value of the enumerator.
constexpr Row kRows[] = {
    {"bool", 1, Kind::kBool},
    {"uint8", 1, Kind::kIntegral},
    {"int8", 1, Kind::kIntegral},
    {"uint16", 2, Kind::kIntegral},
    {"int16", 2, Kind::kIntegral},
    {"uint32", 4, Kind::kIntegral},
    {"int32", 4, Kind::kIntegral},
    {"uint64", 8, Kind::kIntegral},
    {"int64", 8, Kind::kIntegral},
    {"float16", 2, Kind::kFloating},
    {"bfloat16", 2, Kind::kFloating},
    {"float32", 4, Kind::kFloating},
    {"float64", 8, Kind::kFloating},
    {"complex64", 8, Kind::kComplex},
    {"complex128", 16, Kind::kComplex},
    {"float8_e4m3fn", 1, Kind::kFloat8},
    {"float8_e5m2", 1, Kind::kFloat8},
    {"float8_e4m3fnuz", 1, Kind::kFloat8},
    {"float8_e5m2fnuz", 1, Kind::kFloat8},
    {"float8_e8m0fnu", 1, Kind::kFloat8},
};
static_assert(sizeof(kRows) / sizeof(kRows[0]) == kDTypeCount);
static_assert(static_cast<int>(DType::kFloat8E8M0FNU) == kDTypeCount - 1);

// A peer may send any value. A value out of range has no name, no bytes and no kind.
Row row_of(DType dtype) {
  auto value = static_cast<uint8_t>(dtype);
  return value < kDTypeCount ? kRows[value] : Row{nullptr, 0, Kind::kUnknown};
}

}  // namespace

size_t dtype_bytes(DType dtype) { return row_of(dtype).bytes; }

const char* dtype_name(DType dtype) {
  const char* name = row_of(dtype).name;
  return name ? name : unknown_name(static_cast<uint8_t>(dtype));
}

const char* unknown_name(uint8_t value) {
  static const auto& names = *[] {  // never destroyed: threads may outlive static destructors
    auto* made = new std::array<std::string, 256>;
    for (size_t k = 0; k < made->size(); ++k) (*made)[k] = format_text("unknown({})", k);
    return made;
  }();
  return names[value].c_str();
}

bool is_floating(DType dtype) { return row_of(dtype).kind == Kind::kFloating; }
bool is_integral(DType dtype) { return row_of(dtype).kind == Kind::kIntegral; }
bool is_complex(DType dtype) { return row_of(dtype).kind == Kind::kComplex; }
bool is_float8(DType dtype) { return row_of(dtype).kind == Kind::kFloat8; }

}  // namespace dscomm
