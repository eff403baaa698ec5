// The measured all-reduce (SUM, in place), the same for every peer.
//
// In a tight loop, a call sums the sums of the last call. After k calls, a value is ranks^(k - 1)
// times the first sum: this factor is a power of two, so values are exact until they are too large.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>

#include "loop.h"
#include "values.h"

namespace one_host {

// Reduces `count` values in place, over all ranks. A failure ends the process.
using AllReduce = std::function<void(void* data, size_t count, DType dtype)>;

class AllReduceOperation final : public Operation {
 public:
  AllReduceOperation(const Options& options, const AllReduce& all_reduce, DType dtype, void* data,
                     size_t bytes)
      : all_reduce_(all_reduce),
        dtype_(dtype),
        data_(data),
        count_(bytes / bytes_of(dtype)),
        growth_(std::bit_width(static_cast<unsigned>(options.ranks)) - 1),
        values_(dtype, options.rank, options.ranks) {}

  void clear() override { std::memset(data_, 0, count_ * bytes_of(dtype_)); }
  void fill(uint32_t round) override { values_.fill(data_, count_, round); }
  void call() override { all_reduce_(data_, count_, dtype_); }
  uint64_t wrong(uint32_t round, int calls) const override {
    return values_.wrong(data_, count_, round, std::ldexp(1.0F, growth_ * (calls - 1)));
  }
  int most_calls() const override { return kExponents / growth_; }

 private:
  static constexpr int kExponents = 110;  // powers of two above sums of 8 bits in a float32

  const AllReduce& all_reduce_;
  DType dtype_;
  void* data_;
  size_t count_;
  int growth_;
  Values values_;
};

inline void measure(const Options& options, Meeting& meeting, const AllReduce& all_reduce,
                    const Allocate& allocate = allocate_pages) {
  if (options.ranks < 2 || !std::has_single_bit(static_cast<unsigned>(options.ranks)))
    fail("the number of ranks has to be 2, 4, 8 or 16");
  const std::shared_ptr<void> data = allocate_largest(options, allocate);
  measure_cases(options, meeting, [&](DType dtype, size_t bytes) {
    return std::make_unique<AllReduceOperation>(options, all_reduce, dtype, data.get(), bytes);
  });
}

}  // namespace one_host
