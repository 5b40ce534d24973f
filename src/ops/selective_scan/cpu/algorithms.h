// The scan of one state over a tile of steps by each of the parallel algorithms, a channel per
// lane: h_t = a_t h_{t-1} + b_t, where a pair (a, b) stands for h -> a h + b, and pairs combine to
//
//   (a1, b1) then (a2, b2) = (a1 a2, a2 b1 + b2).
//
// On a CPU these are for comparison: lanes already are the channels, so that nothing is won by
// having the steps of one channel at the same time. Beside them, the power of two of the walk that
// does win.

// Highway includes this file once for each target.
#if defined(FK_OPS_SELECTIVE_SCAN_CPU_ALGORITHMS_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_OPS_SELECTIVE_SCAN_CPU_ALGORITHMS_PER_TARGET
#undef FK_OPS_SELECTIVE_SCAN_CPU_ALGORITHMS_PER_TARGET
#else
#define FK_OPS_SELECTIVE_SCAN_CPU_ALGORITHMS_PER_TARGET
#endif

#include <algorithm>

#include "ops/selective_scan/cpu/scan_simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

#if HWY_TARGET == HWY_AVX3
// Entry i is 2^(i/16).
alignas(64) constexpr float kSixteenths[16] = {
    0x1.000000p0f, 0x1.0b5586p0f, 0x1.172b84p0f, 0x1.2387a6p0f, 0x1.306fe0p0f, 0x1.3dea64p0f,
    0x1.4bfdaep0f, 0x1.5ab07ep0f, 0x1.6a09e6p0f, 0x1.7a1148p0f, 0x1.8ace54p0f, 0x1.9c4918p0f,
    0x1.ae89fap0f, 0x1.c199bep0f, 0x1.d5818ep0f, 0x1.ea4afap0f};
#endif

// Returns 2^x for the walk through time, where multiply-adds are what is waited for. It is as good
// as Exp2: to 2 ulp, and near 0, where many of them are multiplied, to 1.
HWY_INLINE Vec Decay(Vec x) {
  const F32 d;
#if HWY_TARGET == HWY_AVX3
  // Sixteenths come from a table in a register, which leaves a polynomial of degree 3. Adding 1.5 *
  // 2^19 rounds to sixteenths, whose number then stands in the low bits, of which a permutation
  // reads four.
  const Vec magic = hn::Set(d, 0x1.8p19f);
  const Vec shifted = hn::Add(x, magic);
  const Vec n = hn::Sub(shifted, magic);
  const Vec r{_mm512_reduce_ps(x.raw, 0x40)};  // x - n, and 0 where x is infinite
  const Vec power{
      _mm512_permutexvar_ps(_mm512_castps_si512(shifted.raw), _mm512_load_ps(kSixteenths))};
  Vec q = hn::MulAdd(hn::Set(d, 0x1.c6b08ep-5f), r, hn::Set(d, 0x1.ebfbdep-3f));
  q = hn::MulAdd(q, r, hn::Set(d, 0x1.62e430p-1f));
  return Vec{_mm512_scalef_ps(hn::MulAdd(hn::Mul(power, r), q, power).raw, n.raw)};
#else
  return Exp2(d, x);
#endif
}

// `exponent` is log2(a), b becomes h, and the other two are scratch.
struct Pairs {
  alignas(64) float exponent[kTile];
  alignas(64) float a[kTile];
  alignas(64) float b[kTile];
};

// This one is work-efficient: a tree of sums up, prefixes down, with n - 1 + n - 1 combinations in
// 2 log2(n) rounds.
HWY_INLINE void scan_blelloch(Pairs& pairs, int64_t steps) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  int64_t size = 1;
  while (size < steps) size *= 2;
  for (int64_t t = 0; t < size; ++t) {
    const bool real = t < steps;
    const Vec x = real ? hn::Load(d, pairs.exponent + t * lanes) : hn::Zero(d);
    hn::Store(Exp2(d, x), d, pairs.a + t * lanes);
    if (!real) hn::Store(hn::Zero(d), d, pairs.b + t * lanes);
  }
  const auto a = [&](int64_t t) { return pairs.a + t * lanes; };
  const auto b = [&](int64_t t) { return pairs.b + t * lanes; };
  for (int64_t stride = 1; stride < size; stride *= 2) {
    for (int64_t t = 2 * stride - 1; t < size; t += 2 * stride) {
      const Vec right = hn::Load(d, a(t));
      hn::Store(hn::MulAdd(right, hn::Load(d, b(t - stride)), hn::Load(d, b(t))), d, b(t));
      hn::Store(hn::Mul(right, hn::Load(d, a(t - stride))), d, a(t));
    }
  }
  const Vec total = hn::Load(d, b(size - 1));
  hn::Store(hn::Set(d, 1.0f), d, a(size - 1));
  hn::Store(hn::Zero(d), d, b(size - 1));
  for (int64_t stride = size / 2; stride > 0; stride /= 2) {
    for (int64_t t = 2 * stride - 1; t < size; t += 2 * stride) {
      const Vec left_a = hn::Load(d, a(t - stride)), left_b = hn::Load(d, b(t - stride));
      const Vec before_a = hn::Load(d, a(t)), before_b = hn::Load(d, b(t));
      hn::Store(before_a, d, a(t - stride));
      hn::Store(before_b, d, b(t - stride));
      hn::Store(hn::Mul(before_a, left_a), d, a(t));
      hn::Store(hn::MulAdd(left_a, before_b, left_b), d, b(t));
    }
  }
  // Now b has the state before each step; the state after it stands one further.
  for (int64_t t = 0; t + 1 < size; ++t) hn::Store(hn::Load(d, b(t + 1)), d, b(t));
  hn::Store(total, d, b(size - 1));
}

// This one has few rounds: log2(n), each of up to n combinations.
HWY_INLINE void scan_hillis_steele(Pairs& pairs, int64_t steps) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t i = 0; i < steps * lanes; i += lanes) {
    hn::Store(Exp2(d, hn::Load(d, pairs.exponent + i)), d, pairs.a + i);
  }
  for (int64_t stride = 1; stride < steps; stride *= 2) {
    // Steps go from the end, so that what is combined is still the last round's.
    for (int64_t t = steps - 1; t >= stride; --t) {
      float *a = pairs.a + t * lanes, *b = pairs.b + t * lanes;
      const Vec right = hn::Load(d, a);
      hn::Store(hn::MulAdd(right, hn::Load(d, b - stride * lanes), hn::Load(d, b)), d, b);
      hn::Store(hn::Mul(right, hn::Load(d, a - stride * lanes)), d, a);
    }
  }
}

// This one adds up in log space: with P_t the sum of the exponents, h_t = 2^P_t * (h_0 + sum of b_s
// 2^-P_s). The powers must stay within float32 and P keep its digits, so a run of steps ends where
// P would leave [-kRange, kRange], and the next begins with P = 0. A step that leaves it by itself
// is taken as it is.
HWY_INLINE void scan_cumsum(Pairs& pairs, int64_t steps) {
  constexpr float kRange = 10.0f;
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  const auto fits = [&](Vec x)
                        HWY_ATTR { return hn::AllTrue(d, hn::Le(hn::Abs(x), hn::Set(d, kRange))); };
  Vec h = hn::Zero(d);  // what came before is part of the first b
  for (int64_t t = 0; t < steps;) {
    Vec sum = hn::Zero(d), total = h;
    const int64_t begin = t;
    for (; t < steps; ++t) {
      const Vec next = hn::Add(sum, hn::Load(d, pairs.exponent + t * lanes));
      if (!fits(next)) break;
      sum = next;
      total = hn::MulAdd(hn::Load(d, pairs.b + t * lanes), Exp2(d, hn::Neg(sum)), total);
      h = hn::Mul(Exp2(d, sum), total);
      hn::Store(h, d, pairs.b + t * lanes);
    }
    if (t > begin) continue;
    h = hn::MulAdd(Exp2(d, hn::Load(d, pairs.exponent + t * lanes)), h,
                   hn::Load(d, pairs.b + t * lanes));
    hn::Store(h, d, pairs.b + t * lanes);
    ++t;
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_OPS_SELECTIVE_SCAN_CPU_ALGORITHMS_PER_TARGET
