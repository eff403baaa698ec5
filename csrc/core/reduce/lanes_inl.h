// Loads and stores vectors of each dtype: the vector counterpart of the Elements in
// reduce_scalar.cc. Included once per instruction set, hence the unusual include guard.
//
// D is Highway's tag (type and lanes) of a vector of accumulators. A dtype narrower than its
// accumulator is loaded one element per lane, hence fewer bytes; no bytes after them are accessed.
#if defined(DSCOMM_CORE_REDUCE_LANES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef DSCOMM_CORE_REDUCE_LANES_INL_H
#undef DSCOMM_CORE_REDUCE_LANES_INL_H
#else
#define DSCOMM_CORE_REDUCE_LANES_INL_H
#endif

#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dscomm {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Tensors may be unaligned, even to their elements, so memory is accessed as bytes.
template <class D>
HWY_INLINE hn::Vec<D> load_bytes(D d, const uint8_t* memory) {
  const hn::Repartition<uint8_t, D> bytes;
  return hn::BitCast(d, hn::LoadU(bytes, memory));
}

template <class D>
HWY_INLINE void store_bytes(D, hn::Vec<D> value, uint8_t* memory) {
  const hn::Repartition<uint8_t, D> bytes;
  hn::StoreU(hn::BitCast(bytes, value), bytes, memory);
}

template <typename T>
struct PlainLanes {
  using Accumulator = T;
  static constexpr size_t kElementBytes = sizeof(T);
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const uint8_t* memory) {
    return load_bytes(d, memory);
  }
  template <class D>
  static HWY_INLINE void store(D d, hn::Vec<D> value, uint8_t* memory) {
    store_bytes(d, value, memory);
  }
};

// Any byte except 0 is true; bitwise operators on 0 and 1 give 0 and 1.
struct BoolLanes : PlainLanes<uint8_t> {
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const uint8_t* memory) {
    return hn::Min(load_bytes(d, memory), hn::Set(d, 1));
  }
};

// Converts between 32-bit lanes and 16 bits of memory; the upper half of every lane is zero.
template <class DU32>
HWY_INLINE hn::Vec<DU32> load_16_bits(DU32 du32, const uint8_t* memory) {
  const hn::Rebind<uint16_t, DU32> du16;
  return hn::PromoteTo(du32, load_bytes(du16, memory));
}

template <class DU32>
HWY_INLINE void store_16_bits(DU32, hn::Vec<DU32> bits, uint8_t* memory) {
  const hn::Rebind<uint16_t, DU32> du16;
  const hn::RebindToSigned<DU32> di32;
  // Demoting saturates, but these values are below 2^16.
  store_bytes(du16, hn::DemoteTo(du16, hn::BitCast(di32, bits)), memory);
}

// bits / 2^kShift, to nearest even; lanes must be below 2^31 so that the sum fits.
template <int kShift, class DU32>
HWY_INLINE hn::Vec<DU32> shift_right_to_nearest_even(DU32 du32, hn::Vec<DU32> bits) {
  const auto just_below_half = hn::Set(du32, (1u << (kShift - 1)) - 1);
  const auto is_odd = hn::And(hn::ShiftRight<kShift>(bits), hn::Set(du32, 1));
  return hn::ShiftRight<kShift>(hn::Add(hn::Add(bits, just_below_half), is_odd));
}

// Converts as half.h does, because Highway's demotion to bfloat16 truncates or rounds depending on
// the instruction set.
struct BFloat16Lanes {
  using Accumulator = float;
  static constexpr size_t kElementBytes = 2;
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const uint8_t* memory) {
    const hn::RebindToUnsigned<D> du32;
    return hn::BitCast(d, hn::ShiftLeft<16>(load_16_bits(du32, memory)));
  }
  template <class D>
  static HWY_INLINE void store(D, hn::Vec<D> value, uint8_t* memory) {
    const hn::RebindToUnsigned<D> du32;
    const auto sign = hn::And(hn::BitCast(du32, value), hn::Set(du32, 0x80000000));
    const auto magnitude = hn::BitCast(du32, hn::Abs(value));
    const auto rounded = shift_right_to_nearest_even<16>(du32, magnitude);
    const auto is_nan = hn::RebindMask(du32, hn::Ne(value, value));
    const auto selected = hn::IfThenElse(is_nan, hn::Set(du32, 0x7fc0), rounded);
    store_16_bits(du32, hn::Or(selected, hn::ShiftRight<16>(sign)), memory);
  }
};

// Handles twice as many bfloat16 as D has lanes, as two float vectors: even and odd elements.
// This avoids promotion and demotion. Gives the same bits as BFloat16Lanes, except NaN payloads.
struct BFloat16Pair {
  template <class D>
  static HWY_INLINE void load(D d, const uint8_t* memory, hn::Vec<D>& even, hn::Vec<D>& odd) {
    const hn::RebindToUnsigned<D> du32;
    const auto both = load_bytes(du32, memory);  // little-endian: the even element is lower
    even = hn::BitCast(d, hn::ShiftLeft<16>(both));
    odd = hn::BitCast(d, hn::And(both, hn::Set(du32, 0xffff0000)));
  }
  template <class D>
  static HWY_INLINE void store(D d, hn::Vec<D> even, hn::Vec<D> odd, uint8_t* memory) {
    const hn::RebindToUnsigned<D> du32;
    const auto upper = hn::And(round(d, odd), hn::Set(du32, 0xffff0000));
    store_bytes(du32, hn::Or(upper, hn::ShiftRight<16>(round(d, even))), memory);
  }

 private:
  // Rounds to nearest even, into the upper half. A NaN is not rounded: it could carry to the sign.
  template <class D>
  static HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> round(D, hn::Vec<D> value) {
    const hn::RebindToUnsigned<D> du32;
    const auto bits = hn::BitCast(du32, value);
    const auto is_odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du32, 1));
    const auto rounded = hn::Add(hn::Add(bits, hn::Set(du32, 0x7fff)), is_odd);
    const auto is_nan = hn::RebindMask(du32, hn::Ne(value, value));
    return hn::IfThenElse(is_nan, hn::Or(bits, hn::Set(du32, 0x00400000)), rounded);
  }
};

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2 && !defined(HWY_DISABLE_F16C)

// AVX2 and later have F16C, which converts to float exactly and back to nearest even, with
// denormals, in any mode of the thread.
struct Float16Lanes {
  using Accumulator = float;
  static constexpr size_t kElementBytes = 2;
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const uint8_t* memory) {
    const hn::Rebind<uint16_t, D> du16;
    const hn::Rebind<hwy::float16_t, D> df16;
    return hn::PromoteTo(d, hn::BitCast(df16, load_bytes(du16, memory)));
  }
  template <class D>
  static HWY_INLINE void store(D, hn::Vec<D> value, uint8_t* memory) {
    const hn::Rebind<uint16_t, D> du16;
    const hn::Rebind<hwy::float16_t, D> df16;
    store_bytes(du16, hn::BitCast(du16, hn::DemoteTo(df16, value)), memory);
  }
};

#else

// Computes the same bits as half.h, because Highway's emulation mishandles infinities and NaN, and
// truncates. Denormals go through an addition that is exact or rounds at their last bit, to nearest
// even, because kernels run under ScopedFloatEnvironment.
struct Float16Lanes {
  using Accumulator = float;
  static constexpr size_t kElementBytes = 2;

  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const uint8_t* memory) {
    const hn::RebindToUnsigned<D> du32;
    const hn::RebindToSigned<D> di32;
    const auto bits = load_16_bits(du32, memory);
    const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(du32, 0x8000)));
    const auto magnitude = hn::And(bits, hn::Set(du32, 0x7fff));
    const auto shifted = hn::ShiftLeft<13>(magnitude);

    const auto number = hn::Add(shifted, hn::Set(du32, (127 - 15) << 23));
    const auto infinity_or_nan = hn::Or(shifted, hn::Set(du32, 0x7f800000));
    // Putting a denormal's bits into the fraction of 2^-14 adds the denormal; Sub() removes 2^-14.
    const auto smallest_normal = hn::Set(du32, (127 - 14) << 23);
    const auto enlarged = hn::BitCast(d, hn::Or(shifted, smallest_normal));
    const auto denormal = hn::BitCast(du32, hn::Sub(enlarged, hn::BitCast(d, smallest_normal)));

    const auto signed_magnitude = hn::BitCast(di32, magnitude);
    const auto is_large = hn::RebindMask(du32, hn::Gt(signed_magnitude, hn::Set(di32, 0x7bff)));
    const auto is_denormal = hn::RebindMask(du32, hn::Lt(signed_magnitude, hn::Set(di32, 0x0400)));
    const auto selected =
        hn::IfThenElse(is_denormal, denormal, hn::IfThenElse(is_large, infinity_or_nan, number));
    return hn::BitCast(d, hn::Or(selected, sign));
  }

  template <class D>
  static HWY_INLINE void store(D d, hn::Vec<D> value, uint8_t* memory) {
    const hn::RebindToUnsigned<D> du32;
    const hn::RebindToSigned<D> di32;
    const auto sign = hn::And(hn::BitCast(du32, value), hn::Set(du32, 0x80000000));
    const auto magnitude = hn::BitCast(du32, hn::Abs(value));

    // Everything from 2^16 up overflows, so it is clamped to 2^16, which becomes infinity.
    const auto two_to_the_16 = hn::Set(du32, (127 + 16) << 23);
    const auto clamped = hn::Min(magnitude, two_to_the_16);
    const auto rebiased = hn::Sub(clamped, hn::Set(du32, (127 - 15) << 23));
    const auto number = shift_right_to_nearest_even<13>(du32, rebiased);
    // Adding 0.5 rounds: floats in [0.5, 1) are multiples of 2^-24, as float16 denormals are.
    const auto half = hn::Set(d, 0.5f);
    const auto above_half = hn::Add(hn::Abs(value), half);
    const auto denormal = hn::Sub(hn::BitCast(du32, above_half), hn::BitCast(du32, half));

    const auto signed_magnitude = hn::BitCast(di32, magnitude);
    const auto smallest_normal = hn::Set(di32, (127 - 14) << 23);
    const auto infinity = hn::Set(di32, 0x7f800000);
    const auto is_denormal = hn::RebindMask(du32, hn::Lt(signed_magnitude, smallest_normal));
    const auto is_nan = hn::RebindMask(du32, hn::Gt(signed_magnitude, infinity));
    const auto selected = hn::IfThenElse(is_nan, hn::Set(du32, 0x7e00),
                                         hn::IfThenElse(is_denormal, denormal, number));
    store_16_bits(du32, hn::Or(selected, hn::ShiftRight<16>(sign)), memory);
  }
};

#endif  // F16C

}  // namespace HWY_NAMESPACE
}  // namespace dscomm
HWY_AFTER_NAMESPACE();

#endif  // DSCOMM_CORE_REDUCE_LANES_INL_H
