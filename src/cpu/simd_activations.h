// Powers of two, sigmoid and softplus on vectors of float, beside Exp of cpu/simd.h.

// Once per target.
#if defined(FK_CPU_SIMD_ACTIVATIONS_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_CPU_SIMD_ACTIVATIONS_PER_TARGET
#undef FK_CPU_SIMD_ACTIVATIONS_PER_TARGET
#else
#define FK_CPU_SIMD_ACTIVATIONS_PER_TARGET
#endif

#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {

// 2^x to 2 ulp, and exactly 1 at 0: a product of many of them must not drift. Cheaper than Exp:
// what would underflow is at most 2^-126, what would overflow at least 2^127; NaN is NaN.
template <class D, class V>
HWY_INLINE V Exp2(D d, V x) {
#if HWY_TARGET == HWY_AVX3
  x = hn::Max(hn::Set(d, -200.0f), x);
  const auto n = hn::Round(x);
#else
  x = hn::Min(hn::Set(d, 127.0f), hn::Max(hn::Set(d, -126.0f), x));
  // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
  const auto magic = hn::Set(d, 0x1.8p23f);
  const auto shifted = hn::Add(x, magic);
  const auto n = hn::Sub(shifted, magic);
#endif
  const auto f = hn::Sub(x, n);
  // Minimax in relative error, 2^-29.
  auto p = hn::MulAdd(hn::Set(d, 0x1.41d334p-13f), f, hn::Set(d, 0x1.5f456ap-10f));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.3b2dbcp-7f));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.c6aed4p-5f));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.ebfbdap-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.62e430p-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
#if HWY_TARGET == HWY_AVX3
  return V{_mm512_scalef_ps(p.raw, n.raw)};
#else
  const hn::Rebind<int32_t, D> di;
  return hn::BitCast(d, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(hn::BitCast(di, shifted))));
#endif
}

// 1 / (1 + exp(-x))
template <class D, class V>
HWY_INLINE V Sigmoid(D d, V x) {
  const auto one = hn::Set(d, 1.0f);
  return hn::Div(one, hn::Add(one, Exp(d, hn::Neg(x))));
}

// x sigmoid(x), and 0 at -infinity.
template <class D, class V>
HWY_INLINE V Silu(D d, V x) {
  return hn::Div(x, hn::Add(hn::Set(d, 1.0f), Exp(d, hn::Neg(x))));
}

// log(1 + exp(x)), with a small relative error also where it is small, of y = exp(-|x|).
template <class D, class V>
HWY_INLINE V SoftplusOf(D d, V x, V y) {
  // max(x, 0) + log1p(y); log1p(y) = 2 atanh(s), s = y / (2 + y) in [0, 1/3].
  const auto s = hn::Div(y, hn::Add(y, hn::Set(d, 2.0f)));
  const auto q = hn::Mul(s, s);
  auto p = hn::MulAdd(hn::Set(d, 0x1.f3facap-3f), q, hn::Set(d, 0x1.b62240p-3f));
  p = hn::MulAdd(p, q, hn::Set(d, 0x1.251382p-2f));
  p = hn::MulAdd(p, q, hn::Set(d, 0x1.99962cp-2f));
  p = hn::MulAdd(p, q, hn::Set(d, 0x1.55555ap-1f));
  p = hn::MulAdd(p, q, hn::Set(d, 2.0f));
  // The second operand comes through if it is NaN.
  return hn::MulAdd(p, s, hn::Max(hn::Zero(d), x));
}

template <class D, class V>
HWY_INLINE V Softplus(D d, V x) {
  return SoftplusOf(d, x, Exp(d, hn::Neg(hn::Abs(x))));
}

// Softplus, and its slope, which is Sigmoid.
template <class D, class V>
HWY_INLINE V Softplus(D d, V x, V* slope) {
  const auto y = Exp(d, hn::Neg(hn::Abs(x)));
  const auto one = hn::Set(d, 1.0f);
  const auto numerator = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), y, one);
  *slope = hn::Div(numerator, hn::Add(one, y));
  return SoftplusOf(d, x, y);
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_CPU_SIMD_ACTIVATIONS_PER_TARGET
