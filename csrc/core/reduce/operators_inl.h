// The operators on vectors of accumulators: the vector counterpart of the scalar twin's operators.
// prepare() converts every source, combine() merges two of them, and finish() converts the result.
// Included once per instruction set, hence the unusual include guard.
#if defined(DSCOMM_CORE_REDUCE_OPERATORS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef DSCOMM_CORE_REDUCE_OPERATORS_INL_H
#undef DSCOMM_CORE_REDUCE_OPERATORS_INL_H
#else
#define DSCOMM_CORE_REDUCE_OPERATORS_INL_H
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dscomm {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

struct PlainOperator {
  template <class D>
  HWY_INLINE hn::Vec<D> prepare(D, hn::Vec<D> source) const {
    return source;
  }
  template <class D>
  HWY_INLINE hn::Vec<D> finish(D, hn::Vec<D> result) const {
    return result;
  }
};

struct Sum : PlainOperator {
  template <class D>
  HWY_INLINE hn::Vec<D> combine(D, hn::Vec<D> a, hn::Vec<D> b) const {
    return hn::Add(a, b);
  }
};

struct Product : PlainOperator {
  template <class D>
  HWY_INLINE hn::Vec<D> combine(D, hn::Vec<D> a, hn::Vec<D> b) const {
    return hn::Mul(a, b);
  }
};

// Instruction sets disagree about NaN and about the minimum of -0 and +0, so floating-point minima
// are explicit. If neither operand is less, they are equal or one is NaN. Equal operands differ at
// most in the sign bit, and "or" gives -0 if one is -0; "or" with a NaN is a NaN.
struct Minimum : PlainOperator {
  template <class D>
  HWY_INLINE hn::Vec<D> combine(D, hn::Vec<D> a, hn::Vec<D> b) const {
    if constexpr (hwy::IsFloat<hn::TFromD<D>>()) {
      const auto equal_or_nan = hn::Or(a, b);
      return hn::IfThenElse(hn::Lt(a, b), a, hn::IfThenElse(hn::Lt(b, a), b, equal_or_nan));
    } else {
      return hn::Min(a, b);
    }
  }
};

// As Minimum, but the result is -0 only if both operands are -0: "and" of the sign bits.
struct Maximum : PlainOperator {
  template <class D>
  HWY_INLINE hn::Vec<D> combine(D d, hn::Vec<D> a, hn::Vec<D> b) const {
    if constexpr (hwy::IsFloat<hn::TFromD<D>>()) {
      const auto sign_if_one_has_it = hn::And(hn::Xor(a, b), hn::SignBit(d));
      const auto equal_or_nan = hn::AndNot(sign_if_one_has_it, hn::Or(a, b));
      return hn::IfThenElse(hn::Lt(b, a), a, hn::IfThenElse(hn::Lt(a, b), b, equal_or_nan));
    } else {
      return hn::Max(a, b);
    }
  }
};

struct BitAnd : PlainOperator {
  template <class D>
  HWY_INLINE hn::Vec<D> combine(D, hn::Vec<D> a, hn::Vec<D> b) const {
    return hn::And(a, b);
  }
};

struct BitOr : PlainOperator {
  template <class D>
  HWY_INLINE hn::Vec<D> combine(D, hn::Vec<D> a, hn::Vec<D> b) const {
    return hn::Or(a, b);
  }
};

struct BitXor : PlainOperator {
  template <class D>
  HWY_INLINE hn::Vec<D> combine(D, hn::Vec<D> a, hn::Vec<D> b) const {
    return hn::Xor(a, b);
  }
};

// Divides instead of multiplying by the reciprocal, so that the result is rounded once.
struct Average : Sum {
  explicit Average(int group_size) : divisor(group_size) {}
  template <class D>
  HWY_INLINE hn::Vec<D> finish(D d, hn::Vec<D> result) const {
    return hn::Div(result, hn::Set(d, static_cast<hn::TFromD<D>>(divisor)));
  }
  int divisor;
};

struct PremultipliedSum : Sum {
  explicit PremultipliedSum(double premultiplier) : factor(premultiplier) {}
  template <class D>
  HWY_INLINE hn::Vec<D> prepare(D d, hn::Vec<D> source) const {
    return hn::Mul(source, hn::Set(d, static_cast<hn::TFromD<D>>(factor)));
  }
  double factor;
};

}  // namespace HWY_NAMESPACE
}  // namespace dscomm
HWY_AFTER_NAMESPACE();

#endif  // DSCOMM_CORE_REDUCE_OPERATORS_INL_H
