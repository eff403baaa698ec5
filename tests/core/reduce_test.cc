// The kernels against the scalar twin, bit for bit, on every instruction set of this machine; and
// both against independent references.
#include "core/reduce/reduce.h"

#include <gtest/gtest.h>
#include <hwy/highway.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cfenv>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/reduce/float_environment.h"
#include "core/reduce/half.h"

namespace dscomm {
namespace {

using Bytes = std::vector<uint8_t>;

// Querying the processor is slow in a virtual machine, so it is done once.
int64_t targets_of_the_processor() {
  static const int64_t targets = hwy::SupportedTargets();
  return targets;
}

// For its lifetime, reduce() uses the given instruction set, in the whole process.
class ForcedTarget {
 public:
  explicit ForcedTarget(int64_t target) { hwy::GetChosenTarget().Update(target); }
  ~ForcedTarget() { hwy::GetChosenTarget().Update(targets_of_the_processor()); }
  ForcedTarget(const ForcedTarget&) = delete;
};

// The instruction sets that the processor has and reduce() was built for. Asking for any other
// selects one of these, as its name shows.
std::vector<int64_t> find_usable_targets() {
  std::vector<int64_t> usable;
  for (int bit = 0; bit < 63; ++bit) {
    const int64_t target = int64_t{1} << bit;
    if (((targets_of_the_processor() | HWY_SCALAR) & target) == 0) continue;
    ForcedTarget forced(target);
    if (std::string(reduce_target_name()) == hwy::TargetName(target)) usable.push_back(target);
  }
  return usable;
}

// Runs a check on every instruction set and names it if the check fails.
template <typename Check>
void on_every_target(const Check& check) {
  static const std::vector<int64_t> usable_targets = find_usable_targets();
  ASSERT_FALSE(usable_targets.empty());
  for (int64_t target : usable_targets) {
    ForcedTarget forced(target);
    SCOPED_TRACE(std::string("on ") + reduce_target_name());
    check();
    if (::testing::Test::HasFatalFailure()) return;
  }
}

std::vector<Reduction> every_reduction() {
  std::vector<Reduction> reductions;
  for (int dtype = 0; dtype < kDTypeCount; ++dtype) {
    for (int op = 0; op < kReduceOpCount; ++op) {
      const Reduction reduction{static_cast<DType>(dtype), static_cast<ReduceOp>(op), 0.3};
      if (check_reduction(reduction).ok()) reductions.push_back(reduction);
    }
  }
  return reductions;
}

std::string describe(const Reduction& reduction) {
  return std::string(reduce_op_name(reduction.op)) + " of " + dtype_name(reduction.dtype);
}

// The dtype of one number: for a complex dtype, of one part.
DType number_of(DType dtype) {
  if (dtype == DType::kComplex64) return DType::kFloat32;
  if (dtype == DType::kComplex128) return DType::kFloat64;
  return dtype;
}

template <typename T>
T read(const void* memory, size_t index) {
  T value;
  std::memcpy(&value, static_cast<const uint8_t*>(memory) + index * sizeof(T), sizeof(T));
  return value;
}

double read_number(DType dtype, const void* memory, size_t index) {
  switch (number_of(dtype)) {
    case DType::kFloat16:
      return float_from_float16(read<uint16_t>(memory, index));
    case DType::kBFloat16:
      return float_from_bfloat16(read<uint16_t>(memory, index));
    case DType::kFloat32:
      return read<float>(memory, index);
    case DType::kFloat64:
      return read<double>(memory, index);
    default:
      return 0;
  }
}

// Compares bits, except that any NaN equals any NaN.
::testing::AssertionResult same(DType dtype, const void* actual, const void* expected,
                                size_t count) {
  const size_t element_bytes = dtype_bytes(number_of(dtype));
  const size_t numbers = count * dtype_bytes(dtype) / element_bytes;
  for (size_t i = 0; i < numbers; ++i) {
    const auto* got = static_cast<const uint8_t*>(actual) + i * element_bytes;
    const auto* wanted = static_cast<const uint8_t*>(expected) + i * element_bytes;
    if (std::memcmp(got, wanted, element_bytes) == 0) continue;
    if (std::isnan(read_number(dtype, actual, i)) && std::isnan(read_number(dtype, expected, i))) {
      continue;
    }
    return ::testing::AssertionFailure()
           << "number " << i << " of " << numbers << ": got "
           << ::testing::PrintToString(Bytes(got, got + element_bytes)) << ", expected "
           << ::testing::PrintToString(Bytes(wanted, wanted + element_bytes));
  }
  return ::testing::AssertionSuccess();
}

// Bit patterns of special values: zeros, denormals, powers of two, ties, the largest numbers,
// infinities, quiet and signalling NaN.
std::vector<uint64_t> special_bits(DType dtype) {
  std::vector<uint64_t> bits;
  const auto add_both_signs = [&](int sign_bit, std::initializer_list<uint64_t> magnitudes) {
    for (uint64_t magnitude : magnitudes) {
      bits.push_back(magnitude);
      bits.push_back(magnitude | uint64_t{1} << sign_bit);
    }
  };
  switch (number_of(dtype)) {
    case DType::kFloat16:
      add_both_signs(15, {0, 1, 2, 0x3ff, 0x400, 0x401, 0x3c00, 0x3c01, 0x6800, 0x7bff, 0x7c00,
                          0x7e00, 0x7c01});
      break;
    case DType::kBFloat16:
      add_both_signs(
          15, {0, 1, 2, 0x7f, 0x80, 0x81, 0x3f80, 0x3f81, 0x4300, 0x7f7f, 0x7f80, 0x7fc0, 0x7f81});
      break;
    case DType::kFloat32:
      add_both_signs(31, {0, 1, 2, 0x7fffff, 0x800000, 0x800001, 0x3f800000, 0x3f800001, 0x7f7fffff,
                          0x7f800000, 0x7fc00000, 0x7f800001});
      break;
    case DType::kFloat64:
      add_both_signs(
          63, {0, 1, 2, 0xfffffffffffff, 0x10000000000000, 0x3ff0000000000000, 0x3ff0000000000001,
               0x7fefffffffffffff, 0x7ff0000000000000, 0x7ff8000000000000, 0x7ff0000000000001});
      break;
    default: {
      const int width = static_cast<int>(8 * dtype_bytes(dtype));
      add_both_signs(width - 1, {0, 1, 2, (uint64_t{1} << (width - 1)) - 1});
    }
  }
  return bits;
}

// A third special values, a third random bits, a third ordinary numbers.
Bytes random_elements(DType dtype, size_t count, std::mt19937_64& random) {
  const DType number = number_of(dtype);
  const size_t bytes = dtype_bytes(number);
  const std::vector<uint64_t> special = special_bits(dtype);
  Bytes memory(count * dtype_bytes(dtype));
  for (size_t offset = 0; offset < memory.size(); offset += bytes) {
    uint64_t bits = random();
    switch (random() % 3) {
      case 0:
        bits = special[random() % special.size()];
        break;
      case 1:
        break;
      case 2: {
        const double ordinary = std::uniform_real_distribution<double>(-4, 4)(random);
        if (number == DType::kFloat16) bits = float16_from_float(static_cast<float>(ordinary));
        if (number == DType::kBFloat16) bits = bfloat16_from_float(static_cast<float>(ordinary));
        if (number == DType::kFloat32) bits = std::bit_cast<uint32_t>(static_cast<float>(ordinary));
        if (number == DType::kFloat64) bits = std::bit_cast<uint64_t>(ordinary);
      }
    }
    std::memcpy(&memory[offset], &bits, bytes);
  }
  return memory;
}

using ReduceFunction = decltype(&reduce);

template <typename T>
std::vector<T> reduce_lists(ReduceFunction reduce_function, const Reduction& reduction,
                            const std::vector<std::vector<T>>& lists, int divisor) {
  std::vector<const void*> sources;
  for (const auto& list : lists) sources.push_back(list.data());
  std::vector<T> result(lists[0].size());
  const size_t count = result.size() * sizeof(T) / dtype_bytes(reduction.dtype);
  const int n = static_cast<int>(sources.size());
  reduce_function(result.data(), sources.data(), n, count, reduction, divisor);
  return result;
}

// Checks the scalar twin and every instruction set.
template <typename T>
void expect_reduces_to(const Reduction& reduction, const std::vector<std::vector<T>>& lists,
                       const std::vector<T>& expected, int divisor = 1) {
  SCOPED_TRACE(describe(reduction));
  const DType dtype = reduction.dtype;
  // Once as it is, for the short vectors, and once repeated, for the long ones.
  for (size_t repeats : {1, 67}) {
    std::vector<std::vector<T>> long_lists;
    for (const auto& list : lists) {
      long_lists.emplace_back();
      for (size_t i = 0; i < repeats; ++i) {
        long_lists.back().insert(long_lists.back().end(), list.begin(), list.end());
      }
    }
    std::vector<T> long_expected;
    for (size_t i = 0; i < repeats; ++i) {
      long_expected.insert(long_expected.end(), expected.begin(), expected.end());
    }
    const size_t count = long_expected.size() * sizeof(T) / dtype_bytes(dtype);
    const auto check = [&](ReduceFunction reduce_function) {
      const auto result = reduce_lists(reduce_function, reduction, long_lists, divisor);
      EXPECT_TRUE(same(dtype, result.data(), long_expected.data(), count));
    };
    check(reduce_scalar);
    on_every_target([&] { check(reduce); });
  }
}

TEST(Reduce, RunsOnTheInstructionSetsItWasBuiltFor) {
  std::vector<std::string> names;
  on_every_target([&] { names.push_back(reduce_target_name()); });
  const auto has = [&](const char* name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
#if defined(DSCOMM_ONE_TARGET)  // as under sanitizers: only the baseline of the architecture
  EXPECT_EQ(std::count(names.begin(), names.end(), names.front()), std::ssize(names));
#elif defined(__x86_64__)
  EXPECT_EQ(has("SSE4"), (targets_of_the_processor() & HWY_SSE4) != 0);
  EXPECT_EQ(has("AVX2"), (targets_of_the_processor() & HWY_AVX2) != 0);
  EXPECT_EQ(has("AVX3"), (targets_of_the_processor() & HWY_AVX3) != 0);
#elif defined(__aarch64__)
  EXPECT_TRUE(has("NEON"));
#endif
  EXPECT_TRUE(has(reduce_target_name())) << reduce_target_name();
  RecordProperty("targets", ::testing::PrintToString(names));
}

TEST(Reduce, VectorKernelsMatchScalarReferenceBitForBit) {
  const size_t counts[] = {0,  1,  2,  3,  4,  5,  7,  8,   9,   12,  15,  16,  17,  23,
                           31, 32, 33, 47, 63, 64, 65, 100, 127, 129, 255, 259, 515, 1000};
  constexpr size_t kLargestCount = 1000;
  std::mt19937_64 random(1);
  for (const Reduction& reduction : every_reduction()) {
    SCOPED_TRACE(describe(reduction));
    const size_t element_bytes = dtype_bytes(reduction.dtype);
    for (int n : {1, 2, 3, 4, 7}) {
      // Each source has another distance from an aligned address.
      std::vector<Bytes> memory;
      std::vector<const void*> sources;
      for (int i = 0; i < n; ++i) {
        memory.push_back(random_elements(reduction.dtype, kLargestCount, random));
        memory.back().insert(memory.back().begin(), static_cast<size_t>(i), 0);
        sources.push_back(memory.back().data() + i);
      }
      for (size_t count : counts) {
        const size_t bytes = count * element_bytes;
        Bytes expected(bytes + 1);
        reduce_scalar(expected.data(), sources.data(), n, count, reduction, n);
        on_every_target([&] {
          Bytes result(bytes + 3 + 64, 0xab);
          reduce(result.data() + 3, sources.data(), n, count, reduction, n);
          ASSERT_TRUE(same(reduction.dtype, result.data() + 3, expected.data(), count))
              << n << " sources of " << count << " elements";
          for (size_t i = 0; i < 3; ++i) ASSERT_EQ(result[i], 0xab);
          for (size_t i = 3 + bytes; i < result.size(); ++i) ASSERT_EQ(result[i], 0xab);
        });
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(Reduce, TheDestinationMayBeAnyOfTheSources) {
  constexpr size_t kCount = 333;
  std::mt19937_64 random(2);
  for (const Reduction& reduction : every_reduction()) {
    SCOPED_TRACE(describe(reduction));
    for (int n : {1, 2, 5}) {
      std::vector<Bytes> memory;
      std::vector<const void*> sources;
      for (int i = 0; i < n; ++i) {
        memory.push_back(random_elements(reduction.dtype, kCount, random));
        sources.push_back(memory.back().data());
      }
      Bytes expected(kCount * dtype_bytes(reduction.dtype));
      reduce_scalar(expected.data(), sources.data(), n, kCount, reduction, n);
      for (int destination = 0; destination < n; ++destination) {
        const auto check = [&](auto reduce_function) {
          Bytes in_place = memory[destination];
          std::vector<const void*> with_destination = sources;
          with_destination[destination] = in_place.data();
          reduce_function(in_place.data(), with_destination.data(), n, kCount, reduction, n);
          ASSERT_TRUE(same(reduction.dtype, in_place.data(), expected.data(), kCount))
              << "into source " << destination << " of " << n;
        };
        check(reduce_scalar);
        on_every_target([&] { check(reduce); });
        if (HasFatalFailure()) return;
      }
    }
  }
}

// One page of memory between two inaccessible pages.
class GuardedPage {
 public:
  GuardedPage() : page_bytes_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    void* mapped =
        mmap(nullptr, 3 * page_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) std::abort();
    start_ = static_cast<uint8_t*>(mapped);
    if (mprotect(start_, page_bytes_, PROT_NONE) != 0) std::abort();
    if (mprotect(start_ + 2 * page_bytes_, page_bytes_, PROT_NONE) != 0) std::abort();
  }
  ~GuardedPage() { munmap(start_, 3 * page_bytes_); }
  GuardedPage(const GuardedPage&) = delete;

  uint8_t* first_bytes() const { return start_ + page_bytes_; }
  uint8_t* last_bytes(size_t bytes) const { return start_ + 2 * page_bytes_ - bytes; }

 private:
  size_t page_bytes_;
  uint8_t* start_;
};

TEST(Reduce, TouchesNothingBeyondItsElements) {
  constexpr int kSources = 3;
  constexpr size_t kLargestCount = 140;
  GuardedPage source_pages[kSources];
  GuardedPage destination_page;
  std::mt19937_64 random(3);
  for (const Reduction& reduction : every_reduction()) {
    SCOPED_TRACE(describe(reduction));
    const size_t element_bytes = dtype_bytes(reduction.dtype);
    const Bytes elements = random_elements(reduction.dtype, kSources * kLargestCount, random);
    for (size_t count = 1; count <= kLargestCount; count += count < 70 ? 1 : 7) {
      const size_t bytes = count * element_bytes;
      for (bool at_the_end : {false, true}) {
        const void* sources[kSources];
        for (int i = 0; i < kSources; ++i) {
          const GuardedPage& page = source_pages[i];
          uint8_t* source = at_the_end ? page.last_bytes(bytes) : page.first_bytes();
          std::memcpy(source, &elements[i * bytes], bytes);
          sources[i] = source;
        }
        void* destination =
            at_the_end ? destination_page.last_bytes(bytes) : destination_page.first_bytes();
        for (int n : {2, kSources}) {
          Bytes expected(bytes);
          reduce_scalar(expected.data(), sources, n, count, reduction, n);
          on_every_target([&] {
            reduce(destination, sources, n, count, reduction, n);
            ASSERT_TRUE(same(reduction.dtype, destination, expected.data(), count)) << count;
          });
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// The value of a half by its definition: sign, exponent and fraction as powers of two.
double half_value(uint16_t bits, int fraction_bits, int bias) {
  const int exponent_mask = (1 << (15 - fraction_bits)) - 1;
  const int exponent = bits >> fraction_bits & exponent_mask;
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == exponent_mask) return fraction ? std::nan("") : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
}

// The nearest value that a half can hold, ties to even, computed in double, which is exact here.
double nearest_half(double value, int fraction_bits, int bias) {
  if (value == 0 || !std::isfinite(value)) return value;
  const int exponent = std::max(std::ilogb(value), 1 - bias);
  const double unit = std::ldexp(1.0, exponent - fraction_bits);
  const double rounded = std::nearbyint(value / unit) * unit;
  const double beyond_the_largest = std::ldexp(1.0, bias + 1);
  if (std::abs(rounded) >= beyond_the_largest) return std::copysign(INFINITY, value);
  return rounded;
}

struct Half {
  DType dtype;
  int fraction_bits;
  int bias;
  float (*to_float)(uint16_t);
  uint16_t (*from_float)(float);
};
constexpr Half kHalves[] = {
    {DType::kFloat16, 10, 15, float_from_float16, float16_from_float},
    {DType::kBFloat16, 7, 127, float_from_bfloat16, bfloat16_from_float},
};

bool same_double(double a, double b) {
  if (std::isnan(a) && std::isnan(b)) return true;
  return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b);
}

TEST(Reduce, Every16BitFloatConvertsToFloat32Exactly) {
  for (const Half& half : kHalves) {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      const auto element = static_cast<uint16_t>(bits);
      const double value = half_value(element, half.fraction_bits, half.bias);
      ASSERT_TRUE(same_double(half.to_float(element), value)) << bits;
      const uint16_t back = half.from_float(half.to_float(element));
      if (std::isnan(value)) {
        ASSERT_TRUE(std::isnan(half.to_float(back))) << bits;
      } else {
        ASSERT_EQ(back, element);
      }
    }
  }
}

TEST(Reduce, FloatsAreRoundedToTheNearest16BitFloat) {
  for (const Half& half : kHalves) {
    const auto check = [&](float value) {
      const uint16_t rounded = half.from_float(value);
      const double expected = nearest_half(value, half.fraction_bits, half.bias);
      ASSERT_TRUE(same_double(half_value(rounded, half.fraction_bits, half.bias), expected))
          << std::hexfloat << value;
    };
    // Every tie between two neighbours, and the floats next to it, with either sign.
    for (uint32_t bits = 0; bits < 0x7fff; ++bits) {
      const float low = half.to_float(static_cast<uint16_t>(bits));
      const float high = half.to_float(static_cast<uint16_t>(bits + 1));
      if (!std::isfinite(low)) break;
      const double above = std::isinf(high) ? std::ldexp(1.0, half.bias + 1) : high;
      const float tie = static_cast<float>((double{low} + above) / 2);
      for (float value : {std::nextafter(tie, -INFINITY), tie, std::nextafter(tie, INFINITY)}) {
        check(value);
        check(-value);
      }
    }
    // Then floats of the whole range, in steps of a prime.
    for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += 9973) {
      check(std::bit_cast<float>(static_cast<uint32_t>(bits)));
    }
    for (uint32_t bits : {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffffffffu, 0x7fc00000u}) {
      check(std::bit_cast<float>(bits));
    }
    if (HasFatalFailure()) return;
  }
}

// All 65,536 elements, in vectors of any length, on every instruction set. A sum or product of two
// floats computed in double and rounded to float equals float arithmetic; an element times one is
// the element itself.
TEST(Reduce, KernelsAddAndMultiplyEvery16BitFloat) {
  std::mt19937_64 random(4);
  for (const Half& half : kHalves) {
    std::vector<uint16_t> every(0x10000);
    for (size_t bits = 0; bits < every.size(); ++bits) every[bits] = static_cast<uint16_t>(bits);
    std::vector<uint16_t> others(every.size());
    for (auto& other : others) other = static_cast<uint16_t>(random());
    std::fill_n(others.begin(), 64, half.from_float(1.0f));

    const auto value = [&](uint16_t bits) {
      return half_value(bits, half.fraction_bits, half.bias);
    };
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct}) {
      on_every_target([&] {
        const auto result = reduce_lists<uint16_t>(reduce, {half.dtype, op}, {every, others}, 1);
        for (size_t i = 0; i < every.size(); ++i) {
          const double a = value(every[i]), b = value(others[i]);
          const auto in_float = static_cast<float>(op == ReduceOp::kSum ? a + b : a * b);
          const double expected = nearest_half(in_float, half.fraction_bits, half.bias);
          ASSERT_TRUE(same_double(value(result[i]), expected))
              << reduce_op_name(op) << " of " << a << " and " << b << " gave " << value(result[i]);
        }
      });
      if (HasFatalFailure()) return;
    }
  }
}

// The reference computes each operation in double and rounds to float, which is exact for sums,
// products and quotients of ordinary floats. It has no vectors and cannot be fused.
TEST(Reduce, FloatsAreReducedInSourceOrderAndRoundedAtEveryStep) {
  constexpr size_t kCount = 257;
  constexpr int kSources = 5;
  constexpr double kFactor = 0.7;
  std::mt19937_64 random(5);
  std::uniform_real_distribution<float> uniform(-8, 8);
  std::vector<std::vector<float>> lists(kSources, std::vector<float>(kCount));
  for (auto& list : lists) {
    for (float& value : list) value = uniform(random);
  }
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kAvg, ReduceOp::kPremulSum}) {
    const auto prepare = [&](float value) {
      return op == ReduceOp::kPremulSum
                 ? static_cast<float>(double{value} * static_cast<float>(kFactor))
                 : value;
    };
    std::vector<float> expected;
    for (size_t i = 0; i < kCount; ++i) {
      float result = prepare(lists[0][i]);
      for (int source = 1; source < kSources; ++source) {
        const double next = prepare(lists[source][i]);
        result = static_cast<float>(op == ReduceOp::kProduct ? result * next : result + next);
      }
      if (op == ReduceOp::kAvg) result = static_cast<float>(double{result} / kSources);
      expected.push_back(result);
    }
    expect_reduces_to<float>({DType::kFloat32, op, kFactor}, lists, expected, kSources);
    // A complex number is two real numbers, except in a product.
    if (op != ReduceOp::kProduct) {
      for (auto& list : lists) list.resize(kCount - 1);
      expected.resize(kCount - 1);
      expect_reduces_to<float>({DType::kComplex64, op, kFactor}, lists, expected, kSources);
      for (auto& list : lists) list.resize(kCount, 1.5f);
    }
  }
}

TEST(Reduce, SumsOf16BitFloatsAccumulateInFloat32AndAreRoundedOnce) {
  for (const Half& half : kHalves) {
    // Two ones are between `large` and its neighbour: rounding at every step would lose both.
    const float large = std::ldexp(1.0f, half.fraction_bits + 1);
    const auto bits = [&](float value) { return half.from_float(value); };
    expect_reduces_to<uint16_t>({half.dtype, ReduceOp::kSum}, {{bits(large)}, {bits(1)}, {bits(1)}},
                                {bits(large + 2)});
    expect_reduces_to<uint16_t>({half.dtype, ReduceOp::kAvg}, {{bits(large)}, {bits(1)}, {bits(1)}},
                                {bits((large + 2) / 3)}, 3);
    // A factor that no half can hold is not rounded to a half.
    const float factor = 1 + std::ldexp(1.0f, -half.fraction_bits - 2);
    expect_reduces_to<uint16_t>({half.dtype, ReduceOp::kPremulSum, factor},
                                {{bits(large)}, {bits(large)}, {bits(1)}, {bits(0.5)}},
                                {bits(2 * large * factor + 1.5f * factor)});
  }
  // Intermediate sums exceed float16's range; the final one does not.
  const auto bits = float16_from_float;
  expect_reduces_to<uint16_t>({DType::kFloat16, ReduceOp::kSum},
                              {{bits(60000)}, {bits(60000)}, {bits(-60000)}}, {bits(60000)});
  expect_reduces_to<uint16_t>({DType::kFloat16, ReduceOp::kSum}, {{bits(60000)}, {bits(60000)}},
                              {bits(INFINITY)});
}

TEST(Reduce, AverageDividesInsteadOfMultiplyingByReciprocal) {
  ASSERT_NE(5 * (1.0f / 3), 5.0f / 3);
  ASSERT_NE(5 * (1.0 / 3), 5.0 / 3);
  expect_reduces_to<float>({DType::kFloat32, ReduceOp::kAvg}, {{2, 7}, {3, -7}}, {5.0f / 3, 0}, 3);
  expect_reduces_to<double>({DType::kFloat64, ReduceOp::kAvg}, {{2, 7}, {3, -7}}, {5.0 / 3, 0}, 3);
  expect_reduces_to<double>({DType::kComplex128, ReduceOp::kAvg}, {{5, 7}}, {5.0 / 3, 7.0 / 3}, 3);
}

template <typename T>
void expect_minimum_and_maximum_of_floats(DType dtype, T (*from)(float)) {
  const T zero = from(0.0f), minus_zero = from(-0.0f), one = from(1), minus_two = from(-2);
  const T infinity = from(INFINITY), nan = from(NAN), minus_nan = from(-NAN);
  const std::vector<T> a = {zero, minus_zero, one,       minus_two, infinity,
                            nan,  one,        minus_nan, minus_two, minus_zero};
  const std::vector<T> b = {minus_zero, zero, minus_two, one,       one,
                            one,        nan,  zero,      minus_nan, minus_zero};
  expect_reduces_to<T>(
      {dtype, ReduceOp::kMin}, {a, b},
      {minus_zero, minus_zero, minus_two, minus_two, one, nan, nan, nan, nan, minus_zero});
  expect_reduces_to<T>({dtype, ReduceOp::kMax}, {a, b},
                       {zero, zero, one, one, infinity, nan, nan, nan, nan, minus_zero});
  // A NaN in any source is kept.
  for (int place = 0; place < 4; ++place) {
    std::vector<std::vector<T>> lists(4, std::vector<T>{one, infinity});
    lists[place] = {nan, minus_nan};
    expect_reduces_to<T>({dtype, ReduceOp::kMin}, lists, {nan, nan});
    expect_reduces_to<T>({dtype, ReduceOp::kMax}, lists, {nan, nan});
  }
}

TEST(Reduce, MinimumAndMaximumHandleSignedZeroAndNaN) {
  expect_minimum_and_maximum_of_floats<uint16_t>(DType::kFloat16, float16_from_float);
  expect_minimum_and_maximum_of_floats<uint16_t>(DType::kBFloat16, bfloat16_from_float);
  expect_minimum_and_maximum_of_floats<float>(DType::kFloat32, [](float value) { return value; });
  expect_minimum_and_maximum_of_floats<double>(DType::kFloat64,
                                               [](float value) { return double{value}; });
}

template <typename T>
void expect_integers_wrap(DType dtype) {
  constexpr T kMin = std::numeric_limits<T>::min();
  constexpr T kMax = std::numeric_limits<T>::max();
  constexpr T kMinusOne = static_cast<T>(-1);
  // The largest plus one is the smallest; the square of a number of only ones is one.
  expect_reduces_to<T>({dtype, ReduceOp::kSum}, {{kMax, kMin}, {1, kMinusOne}},
                       {kMin, static_cast<T>(static_cast<uint64_t>(kMin) - 1)});
  expect_reduces_to<T>({dtype, ReduceOp::kProduct}, {{kMax, kMin, 3}, {kMax, 2, 5}, {1, 1, 7}},
                       {1, static_cast<T>(static_cast<uint64_t>(kMin) * 2), 105});
  expect_reduces_to<T>({dtype, ReduceOp::kMin}, {{kMax, 7, 0}, {kMin, 9, kMinusOne}},
                       {kMin, 7, std::min<T>(0, kMinusOne)});
  expect_reduces_to<T>({dtype, ReduceOp::kMax}, {{kMax, 7, 0}, {kMin, 9, kMinusOne}},
                       {kMax, 9, std::max<T>(0, kMinusOne)});
  expect_reduces_to<T>({dtype, ReduceOp::kBand}, {{0b1100, kMinusOne}, {0b1010, kMax}},
                       {0b1000, kMax});
  expect_reduces_to<T>({dtype, ReduceOp::kBor}, {{0b1100, kMin}, {0b1010, kMax}},
                       {0b1110, kMinusOne});
  expect_reduces_to<T>({dtype, ReduceOp::kBxor}, {{0b1100, kMax}, {0b1010, kMax}}, {0b0110, 0});
}

TEST(Reduce, IntegersWrapAndCompareWithTheirSign) {
  expect_integers_wrap<uint8_t>(DType::kUInt8);
  expect_integers_wrap<int8_t>(DType::kInt8);
  expect_integers_wrap<uint16_t>(DType::kUInt16);
  expect_integers_wrap<int16_t>(DType::kInt16);
  expect_integers_wrap<uint32_t>(DType::kUInt32);
  expect_integers_wrap<int32_t>(DType::kInt32);
  expect_integers_wrap<uint64_t>(DType::kUInt64);
  expect_integers_wrap<int64_t>(DType::kInt64);
}

TEST(Reduce, AnyNonzeroBoolByteIsTrue) {
  const std::vector<std::vector<uint8_t>> lists = {{0, 0, 2, 255, 128}, {0, 1, 0, 254, 1}};
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kBor}) {
    expect_reduces_to<uint8_t>({DType::kBool, op}, lists, {0, 1, 1, 1, 1});
  }
  for (ReduceOp op : {ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kBand}) {
    expect_reduces_to<uint8_t>({DType::kBool, op}, lists, {0, 0, 0, 1, 1});
  }
  expect_reduces_to<uint8_t>({DType::kBool, ReduceOp::kBxor}, lists, {0, 1, 1, 0, 0});
  expect_reduces_to<uint8_t>({DType::kBool, ReduceOp::kSum}, {{0, 1, 2, 255}}, {0, 1, 1, 1});
}

TEST(Reduce, ComplexProductUsesTheSchoolbookFormula) {
  expect_reduces_to<float>({DType::kComplex64, ReduceOp::kProduct}, {{1, 2, 0, 1}, {3, 4, 0, 1}},
                           {-5, 10, -1, 0});
  expect_reduces_to<double>({DType::kComplex128, ReduceOp::kProduct},
                            {{1, 2, INFINITY, 0}, {3, 4, 0, 1}, {0, 1, 1, 0}}, {-10, -5, NAN, NAN});
}

TEST(Reduce, OneSourceIsCopiedOrScaled) {
  expect_reduces_to<float>({DType::kFloat32, ReduceOp::kSum}, {{1.5f, -0.0f}}, {1.5f, -0.0f}, 4);
  expect_reduces_to<float>({DType::kFloat32, ReduceOp::kAvg}, {{6, -0.0f}}, {1.5f, -0.0f}, 4);
  expect_reduces_to<float>({DType::kFloat32, ReduceOp::kPremulSum, 2}, {{6, -0.0f}}, {12, -0.0f});
  expect_reduces_to<int64_t>({DType::kInt64, ReduceOp::kProduct}, {{6, -1}}, {6, -1});
}

// Sets a floating-point mode for its lifetime.
class FloatMode {
 public:
  explicit FloatMode(FloatControl bits) : saved_(read_float_control()) {
    write_float_control(saved_ | bits);
    mode_ = read_float_control();
  }
  ~FloatMode() { write_float_control(saved_); }
  // Ignores the exception flags, the lowest six bits of MXCSR.
  bool is_unchanged() const { return ((read_float_control() ^ mode_) & ~FloatControl{0x3f}) == 0; }

 private:
  FloatControl saved_;
  FloatControl mode_;
};

TEST(Reduce, DenormalsSurviveInAThreadThatFlushesThem) {
  constexpr size_t kCount = 77;
  for (DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    SCOPED_TRACE(dtype_name(dtype));
    // The smallest number plus twice it is three times it.
    const size_t bytes = dtype_bytes(dtype);
    Bytes one(kCount * bytes), two(kCount * bytes), expected(kCount * bytes);
    for (size_t i = 0; i < kCount; ++i) {
      one[i * bytes] = 1;
      two[i * bytes] = 2;
      expected[i * bytes] = 3;
    }
    const void* sources[] = {one.data(), two.data()};
    const auto check = [&](auto reduce_function) {
      Bytes result(kCount * bytes);
      FloatMode flushing(kFlushBits);
      reduce_function(result.data(), sources, 2, kCount, {dtype, ReduceOp::kSum}, 1);
      const bool unchanged = flushing.is_unchanged();
      EXPECT_TRUE(unchanged);
      EXPECT_EQ(result, expected);
    };
    check(reduce_scalar);
    on_every_target([&] { check(reduce); });
  }
  {
    FloatMode flushing(kFlushBits);
    volatile float smallest = std::bit_cast<float>(1u);
    volatile float twice = smallest + smallest;
    EXPECT_EQ(twice, 0.0f) << "the mode of this test does not flush, so it proves nothing";
  }
}

TEST(Reduce, FloatModeOfThreadDoesNotChangeResults) {
  constexpr size_t kCount = 1000;
  std::mt19937_64 random(7);
  for (const Reduction& reduction : every_reduction()) {
    SCOPED_TRACE(describe(reduction));
    const Bytes a = random_elements(reduction.dtype, kCount, random);
    const Bytes b = random_elements(reduction.dtype, kCount, random);
    const Bytes c = random_elements(reduction.dtype, kCount, random);
    const void* sources[] = {a.data(), b.data(), c.data()};
    Bytes expected(a.size());
    reduce_scalar(expected.data(), sources, 3, kCount, reduction, 3);
    const auto check = [&](auto reduce_function) {
      Bytes result(a.size());
      bool unchanged;
      {
        FloatMode odd(kFlushBits | kRoundingBits);  // also rounds towards zero
        reduce_function(result.data(), sources, 3, kCount, reduction, 3);
        unchanged = odd.is_unchanged();
      }
      EXPECT_TRUE(unchanged);
      EXPECT_TRUE(same(reduction.dtype, result.data(), expected.data(), kCount));
    };
    check(reduce_scalar);
    on_every_target([&] { check(reduce); });
  }
}

TEST(Reduce, FloatExceptionsRaisedUnderGuardStayRaised) {
  for (FloatControl bits : {FloatControl{0}, kFlushBits}) {
    FloatMode mode(bits);
    std::feclearexcept(FE_ALL_EXCEPT);
    {
      ScopedFloatEnvironment environment;
      std::feraiseexcept(FE_INEXACT);
    }
    EXPECT_NE(std::fetestexcept(FE_INEXACT), 0);
    std::feclearexcept(FE_ALL_EXCEPT);
  }
}

TEST(ReduceDeathTest, UnsupportedReductionAborts) {
  const float source[2] = {1, 2};
  const void* sources[] = {source, source};
  float result[2];
  for (int dtype = 0; dtype <= kDTypeCount; ++dtype) {
    for (int op = 0; op <= kReduceOpCount; ++op) {
      const Reduction reduction{static_cast<DType>(dtype), static_cast<ReduceOp>(op)};
      if (check_reduction(reduction).ok()) continue;
      SCOPED_TRACE(describe(reduction));
      EXPECT_DEATH(reduce(result, sources, 1, 1, reduction, 1), "does not have");
      EXPECT_DEATH(reduce(result, sources, 2, 1, reduction, 2), "does not have");
      EXPECT_DEATH(reduce_scalar(result, sources, 2, 1, reduction, 2), "does not have");
    }
  }
  const Reduction sum{DType::kFloat32, ReduceOp::kSum};
  EXPECT_DEATH(reduce(result, sources, 0, 1, sum, 2), "without a source");
  EXPECT_DEATH(reduce_scalar(result, sources, 0, 1, sum, 2), "without a source");
}

}  // namespace
}  // namespace dscomm
