// Rounding of sizes up to whole pages and other steps.
#pragma once

#include <cstddef>

namespace dscomm {

constexpr size_t round_up(size_t bytes, size_t step) { return (bytes + step - 1) / step * step; }

}  // namespace dscomm
