// The scan of one state over a tile of steps by each of the parallel algorithms, a channel per
// lane: h_t = a_t h_{t-1} + b_t, where a pair (a, b) stands for h -> a h + b, and pairs combine to
//
//   (a1, b1) then (a2, b2) = (a1 a2, a2 b1 + b2).
//
// On a CPU these are for comparison: lanes already are the channels, so that nothing is won by
// having the steps of one channel at the same time.

// Once per target.
#if defined(FK_OPS_SELECTIVE_SCAN_CPU_ALGORITHMS_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_OPS_SELECTIVE_SCAN_CPU_ALGORITHMS_PER_TARGET
#undef FK_OPS_SELECTIVE_SCAN_CPU_ALGORITHMS_PER_TARGET
#else
#define FK_OPS_SELECTIVE_SCAN_CPU_ALGORITHMS_PER_TARGET
#endif

#include <algorithm>

#include "ops/selective_scan/cpu_simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

// exponent: log2(a). b becomes h; the other two are scratch.
struct Pairs {
  alignas(64) float exponent[kTile];
  alignas(64) float a[kTile];
  alignas(64) float b[kTile];
};

// Work-efficient: a tree of sums up, prefixes down. n - 1 + n - 1 combinations in 2 log2(n) rounds.
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
  // Now b has the state before each step: that after it stands one further.
  for (int64_t t = 0; t + 1 < size; ++t) hn::Store(hn::Load(d, b(t + 1)), d, b(t));
  hn::Store(total, d, b(size - 1));
}

// Few rounds: log2(n), each of up to n combinations.
HWY_INLINE void scan_hillis_steele(Pairs& pairs, int64_t steps) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t i = 0; i < steps * lanes; i += lanes) {
    hn::Store(Exp2(d, hn::Load(d, pairs.exponent + i)), d, pairs.a + i);
  }
  for (int64_t stride = 1; stride < steps; stride *= 2) {
    // From the end, so that what is combined is still the last round's.
    for (int64_t t = steps - 1; t >= stride; --t) {
      float *a = pairs.a + t * lanes, *b = pairs.b + t * lanes;
      const Vec right = hn::Load(d, a);
      hn::Store(hn::MulAdd(right, hn::Load(d, b - stride * lanes), hn::Load(d, b)), d, b);
      hn::Store(hn::Mul(right, hn::Load(d, a - stride * lanes)), d, a);
    }
  }
}

// Sums in log space: with P_t the sum of the exponents, h_t = 2^P_t * (h_0 + sum of b_s 2^-P_s).
// The powers must stay within float32 and P keep its digits, so a run of steps ends where P would
// leave [-kRange, kRange], and the next begins with P = 0. A step that leaves it by itself is taken
// as it is.
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
