// The values that ranks reduce: small whole numbers, different for every rank, place and round,
// whose sums both dtypes hold exactly in any order; and the expected results.
#pragma once

#include <cstdint>
#include <cstring>

#include "options.h"

namespace one_host {

// A bfloat16 is the upper half of a float32. The values here need no rounding.
inline uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);
}
inline float from_bfloat16(uint16_t value) {
  uint32_t bits = uint32_t{value} << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// Less than 256 / ranks, so that sums fit the 8 bits of bfloat16. Computed in whole words, which
// the compiler vectorizes. Rows of 128 places differ, so that a shifted block is detected.
inline uint32_t value_at(uint32_t place, int rank, uint32_t round, uint32_t most) {
  return (place + (place >> 7) * 5 + static_cast<uint32_t>(rank) * 31 + round * 7) & (most - 1);
}

class Values {
 public:
  // The number of ranks is a power of two, so that repeated sums stay exact.
  Values(DType dtype, int rank, int ranks) : dtype_(dtype), rank_(rank), ranks_(ranks) {
    most_ = 256 / static_cast<uint32_t>(ranks);
  }

  void fill(void* data, size_t count, uint32_t round) const {
    if (dtype_ == DType::kFloat32) {
      auto* floats = static_cast<float*>(data);
      for (size_t i = 0; i < count; ++i)
        floats[i] = static_cast<float>(value_at(static_cast<uint32_t>(i), rank_, round, most_));
    } else {
      auto* halves = static_cast<uint16_t*>(data);
      for (size_t i = 0; i < count; ++i)
        halves[i] = to_bfloat16(
            static_cast<float>(value_at(static_cast<uint32_t>(i), rank_, round, most_)));
    }
  }

  // How many elements are not `scale` times the sum of the ranks' values of that round.
  uint64_t wrong(const void* data, size_t count, uint32_t round, float scale) const {
    uint64_t wrong = 0;
    if (dtype_ == DType::kFloat32) {
      const auto* floats = static_cast<const float*>(data);
      for (size_t i = 0; i < count; ++i) wrong += floats[i] != scale * sum_at(i, round);
    } else {
      const auto* halves = static_cast<const uint16_t*>(data);
      for (size_t i = 0; i < count; ++i)
        wrong += from_bfloat16(halves[i]) != scale * sum_at(i, round);
    }
    return wrong;
  }

 private:
  float sum_at(size_t i, uint32_t round) const {
    uint32_t sum = 0;
    for (int rank = 0; rank < ranks_; ++rank)
      sum += value_at(static_cast<uint32_t>(i), rank, round, most_);
    return static_cast<float>(sum);
  }

  DType dtype_;
  int rank_, ranks_;
  uint32_t most_;
};

}  // namespace one_host
