// This file holds dot products of unsigned with signed bytes, four neighbours to a lane of int32,
// for the integer products of tiles_int8.h and multiply_blocks.cc.
//
// VNNI has an instruction for them: in AVX-512 form (Ice Lake, Zen 4) or in VEX form (Alder Lake).
// It is written as inline assembly, because the instruction sets of cpu/foreach_target.h do not
// include it and most of their machines lack it; has_vnni() tells whether this one has it. Without
// VNNI, pairs of bytes are multiplied and summed in int16, for as many steps as cannot overflow,
// before they are widened to int32.

// This part is compiled once per translation unit.
#ifndef FK_CPU_GEMM_BYTES_H_
#define FK_CPU_GEMM_BYTES_H_

#include <cstdint>
#include <cstring>

#include "cpu/gemm/tiles.h"
#include "cpu/simd.h"
#include "cpu/targets.h"

#endif  // FK_CPU_GEMM_BYTES_H_

// This part is compiled once per instruction set (see cpu/foreach_target.h).
#if defined(FK_CPU_GEMM_BYTES_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_CPU_GEMM_BYTES_PER_TARGET
#undef FK_CPU_GEMM_BYTES_PER_TARGET
#else
#define FK_CPU_GEMM_BYTES_PER_TARGET
#endif

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {

using Bytes = hn::ScalableTag<uint8_t>;
using Words = hn::ScalableTag<int16_t>;
using I32 = hn::ScalableTag<int32_t>;

// Is true where machines of this instruction set may have VNNI.
constexpr bool kCanHaveVnni = HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2;

// Returns whether this machine has VNNI and nobody switched it off (cpu/targets.h).
HWY_INLINE bool has_vnni() {
#if HWY_TARGET == HWY_AVX3
  static const bool has = __builtin_cpu_supports("avx512vnni") != 0;
  return has && vnni_wanted();
#elif HWY_TARGET == HWY_AVX2
  static const bool has = has_vex_vnni();
  return has && vnni_wanted();
#else
  return false;
#endif
}

// Loads four neighbouring bytes as one integer, to be broadcast.
HWY_INLINE int32_t load_quad(const int8_t* x) {
  int32_t quad;
  std::memcpy(&quad, x, 4);
  return quad;
}

// Returns u[2i] s[2i] + u[2i+1] s[2i+1] in each lane of int16; u is unsigned, s signed.
HWY_INLINE hn::Vec<Words> multiply_pairs(hn::Vec<Bytes> u, hn::Vec<Bytes> s) {
#if HWY_TARGET == HWY_AVX3
  return hn::Vec<Words>{_mm512_maddubs_epi16(u.raw, s.raw)};
#elif HWY_TARGET == HWY_AVX2
  return hn::Vec<Words>{_mm256_maddubs_epi16(u.raw, s.raw)};
#elif HWY_TARGET == HWY_SSE4
  return hn::Vec<Words>{_mm_maddubs_epi16(u.raw, s.raw)};
#else
  const Words d;
  const auto even_u = hn::BitCast(d, hn::And(u, hn::BitCast(Bytes(), hn::Set(d, 0xff))));
  const auto odd_u =
      hn::BitCast(d, hn::ShiftRight<8>(hn::BitCast(hn::Repartition<uint16_t, Words>(), u)));
  const auto even_s = hn::ShiftRight<8>(hn::ShiftLeft<8>(hn::BitCast(d, s)));
  const auto odd_s = hn::ShiftRight<8>(hn::BitCast(d, s));
  return hn::Add(hn::Mul(even_u, even_s), hn::Mul(odd_u, odd_s));
#endif
}

// Adds the two int16 values in each lane of int32.
HWY_INLINE hn::Vec<I32> add_pairs(hn::Vec<Words> pairs) {
#if HWY_TARGET == HWY_AVX3
  return hn::Vec<I32>{_mm512_madd_epi16(pairs.raw, _mm512_set1_epi16(1))};
#elif HWY_TARGET == HWY_AVX2
  return hn::Vec<I32>{_mm256_madd_epi16(pairs.raw, _mm256_set1_epi16(1))};
#elif HWY_TARGET == HWY_SSE4
  return hn::Vec<I32>{_mm_madd_epi16(pairs.raw, _mm_set1_epi16(1))};
#else
  const I32 d;
  const auto both = hn::BitCast(d, pairs);
  return hn::Add(hn::ShiftRight<16>(both), hn::ShiftRight<16>(hn::ShiftLeft<16>(both)));
#endif
}

// Returns s where w is positive and -s where it is negative, so that |w| times the result is w s.
// Where w is 0 the result may be anything: that product is 0.
HWY_INLINE hn::Vec<Bytes> take_sign(hn::Vec<Bytes> s, hn::Vec<Bytes> w) {
#if HWY_TARGET == HWY_AVX2
  return hn::Vec<Bytes>{_mm256_sign_epi8(s.raw, w.raw)};
#elif HWY_TARGET == HWY_SSE4
  return hn::Vec<Bytes>{_mm_sign_epi8(s.raw, w.raw)};
#else
  const hn::ScalableTag<int8_t> d;
  const auto signs = hn::BitCast(d, w), values = hn::BitCast(d, s);
  const auto negative = hn::Lt(signs, hn::Zero(d));
  return hn::BitCast(Bytes(), hn::IfThenElse(negative, hn::Neg(values), values));
#endif
}

#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2
// Returns `sum` plus the dot product of each lane's four bytes of w with its four values of x.
HWY_INLINE hn::Vec<I32> add_by_vnni(hn::Vec<I32> sum, hn::Vec<Bytes> w, hn::Vec<I32> x) {
#if HWY_TARGET == HWY_AVX3
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.raw) : "v"(w.raw), "v"(x.raw));
#else
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum.raw) : "x"(w.raw), "x"(x.raw));
#endif
  return sum;
}
// Does the same with the four values at x for every lane.
HWY_INLINE hn::Vec<I32> add_by_vnni(hn::Vec<I32> sum, hn::Vec<Bytes> w, const int8_t* x) {
#if HWY_TARGET == HWY_AVX3
  const int32_t* quad = reinterpret_cast<const int32_t*>(x);
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum.raw) : "v"(w.raw), "m"(*quad));
  return sum;
#else
  return add_by_vnni(sum, w, hn::Set(I32(), load_quad(x)));
#endif
}
#endif

// Returns `sum` plus, in each lane, the dot product of its 4 * kQuads codes in w[0] to w[kQuads -
// 1] with the 4 * kQuads values at x. No code is above kLargest. With VNNI, codes up to 255 are
// given as they are; without, as signed bytes, 128 less.
template <bool kVnni, int kLargest, int kQuads>
HWY_INLINE hn::Vec<I32> dot(hn::Vec<I32> sum, const hn::Vec<Bytes>* w, const int8_t* x) {
  if constexpr (kVnni) {
    detail::repeat<kQuads>([&](auto j) FK_MATRIX_BODY { sum = add_by_vnni(sum, w[j], x + 4 * j); });
    return sum;
  } else {
    // The sum of two products can be added up in int16 this many times without overflow.
    constexpr int kRun = kLargest <= 15 ? 8 : kLargest <= 31 ? 4 : kLargest <= 63 ? 2 : 1;
    const Bytes d;
    detail::repeat<kQuads / (kRun < kQuads ? kRun : kQuads)>([&](auto r) FK_MATRIX_BODY {
      constexpr int kFirst = r * kRun;
      hn::Vec<Words> pairs = hn::Zero(Words());
      detail::repeat<(kRun < kQuads ? kRun : kQuads)>([&](auto i) FK_MATRIX_BODY {
        const auto quad = hn::BitCast(d, hn::Set(I32(), load_quad(x + 4 * (kFirst + i))));
        const auto codes = w[kFirst + i];
        if constexpr (kLargest > 63) {
          const auto magnitude =
              hn::BitCast(d, hn::Abs(hn::BitCast(hn::ScalableTag<int8_t>(), codes)));
          pairs = multiply_pairs(magnitude, take_sign(quad, codes));
        } else {
          pairs = hn::Add(pairs, multiply_pairs(codes, quad));
        }
      });
      sum = hn::Add(sum, add_pairs(pairs));
    });
    return sum;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_CPU_GEMM_BYTES_PER_TARGET
