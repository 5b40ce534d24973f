// This file holds the vector helpers of CPU kernels, on top of Google Highway's headers. Kernels
// compute in vectors of float, whatever float type their tensors have; these helpers load, store
// and convert. cpu/foreach_target.h says how a kernel file is laid out.
//
// `d` is a tag for float vectors, usually `const F32 d;`, with Lanes(d) lanes: 4, 8 or 16. T, the
// type of the elements in memory, is float, hwy::float16_t or hwy::bfloat16_t.
//
// The conversions here replace Highway's because Highway 1.0.3 truncates when it demotes to
// bfloat16, and without F16C also when it demotes to float16, where it treats infinity and NaN as
// numbers. Ours round to nearest, ties to even.

// This part is compiled once per translation unit.
#ifndef FK_CPU_SIMD_H_
#define FK_CPU_SIMD_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/tensor.h"
#include "cpu/targets.h"

// FK_CPU_EXPORT(f) makes a table of f's versions for all instruction sets, and FK_CPU_DISPATCH(f)
// picks the one for the active instruction set (cpu/targets.h). Unlike Highway's own macros, they
// need nothing of its library.
#if defined(__x86_64__)
#define FK_CPU_EXPORT(function)                                                            \
  static decltype(&HWY_STATIC_DISPATCH(function)) const HWY_DISPATCH_TABLE(function)[] = { \
      HWY_CHOOSE_SSE4(function), HWY_CHOOSE_AVX2(function), HWY_CHOOSE_AVX3(function)}
#else
#define FK_CPU_EXPORT(function)                                                            \
  static decltype(&HWY_STATIC_DISPATCH(function)) const HWY_DISPATCH_TABLE(function)[] = { \
      &HWY_STATIC_DISPATCH(function)}
#endif
#define FK_CPU_DISPATCH(function) (HWY_DISPATCH_TABLE(function)[::fk::cpu::active_index()])

#endif  // FK_CPU_SIMD_H_

// This part is compiled once per instruction set.
#if defined(FK_CPU_SIMD_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_CPU_SIMD_PER_TARGET
#undef FK_CPU_SIMD_PER_TARGET
#else
#define FK_CPU_SIMD_PER_TARGET
#endif

#include "hwy/cache_control.h"
#include "hwy/highway.h"

// Highway's own dispatch would ignore FK_CPU_TARGET, so kernels must not use it.
#undef HWY_EXPORT
#undef HWY_DYNAMIC_DISPATCH

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using hwy::bfloat16_t;
using hwy::float16_t;

// These are true where the instruction set has masked loads and stores of 32-bit and of 16-bit
// elements, which do not touch memory beyond the mask, and conversions of float16.
constexpr bool kMasked32 = HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3;
constexpr bool kMasked16 = HWY_TARGET == HWY_AVX3;
constexpr bool kNativeHalf = HWY_TARGET != HWY_SSE4;

namespace detail {

// Converts the half precision number in the low 16 bits of each lane of `bits` to float.
template <class D, class V = hn::Vec<hn::Rebind<uint32_t, D>>>
HWY_INLINE hn::Vec<D> half_bits_to_float(D d, V bits) {
  const hn::Rebind<uint32_t, D> du;
  const hn::Rebind<int32_t, D> di;
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7FFF));
  const auto sign = hn::ShiftLeft<16>(hn::Xor(bits, magnitude));
  // The exponent's bias grows by 112, and the exponent of infinity and NaN by another 112.
  const auto rebias = hn::Set(du, 112u << 23);
  auto wide = hn::Add(hn::ShiftLeft<13>(magnitude), rebias);
  const auto is_special = hn::Gt(hn::BitCast(di, magnitude), hn::Set(di, 0x7BFF));
  wide = hn::Add(wide, hn::IfThenElseZero(hn::RebindMask(du, is_special), rebias));
  const auto subnormal =
      hn::Mul(hn::ConvertTo(d, hn::BitCast(di, magnitude)), hn::Set(d, 0x1p-24f));
  const auto is_subnormal = hn::Lt(hn::BitCast(di, magnitude), hn::Set(di, 0x400));
  const auto result =
      hn::IfThenElse(hn::RebindMask(d, is_subnormal), subnormal, hn::BitCast(d, wide));
  return hn::Or(result, hn::BitCast(d, sign));
}

// Converts float to half precision, in the low 16 bits of each lane.
template <class D, class V>
HWY_INLINE hn::Vec<hn::Rebind<int32_t, D>> float_to_half_bits(D d, V v) {
  const hn::Rebind<uint32_t, D> du;
  const hn::Rebind<int32_t, D> di;
  const auto magnitude_f = hn::Abs(v);
  const auto magnitude = hn::BitCast(di, magnitude_f);
  const auto sign = hn::ShiftRight<16>(hn::BitCast(du, hn::Xor(v, magnitude_f)));
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(di, 1));
  const auto rounded =
      hn::Add(hn::Add(magnitude, odd), hn::Set(di, 0xFFF - static_cast<int32_t>(112u << 23)));
  const auto normal = hn::ShiftRight<13>(rounded);
  // The last place of a float at 0.5 is half precision's smallest number, so adding 0.5 rounds to
  // it.
  const auto half = hn::Set(d, 0.5f);
  const auto subnormal =
      hn::Sub(hn::BitCast(di, hn::Add(magnitude_f, half)), hn::BitCast(di, half));
  auto result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(di, 0x38800000)), subnormal, normal);
  // From 65520 up, numbers become infinity; then NaN is put right.
  result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(di, 0x477FEFFF)), hn::Set(di, 0x7C00), result);
  result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(di, 0x7F800000)), hn::Set(di, 0x7E00), result);
  return hn::Or(result, hn::BitCast(di, sign));
}

// Converts float to bfloat16.
template <class D, class V>
HWY_INLINE hn::Vec<hn::Rebind<uint16_t, D>> float_to_bfloat16(D, V v) {
  const hn::Rebind<uint16_t, D> du16;
  const hn::Rebind<uint32_t, D> du;
  const auto bits = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
  const auto rounded = hn::Add(hn::Add(bits, odd), hn::Set(du, 0x7FFF));
  // Rounding could carry a NaN's mantissa over into infinity; with all bits set it stays a NaN.
  const auto is_nan = hn::RebindMask(du, hn::IsNaN(v));
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SSE4
  const auto safe = hn::Or(rounded, hn::VecFromMask(du, is_nan));
#else
  const auto safe = hn::IfThenElse(is_nan, hn::Set(du, ~0u), rounded);
#endif
#if defined(__x86_64__)
  // One shuffle brings the upper halves of the lanes together within each 128 bits, another brings
  // these groups together.
  alignas(16) static constexpr uint8_t kUpper[16] = {2, 3, 6, 7, 10, 11, 14, 15,
                                                     2, 3, 6, 7, 10, 11, 14, 15};
  const hn::Repartition<uint8_t, decltype(du)> du8;
  const auto halves = hn::TableLookupBytes(hn::BitCast(du8, safe), hn::LoadDup128(du8, kUpper));
#if HWY_TARGET != HWY_SSE4
  if constexpr (hn::MaxLanes(D()) == 8) {
    return {_mm256_castsi256_si128(_mm256_permute4x64_epi64(halves.raw, 0x88))};
  }
#endif
#if HWY_TARGET == HWY_AVX3
  if constexpr (hn::MaxLanes(D()) == 16) {
    const auto even = _mm512_setr_epi64(0, 2, 4, 6, 0, 2, 4, 6);
    return {_mm512_castsi512_si256(_mm512_permutexvar_epi64(even, halves.raw))};
  }
#endif
  return hn::BitCast(du16, hn::LowerHalf(halves));
#else
  return hn::DemoteTo(du16, hn::BitCast(hn::Rebind<int32_t, D>(), hn::ShiftRight<16>(safe)));
#endif
}

// Rounds v to a 16-bit type T and returns its bits.
template <class T, class D, class V>
HWY_INLINE hn::Vec<hn::Rebind<uint16_t, D>> narrow(D d, V v) {
  const hn::Rebind<uint16_t, D> du16;
  if constexpr (sizeof(T) == 2 && !std::is_same_v<T, bfloat16_t>) {
    if constexpr (kNativeHalf) {
      return hn::BitCast(du16, hn::DemoteTo(hn::Rebind<float16_t, D>(), v));
    } else {
      return hn::DemoteTo(du16, float_to_half_bits(d, v));
    }
  } else {
    return float_to_bfloat16(d, v);
  }
}

// Converts the bits of a 16-bit type T to float.
template <class T, class D, class V>
HWY_INLINE hn::Vec<D> widen(D d, V bits16) {
  if constexpr (std::is_same_v<T, bfloat16_t>) {
    const hn::Rebind<uint32_t, D> du32;
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du32, bits16)));
  } else if constexpr (kNativeHalf) {
    return hn::PromoteTo(d, hn::BitCast(hn::Rebind<float16_t, D>(), bits16));
  } else {
    return half_bits_to_float(d, hn::PromoteTo(hn::Rebind<uint32_t, D>(), bits16));
  }
}

// Copies n < kLimit elements, where kLimit is a power of two, without a call of memcpy.
template <size_t kLimit, class T>
HWY_INLINE void copy_few(T* to, const T* from, size_t n) {
  if constexpr (kLimit > 1) {
    constexpr size_t kBlock = kLimit / 2;
    if (n & kBlock) {
      std::memcpy(to, from, kBlock * sizeof(T));
      to += kBlock;
      from += kBlock;
    }
    copy_few<kBlock>(to, from, n);
  }
}

}  // namespace detail

// Calls f(T()) with the element type T of a float dtype, and returns what it returns.
template <class F>
HWY_INLINE auto ByDType(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat16:
      return f(float16_t());
    case DType::kBFloat16:
      return f(bfloat16_t());
    default:
      return f(float());
  }
}

// ---- Loads and stores -----------------------------------------------------------------------

// Loads Lanes(d) elements of T as float. `p` need not be aligned.
template <class D, class T>
HWY_INLINE hn::Vec<D> LoadF32(D d, const T* p) {
  if constexpr (sizeof(T) == 4) {
    return hn::LoadU(d, p);
  } else {
    const hn::Rebind<uint16_t, D> du16;
    return detail::widen<T>(d, hn::LoadU(du16, reinterpret_cast<const uint16_t*>(p)));
  }
}

// Rounds v to T and stores it. `p` need not be aligned.
template <class D, class V, class T>
HWY_INLINE void StoreF32(D d, V v, T* p) {
  if constexpr (sizeof(T) == 4) {
    hn::StoreU(v, d, p);
  } else {
    const hn::Rebind<uint16_t, D> du16;
    hn::StoreU(detail::narrow<T>(d, v), du16, reinterpret_cast<uint16_t*>(p));
  }
}

// Rounds v to T and stores it past the caches, for outputs that no cache will hold. `p` must be
// aligned to Lanes(d) * sizeof(T); hwy::FlushStream() must follow before other threads read.
template <class D, class V, class T>
HWY_INLINE void StreamF32(D d, V v, T* p) {
  if constexpr (sizeof(T) == 4) {
    hn::Stream(v, d, p);
  } else {
    const hn::Rebind<uint16_t, D> du16;
    if constexpr (hn::MaxLanes(D()) * sizeof(T) >= 16) {
      hn::Stream(detail::narrow<T>(d, v), du16, reinterpret_cast<uint16_t*>(p));
    } else {  // Highway would write 16 bytes
      StoreF32(d, v, p);
    }
  }
}

// Stores v and returns what was stored: v rounded to T.
template <class D, class V, class T>
HWY_INLINE hn::Vec<D> StoreRoundedF32(D d, V v, T* p) {
  if constexpr (sizeof(T) == 4) {
    hn::StoreU(v, d, p);
    return v;
  } else {
    const hn::Rebind<uint16_t, D> du16;
    const auto bits = detail::narrow<T>(d, v);
    hn::StoreU(bits, du16, reinterpret_cast<uint16_t*>(p));
    return detail::widen<T>(d, bits);
  }
}

// Rounds v to T and returns the result as float.
template <class T, class D, class V>
HWY_INLINE hn::Vec<D> RoundF32(D d, V v) {
  if constexpr (sizeof(T) == 4) {
    return v;
  } else {
    return detail::widen<T>(d, detail::narrow<T>(d, v));
  }
}

// Loads the first n < Lanes(d) lanes from memory, without touching a byte beyond; the other lanes
// are `fill`.
template <class D, class T>
HWY_INLINE hn::Vec<D> LoadNF32(D d, const T* p, size_t n, float fill = 0.0f) {
  if constexpr (sizeof(T) == 4 && kMasked32) {
    const auto mask = hn::FirstN(d, n);
    return hn::IfThenElse(mask, hn::MaskedLoad(mask, d, p), hn::Set(d, fill));
  } else if constexpr (sizeof(T) == 2 && kMasked16) {
    const hn::Rebind<uint16_t, D> du16;
    const auto bits =
        hn::MaskedLoad(hn::FirstN(du16, n), du16, reinterpret_cast<const uint16_t*>(p));
    return hn::IfThenElse(hn::FirstN(d, n), detail::widen<T>(d, bits), hn::Set(d, fill));
  } else {
    alignas(64) T buffer[hn::MaxLanes(D())] = {};
    detail::copy_few<hn::MaxLanes(D())>(buffer, p, n);
    return hn::IfThenElse(hn::FirstN(d, n), LoadF32(d, buffer), hn::Set(d, fill));
  }
}

// Rounds the first n < Lanes(d) lanes to T and stores them, without touching a byte beyond.
template <class D, class V, class T>
HWY_INLINE void StoreNF32(D d, V v, T* p, size_t n) {
  if constexpr (sizeof(T) == 4 && kMasked32) {
    hn::BlendedStore(v, hn::FirstN(d, n), d, p);
  } else if constexpr (sizeof(T) == 2 && kMasked16) {
    const hn::Rebind<uint16_t, D> du16;
    hn::BlendedStore(detail::narrow<T>(d, v), hn::FirstN(du16, n), du16,
                     reinterpret_cast<uint16_t*>(p));
  } else {
    alignas(64) T buffer[hn::MaxLanes(D())];
    StoreF32(d, v, buffer);
    detail::copy_few<hn::MaxLanes(D())>(p, buffer, n);
  }
}

// These two convert one element in memory to and from float.
template <class T>
HWY_INLINE float ToF32(const T* p) {
  if constexpr (sizeof(T) == 4) {
    return *p;
  } else {
    return hn::GetLane(LoadF32(hn::CappedTag<float, 1>(), p));
  }
}

template <class T>
HWY_INLINE void FromF32(float value, T* p) {
  if constexpr (sizeof(T) == 4) {
    *p = value;
  } else {
    const hn::CappedTag<float, 1> d1;
    StoreF32(d1, hn::Set(d1, value), p);
  }
}

// Loads n <= Lanes(d) elements that are `stride` elements apart; the other lanes are `fill`.
template <class D, class T>
HWY_INLINE hn::Vec<D> LoadStridedF32(D d, const T* p, int64_t stride, size_t n, float fill = 0.0f) {
  alignas(64) T buffer[hn::MaxLanes(D())] = {};
  for (size_t i = 0; i < n; ++i) buffer[i] = p[static_cast<int64_t>(i) * stride];
  const auto v = LoadF32(d, buffer);
  return n == hn::Lanes(d) ? v : hn::IfThenElse(hn::FirstN(d, n), v, hn::Set(d, fill));
}

// Rounds the first n <= Lanes(d) lanes to T and stores them `stride` elements apart.
template <class D, class V, class T>
HWY_INLINE void StoreStridedF32(D d, V v, T* p, int64_t stride, size_t n) {
  alignas(64) T buffer[hn::MaxLanes(D())];
  StoreF32(d, v, buffer);
  for (size_t i = 0; i < n; ++i) p[static_cast<int64_t>(i) * stride] = buffer[i];
}

// ---- Arithmetic -----------------------------------------------------------------------------

// Returns the sum of all lanes.
template <class D, class V>
HWY_INLINE float ReduceSum(D d, V v) {
  return hn::GetLane(hn::SumOfLanes(d, v));
}

// Returns the largest lane. If a lane is NaN, the result may or may not be; see MaxNaN.
template <class D, class V>
HWY_INLINE float ReduceMax(D d, V v) {
  return hn::GetLane(hn::MaxOfLanes(d, v));
}

// Returns the larger of each pair of lanes, and NaN if either is NaN.
template <class V>
HWY_INLINE V MaxNaN(V a, V b) {
  // If either is NaN, hn::Max returns b on x86 and the NaN on Arm.
  return hn::IfThenElse(hn::IsNaN(a), a, hn::Max(a, b));
}

namespace detail {

// A lambda with vector code needs this after its parameter list, so that it is always inlined.
#define FK_MATRIX_BODY HWY_ATTR __attribute__((always_inline))

// Calls body(i) for i in [0, kCount), unrolled and with i as a compile-time constant, so that
// arrays indexed by i can live in registers.
template <int kCount, class Body>
HWY_INLINE void repeat(const Body& body) {
  if constexpr (kCount > 0) {
    repeat<kCount - 1>(body);
    body(std::integral_constant<int, kCount - 1>());
  }
}

}  // namespace detail

// Replaces each x[i] by exp(x[i]), to 1 ulp. It underflows gradually to 0 and overflows to
// infinity; exp(NaN) is NaN. Several vectors are computed at once, step by step: each step of one
// vector waits for its own step before, but not for the other vectors.
template <class D, class V, int kCount>
HWY_INLINE void Exp(D d, V (&x)[kCount]) {
  V shifted[kCount], n[kCount], p[kCount];
  const auto each = [](const auto& body) FK_MATRIX_BODY { detail::repeat<kCount>(body); };
  // If the second operand is NaN, it is the result.
  each([&](auto i) FK_MATRIX_BODY {
    x[i] = hn::Min(hn::Set(d, 89.0f), hn::Max(hn::Set(d, -104.0f), x[i]));
  });

  // Here x = n ln 2 + r with |r| <= ln 2 / 2. Adding 1.5 * 2^23 rounds to an integer, which then
  // stands in the low bits. Adding another 254 makes that integer twice the exponent bias too
  // large, which is what the two halves below need.
  const auto magic = hn::Set(d, 0x1.8p23f + 254.0f);
  each([&](auto i)
           FK_MATRIX_BODY { shifted[i] = hn::MulAdd(x[i], hn::Set(d, 1.44269504f), magic); });
  each([&](auto i) FK_MATRIX_BODY { n[i] = hn::Sub(shifted[i], magic); });
  // ln 2 is subtracted in two parts. n times the first is exact, with or without fused
  // multiply-add.
  each([&](auto i) FK_MATRIX_BODY { x[i] = hn::NegMulAdd(n[i], hn::Set(d, 0x1.62e4p-1f), x[i]); });
  each([&](auto i)
           FK_MATRIX_BODY { x[i] = hn::NegMulAdd(n[i], hn::Set(d, 0x1.7f7d1cp-20f), x[i]); });

  // exp(r) = 1 + r (1 + r P(r)), where P is a minimax polynomial: the relative error is 2^-28.
  each([&](auto i) FK_MATRIX_BODY {
    p[i] = hn::MulAdd(hn::Set(d, 0x1.6a1a72p-10f), x[i], hn::Set(d, 0x1.123fc6p-7f));
  });
  const auto times_r_plus = [&](float c) FK_MATRIX_BODY {
    each([&](auto i) FK_MATRIX_BODY { p[i] = hn::MulAdd(p[i], x[i], hn::Set(d, c)); });
  };
  times_r_plus(0x1.555916p-5f);
  times_r_plus(0x1.55548ap-3f);
  times_r_plus(0x1.fffffcp-2f);
  times_r_plus(1.0f);
  times_r_plus(1.0f);

#if HWY_TARGET == HWY_AVX3
  if constexpr (hn::MaxLanes(D()) == 16) {
    each([&](auto i) FK_MATRIX_BODY { x[i] = V{_mm512_scalef_ps(p[i].raw, n[i].raw)}; });
    return;
  }
#endif
  // 2^n is the product of two powers, so that neither the smallest nor the largest n leaves the
  // exponent's range.
  each([&](auto i) FK_MATRIX_BODY {
    const hn::Rebind<int32_t, D> di;
    const auto bits = hn::BitCast(di, shifted[i]);
    const auto half = hn::ShiftRight<1>(bits);
    const auto scale1 = hn::BitCast(d, hn::ShiftLeft<23>(half));
    const auto scale2 = hn::BitCast(d, hn::ShiftLeft<23>(hn::Sub(bits, half)));
    x[i] = hn::Mul(hn::Mul(p[i], scale1), scale2);
  });
}
template <class D, class V>
HWY_INLINE V Exp(D d, V x) {
  V one[1] = {x};
  Exp(d, one);
  return one[0];
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_CPU_SIMD_PER_TARGET
