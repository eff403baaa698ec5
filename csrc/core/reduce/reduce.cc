// reduce(): the vector kernels, compiled once per instruction set and chosen at run time.
//
// A block of destination elements is computed in registers from all sources and written once, after
// all sources of the block were read: so dst may be one of the sources. The tail is done in shorter
// and shorter vectors, so that nothing beyond the last element is touched.
//
// On x86 there are kernels for SSE4 (2008), AVX2 (2013) and Skylake's AVX-512; older processors use
// the scalar twin or, with Clang or GCC 12.3 and later, Highway's EMU128. Targets SSSE3 and AVX3_DL
// are left out: no processor that is used for training has SSSE3 without SSE4, and reductions gain
// nothing from AVX3_DL. On Arm there are kernels for NEON and each of Highway's SVE targets.
//
// Highway's functions are used if they give the same bits on every instruction set. For the others
// (halves, floating-point minimum and maximum) see lanes_inl.h and operators_inl.h.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/reduce/reduce.cc"
// clang-format off
// foreach_target.h must come first: it includes this whole file once per instruction set, and
// lanes_inl.h is compiled for the current one.
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on

#include "core/reduce/reduce.h"

#include <cstdint>
#include <cstring>
#include <iterator>
#include <type_traits>

#include "core/base/status.h"
#include "core/reduce/float_environment.h"
#include "core/reduce/kernels.h"
#include "core/reduce/lanes_inl.h"
#include "core/reduce/operators_inl.h"

HWY_BEFORE_NAMESPACE();
namespace dscomm {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

const char* target_name() { return hwy::TargetName(HWY_TARGET); }

#if HWY_TARGET == HWY_SCALAR

// No instruction set beyond the processor's baseline: use the scalar twin.
void reduce_vectors(const Operands& operands, const Reduction& reduction, int divisor) {
  reduce_elements(operands, reduction, divisor);
}

#else

// One vector of the result, starting at element i.
template <class Lanes, class D, class Operator, typename SourceCount>
HWY_INLINE void reduce_one_vector(D d, const Operator& op, void* dst, const void* const* sources,
                                  SourceCount n, size_t i) {
  const size_t start = i * Lanes::kElementBytes;
  auto result = op.prepare(d, Lanes::load(d, static_cast<const uint8_t*>(sources[0]) + start));
  for (int source = 1; source < n; ++source) {
    const uint8_t* memory = static_cast<const uint8_t*>(sources[source]) + start;
    result = op.combine(d, result, op.prepare(d, Lanes::load(d, memory)));
  }
  Lanes::store(d, op.finish(d, result), static_cast<uint8_t*>(dst) + start);
}

// Four vectors at a time: four chains of additions hide the latency, and each source is read for
// four vectors before the next. Named variables, since vectors of unknown length (SVE) allow no
// array.
template <class Lanes, class D, class Operator, typename SourceCount>
HWY_INLINE void reduce_four_vectors(D d, const Operator& op, void* dst, const void* const* sources,
                                    SourceCount n, size_t i) {
  const size_t start = i * Lanes::kElementBytes;
  const size_t step = hn::Lanes(d) * Lanes::kElementBytes;
  const uint8_t* memory = static_cast<const uint8_t*>(sources[0]) + start;
  auto result0 = op.prepare(d, Lanes::load(d, memory));
  auto result1 = op.prepare(d, Lanes::load(d, memory + step));
  auto result2 = op.prepare(d, Lanes::load(d, memory + 2 * step));
  auto result3 = op.prepare(d, Lanes::load(d, memory + 3 * step));
  for (int source = 1; source < n; ++source) {
    memory = static_cast<const uint8_t*>(sources[source]) + start;
    result0 = op.combine(d, result0, op.prepare(d, Lanes::load(d, memory)));
    result1 = op.combine(d, result1, op.prepare(d, Lanes::load(d, memory + step)));
    result2 = op.combine(d, result2, op.prepare(d, Lanes::load(d, memory + 2 * step)));
    result3 = op.combine(d, result3, op.prepare(d, Lanes::load(d, memory + 3 * step)));
  }
  uint8_t* written = static_cast<uint8_t*>(dst) + start;
  Lanes::store(d, op.finish(d, result0), written);
  Lanes::store(d, op.finish(d, result1), written + step);
  Lanes::store(d, op.finish(d, result2), written + 2 * step);
  Lanes::store(d, op.finish(d, result3), written + 3 * step);
}

// Two pairs of bfloat16 vectors at a time.
template <class D, class Operator, typename SourceCount>
HWY_INLINE void reduce_two_pairs(D d, const Operator& op, void* dst, const void* const* sources,
                                 SourceCount n, size_t i) {
  const size_t start = i * BFloat16Lanes::kElementBytes;
  const size_t step = 2 * hn::Lanes(d) * BFloat16Lanes::kElementBytes;
  const uint8_t* memory = static_cast<const uint8_t*>(sources[0]) + start;
  hn::Vec<D> even0, odd0, even1, odd1;
  BFloat16Pair::load(d, memory, even0, odd0);
  BFloat16Pair::load(d, memory + step, even1, odd1);
  even0 = op.prepare(d, even0);
  odd0 = op.prepare(d, odd0);
  even1 = op.prepare(d, even1);
  odd1 = op.prepare(d, odd1);
  for (int source = 1; source < n; ++source) {
    hn::Vec<D> even, odd;
    memory = static_cast<const uint8_t*>(sources[source]) + start;
    BFloat16Pair::load(d, memory, even, odd);
    even0 = op.combine(d, even0, op.prepare(d, even));
    odd0 = op.combine(d, odd0, op.prepare(d, odd));
    BFloat16Pair::load(d, memory + step, even, odd);
    even1 = op.combine(d, even1, op.prepare(d, even));
    odd1 = op.combine(d, odd1, op.prepare(d, odd));
  }
  uint8_t* written = static_cast<uint8_t*>(dst) + start;
  BFloat16Pair::store(d, op.finish(d, even0), op.finish(d, odd0), written);
  BFloat16Pair::store(d, op.finish(d, even1), op.finish(d, odd1), written + step);
}

template <class Lanes, class Operator, typename SourceCount>
HWY_INLINE void reduce_all(const Operator& op, void* dst, const void* const* sources, SourceCount n,
                           size_t count) {
  using Accumulator = typename Lanes::Accumulator;
  const hn::ScalableTag<Accumulator> whole;
  const hn::CappedTag<Accumulator, 16 / sizeof(Accumulator)> short_vector;
  const hn::CappedTag<Accumulator, 1> one;

  size_t i = 0;
  const size_t lanes = hn::Lanes(whole);
  if constexpr (std::is_same_v<Lanes, BFloat16Lanes>) {
    for (; count - i >= 4 * lanes; i += 4 * lanes) reduce_two_pairs(whole, op, dst, sources, n, i);
  }
  for (; count - i >= 4 * lanes; i += 4 * lanes)
    reduce_four_vectors<Lanes>(whole, op, dst, sources, n, i);
  for (; count - i >= lanes; i += lanes) reduce_one_vector<Lanes>(whole, op, dst, sources, n, i);
  const size_t short_lanes = hn::Lanes(short_vector);
  for (; count - i >= short_lanes; i += short_lanes)
    reduce_one_vector<Lanes>(short_vector, op, dst, sources, n, i);
  for (; i < count; ++i) reduce_one_vector<Lanes>(one, op, dst, sources, n, i);
}

// Two sources, the common case (two ranks, or one step of a tree), get code without a loop over
// sources. The pointers are copied, or the compiler would load them again after each store to dst.
template <class Lanes, class Operator>
HWY_NOINLINE void reduce_with(const Operator& op, const Operands& operands) {
  if (operands.n == 2) {
    const void* const pair[2] = {operands.sources[0], operands.sources[1]};
    reduce_all<Lanes>(op, operands.dst, pair, std::integral_constant<int, 2>(), operands.count);
  } else {
    reduce_all<Lanes>(op, operands.dst, operands.sources, operands.n, operands.count);
  }
}

template <class Lanes>
void reduce_floating(const Operands& operands, const Reduction& reduction, int divisor) {
  switch (reduction.op) {
    case ReduceOp::kSum:
      return reduce_with<Lanes>(Sum{}, operands);
    case ReduceOp::kProduct:
      return reduce_with<Lanes>(Product{}, operands);
    case ReduceOp::kMin:
      return reduce_with<Lanes>(Minimum{}, operands);
    case ReduceOp::kMax:
      return reduce_with<Lanes>(Maximum{}, operands);
    case ReduceOp::kAvg:
      return reduce_with<Lanes>(Average{divisor}, operands);
    case ReduceOp::kPremulSum:
      return reduce_with<Lanes>(PremultipliedSum{reduction.factor}, operands);
    default:
      return reduce_elements(operands, reduction, divisor);  // aborts
  }
}

template <typename T>
void reduce_complex(const Operands& operands, const Reduction& reduction, int divisor) {
  switch (reduction.op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
    case ReduceOp::kPremulSum:
      return reduce_floating<PlainLanes<T> >(as_real_numbers(operands), reduction, divisor);
    default:
      return reduce_elements(operands, reduction, divisor);  // PRODUCT; aborts for others
  }
}

template <class Lanes>
void reduce_bits(const Operands& operands, const Reduction& reduction, int divisor) {
  switch (reduction.op) {
    case ReduceOp::kBand:
      return reduce_with<Lanes>(BitAnd{}, operands);
    case ReduceOp::kBor:
      return reduce_with<Lanes>(BitOr{}, operands);
    case ReduceOp::kBxor:
      return reduce_with<Lanes>(BitXor{}, operands);
    default:
      return reduce_elements(operands, reduction, divisor);  // aborts
  }
}

void reduce_bool(const Operands& operands, const Reduction& reduction, int divisor) {
  reduce_bits<BoolLanes>(operands, {reduction.dtype, bitwise_op_of_bool(reduction.op)}, divisor);
}

// Minimum and maximum depend on sign and width, arithmetic on the width alone, and bitwise
// operators on neither, so dtypes share code.
template <typename T>
void reduce_integers(const Operands& operands, const Reduction& reduction, int divisor) {
  using Wrapping = PlainLanes<std::make_unsigned_t<T> >;
  Operands bytes = operands;
  bytes.count *= sizeof(T);
  switch (reduction.op) {
    case ReduceOp::kSum:
      return reduce_with<Wrapping>(Sum{}, operands);
    case ReduceOp::kProduct:
      // Not all processors multiply vectors of elements of other widths.
      if constexpr (sizeof(T) == 2 || sizeof(T) == 4) {
        return reduce_with<Wrapping>(Product{}, operands);
      } else {
        return reduce_elements(operands, reduction, divisor);
      }
    case ReduceOp::kMin:
      return reduce_with<PlainLanes<T> >(Minimum{}, operands);
    case ReduceOp::kMax:
      return reduce_with<PlainLanes<T> >(Maximum{}, operands);
    default:
      return reduce_bits<PlainLanes<uint8_t> >(bytes, reduction, divisor);
  }
}

void reduce_vectors(const Operands& operands, const Reduction& reduction, int divisor) {
  // In the order of DType.
  static constexpr Kernel kKernels[] = {reduce_bool,
                                        reduce_integers<uint8_t>,
                                        reduce_integers<int8_t>,
                                        reduce_integers<uint16_t>,
                                        reduce_integers<int16_t>,
                                        reduce_integers<uint32_t>,
                                        reduce_integers<int32_t>,
                                        reduce_integers<uint64_t>,
                                        reduce_integers<int64_t>,
                                        reduce_floating<Float16Lanes>,
                                        reduce_floating<BFloat16Lanes>,
                                        reduce_floating<PlainLanes<float> >,
                                        reduce_floating<PlainLanes<double> >,
                                        reduce_complex<float>,
                                        reduce_complex<double>};
  static_assert(std::size(kKernels) == static_cast<size_t>(DType::kComplex128) + 1);
  const auto index = static_cast<size_t>(reduction.dtype);
  const Kernel kernel = index < std::size(kKernels) ? kKernels[index] : reduce_elements;  // aborts
  kernel(operands, reduction, divisor);
}

#endif  // HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace dscomm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace dscomm {
namespace {

HWY_EXPORT(reduce_vectors);
HWY_EXPORT(target_name);

// A single source is copied, except for AVG, PREMUL_SUM and bool, which is made 0 or 1.
bool is_copy(const Reduction& reduction, int n) {
  return n == 1 && reduction.op != ReduceOp::kAvg && reduction.op != ReduceOp::kPremulSum &&
         reduction.dtype != DType::kBool;
}

}  // namespace

void reduce(void* dst, const void* const* sources, int n, size_t count, const Reduction& reduction,
            int divisor) {
  DSCOMM_CHECK(n >= 1, "a reduction without a source");
  if (count == 0) return;
  if (is_copy(reduction, n)) {
    DSCOMM_CHECK(check_reduction(reduction).ok(), "an operator that its dtype does not have");
    if (dst != sources[0]) std::memcpy(dst, sources[0], count * dtype_bytes(reduction.dtype));
    return;
  }
  ScopedFloatEnvironment environment;
  HWY_DYNAMIC_DISPATCH(reduce_vectors)({dst, sources, n, count}, reduction, divisor);
}

const char* reduce_target_name() { return HWY_DYNAMIC_DISPATCH(target_name)(); }

}  // namespace dscomm
#endif  // HWY_ONCE
