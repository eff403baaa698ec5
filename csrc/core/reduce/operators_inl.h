// The operators on vectors of accumulators: the vector counterpart of the scalar twin's operators,
// with the same three steps. prepare() meets every source, combine() takes two of them to one, and
// finish() meets the result. Included once for every instruction set, hence the unusual guard.
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

// Instruction sets disagree about the smaller of -0 and +0, and about NaN, so floating minima are
// spelled out. Where neither operand is less, they are equal or one is a NaN. Equal operands differ
// in their sign bit at most, and "or" gives -0 if there is one; "or" with a NaN is a NaN.
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

// As above; the sign bit must be set in both for -0 to be the larger.
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

// A division, not a product with the reciprocal: it is rounded once.
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
