// The name of a Code, for failures of tests.
#pragma once

#include <cstddef>
#include <iterator>

#include "core/base/status.h"

namespace dscomm {

inline const char* code_name(Code code) {
  // Indexed by the value of the enumerator.
  static constexpr const char* kNames[] = {
      "ok",        "invalid argument", "unsupported", "mismatch", "peer died",
      "peer left", "timeout",          "aborted",     "resource", "internal"};
  static_assert(std::size(kNames) == static_cast<size_t>(Code::kInternal) + 1);
  const auto value = static_cast<size_t>(code);
  return value < std::size(kNames) ? kNames[value] : "unknown";
}

}  // namespace dscomm
