// The scalar twin of the vector kernels: defines every reduction, written as plainly as possible.
//
// An Element is a dtype's layout in memory and its accumulator's type. An operator combines two
// accumulators. Before that, prepare() converts each source; after it, finish() converts the
// result.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <type_traits>

#include "core/base/status.h"
#include "core/reduce/float_environment.h"
#include "core/reduce/half.h"
#include "core/reduce/kernels.h"
#include "core/reduce/reduce.h"

namespace dscomm {
namespace {

template <typename T>
struct PlainElement {
  using Memory = T;
  using Accumulator = T;
  static T from_memory(T memory) { return memory; }
  static T to_memory(T value) { return value; }
};

struct Float16Element {
  using Memory = uint16_t;
  using Accumulator = float;
  static float from_memory(uint16_t memory) { return float_from_float16(memory); }
  static uint16_t to_memory(float value) { return float16_from_float(value); }
};

struct BFloat16Element {
  using Memory = uint16_t;
  using Accumulator = float;
  static float from_memory(uint16_t memory) { return float_from_bfloat16(memory); }
  static uint16_t to_memory(float value) { return bfloat16_from_float(value); }
};

struct BoolElement : PlainElement<uint8_t> {
  static uint8_t from_memory(uint8_t memory) { return memory != 0 ? 1 : 0; }
};

// Not std::complex, whose multiplication handles infinities differently on each compiler.
template <typename T>
struct Complex {
  T real;
  T imaginary;
  friend Complex operator*(Complex a, Complex b) {
    return {a.real * b.real - a.imaginary * b.imaginary,
            a.real * b.imaginary + a.imaginary * b.real};
  }
};

// -0 is less than +0.
template <typename T>
bool is_less(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (a == b) return std::signbit(a) && !std::signbit(b);
  }
  return a < b;
}

template <typename T>
bool is_nan(T value) {
  return value != value;
}

struct PlainOperator {
  template <typename T>
  T prepare(T source) const {
    return source;
  }
  template <typename T>
  T finish(T result) const {
    return result;
  }
};

// Integers wrap: computing modulo 2^64 and then truncating equals computing in the narrow type.
template <typename Function>
struct Wrapping : PlainOperator {
  template <typename T>
  T combine(T a, T b) const {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(Function()(static_cast<uint64_t>(a), static_cast<uint64_t>(b)));
    } else {
      return Function()(a, b);
    }
  }
};

using Sum = Wrapping<std::plus<>>;
using Product = Wrapping<std::multiplies<>>;
using BitAnd = Wrapping<std::bit_and<>>;
using BitOr = Wrapping<std::bit_or<>>;
using BitXor = Wrapping<std::bit_xor<>>;

struct Minimum : PlainOperator {
  template <typename T>
  T combine(T a, T b) const {
    return is_nan(a) || (!is_nan(b) && is_less(a, b)) ? a : b;
  }
};

struct Maximum : PlainOperator {
  template <typename T>
  T combine(T a, T b) const {
    return is_nan(a) || (!is_nan(b) && is_less(b, a)) ? a : b;
  }
};

struct Average : Sum {
  explicit Average(int group_size) : divisor(group_size) {}
  template <typename T>
  T finish(T result) const {
    return result / static_cast<T>(divisor);
  }
  int divisor;
};

struct PremultipliedSum : Sum {
  explicit PremultipliedSum(double premultiplier) : factor(premultiplier) {}
  template <typename T>
  T prepare(T source) const {
    return source * static_cast<T>(factor);
  }
  double factor;
};

// Tensors may be unaligned, so elements are copied in and out of memory.
template <typename Element>
typename Element::Accumulator load(const void* memory, size_t index) {
  typename Element::Memory element;
  const char* source = static_cast<const char*>(memory) + index * sizeof(element);
  std::memcpy(&element, source, sizeof(element));
  return Element::from_memory(element);
}

template <typename Element>
void store(void* memory, size_t index, typename Element::Accumulator value) {
  const typename Element::Memory element = Element::to_memory(value);
  std::memcpy(static_cast<char*>(memory) + index * sizeof(element), &element, sizeof(element));
}

template <typename Element, typename Operator>
void reduce_with(const Operator& op, const Operands& operands) {
  for (size_t i = 0; i < operands.count; ++i) {
    auto result = op.prepare(load<Element>(operands.sources[0], i));
    for (int source = 1; source < operands.n; ++source)
      result = op.combine(result, op.prepare(load<Element>(operands.sources[source], i)));
    store<Element>(operands.dst, i, op.finish(result));
  }
}

[[noreturn]] void illegal_reduction() {
  check_failed("check_reduction(reduction).ok()", "an operator that its dtype does not have",
               __FILE__, __LINE__);
}

template <typename Element>
void reduce_floating(const Operands& operands, const Reduction& reduction, int divisor) {
  switch (reduction.op) {
    case ReduceOp::kSum:
      return reduce_with<Element>(Sum{}, operands);
    case ReduceOp::kProduct:
      return reduce_with<Element>(Product{}, operands);
    case ReduceOp::kMin:
      return reduce_with<Element>(Minimum{}, operands);
    case ReduceOp::kMax:
      return reduce_with<Element>(Maximum{}, operands);
    case ReduceOp::kAvg:
      return reduce_with<Element>(Average{divisor}, operands);
    case ReduceOp::kPremulSum:
      return reduce_with<Element>(PremultipliedSum{reduction.factor}, operands);
    default:
      illegal_reduction();
  }
}

template <typename T>
void reduce_complex(const Operands& operands, const Reduction& reduction, int divisor) {
  switch (reduction.op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
    case ReduceOp::kPremulSum:
      return reduce_floating<PlainElement<T>>(as_real_numbers(operands), reduction, divisor);
    case ReduceOp::kProduct:
      return reduce_with<PlainElement<Complex<T>>>(Product{}, operands);
    default:
      illegal_reduction();
  }
}

template <typename Element>
void reduce_bits(const Operands& operands, ReduceOp op) {
  switch (op) {
    case ReduceOp::kBand:
      return reduce_with<Element>(BitAnd{}, operands);
    case ReduceOp::kBor:
      return reduce_with<Element>(BitOr{}, operands);
    case ReduceOp::kBxor:
      return reduce_with<Element>(BitXor{}, operands);
    default:
      illegal_reduction();
  }
}

void reduce_bool(const Operands& operands, const Reduction& reduction, int) {
  reduce_bits<BoolElement>(operands, bitwise_op_of_bool(reduction.op));
}

template <typename T>
void reduce_integers(const Operands& operands, const Reduction& reduction, int) {
  using Element = PlainElement<T>;
  switch (reduction.op) {
    case ReduceOp::kSum:
      return reduce_with<Element>(Sum{}, operands);
    case ReduceOp::kProduct:
      return reduce_with<Element>(Product{}, operands);
    case ReduceOp::kMin:
      return reduce_with<Element>(Minimum{}, operands);
    case ReduceOp::kMax:
      return reduce_with<Element>(Maximum{}, operands);
    default:
      return reduce_bits<Element>(operands, reduction.op);
  }
}

}  // namespace

void reduce_elements(const Operands& operands, const Reduction& reduction, int divisor) {
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
                                        reduce_floating<Float16Element>,
                                        reduce_floating<BFloat16Element>,
                                        reduce_floating<PlainElement<float>>,
                                        reduce_floating<PlainElement<double>>,
                                        reduce_complex<float>,
                                        reduce_complex<double>};
  static_assert(std::size(kKernels) == static_cast<size_t>(DType::kComplex128) + 1);
  const auto index = static_cast<size_t>(reduction.dtype);
  if (index >= std::size(kKernels)) illegal_reduction();
  kKernels[index](operands, reduction, divisor);
}

void reduce_scalar(void* dst, const void* const* sources, int n, size_t count,
                   const Reduction& reduction, int divisor) {
  DSCOMM_CHECK(n >= 1, "a reduction without a source");
  ScopedFloatEnvironment environment;
  reduce_elements({dst, sources, n, count}, reduction, divisor);
}

}  // namespace dscomm
