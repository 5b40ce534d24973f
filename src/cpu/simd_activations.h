// This file computes powers of two, activation functions and their derivatives on vectors of float,
// in addition to Exp of cpu/simd.h.

// This part is compiled once per instruction set (see cpu/foreach_target.h).
#if defined(FK_CPU_SIMD_ACTIVATIONS_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_CPU_SIMD_ACTIVATIONS_PER_TARGET
#undef FK_CPU_SIMD_ACTIVATIONS_PER_TARGET
#else
#define FK_CPU_SIMD_ACTIVATIONS_PER_TARGET
#endif

#include "core/activation.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {

// Returns 2^x to 2 ulp, and exactly 1 at 0, so that a product of many of them does not drift. It is
// cheaper than Exp because the ends are not exact: what would underflow becomes some number up to
// 2^-126, and what would overflow some number from 2^127 up. NaN stays NaN.
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
  // This is a minimax polynomial, with a relative error of 2^-29.
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

// Returns 1 / (1 + exp(-x)).
template <class D, class V>
HWY_INLINE V Sigmoid(D d, V x) {
  const auto one = hn::Set(d, 1.0f);
  return hn::Div(one, hn::Add(one, Exp(d, hn::Neg(x))));
}

// Returns x sigmoid(x), which is 0 at -infinity.
template <class D, class V>
HWY_INLINE V Silu(D d, V x) {
  return hn::Div(x, hn::Add(hn::Set(d, 1.0f), Exp(d, hn::Neg(x))));
}

// Returns tanh(x) to 2 ulp.
template <class D, class V>
HWY_INLINE V Tanh(D d, V x) {
  // Small ones are x + x^3 P(x^2), where P is a minimax polynomial: the relative error is 2^-27.
  // Large ones come from exp(2 |x|).
  const auto z = hn::Mul(x, x);
  auto p = hn::MulAdd(hn::Set(d, -0x1.69710ep-8f), z, hn::Set(d, 0x1.4f5ef6p-6f));
  p = hn::MulAdd(p, z, hn::Set(d, -0x1.b7cff2p-5f));
  p = hn::MulAdd(p, z, hn::Set(d, 0x1.1103f2p-3f));
  p = hn::MulAdd(p, z, hn::Set(d, -0x1.555524p-2f));
  const auto small = hn::MulAdd(hn::Mul(p, z), x, x);
  const auto size = hn::Abs(x);
  const auto e = Exp(d, hn::Add(size, size));
  const auto large =
      hn::Sub(hn::Set(d, 1.0f), hn::Div(hn::Set(d, 2.0f), hn::Add(e, hn::Set(d, 1.0f))));
  return hn::IfThenElse(hn::Lt(size, hn::Set(d, 0.65f)), small, hn::CopySign(large, x));
}

// Returns log(1 + exp(x)), given y = exp(-|x|). The relative error is small also where the result
// is.
template <class D, class V>
HWY_INLINE V SoftplusOf(D d, V x, V y) {
  // The result is max(x, 0) + log1p(y), where log1p(y) = 2 atanh(s) with s = y / (2 + y) in [0,
  // 1/3].
  const auto s = hn::Div(y, hn::Add(y, hn::Set(d, 2.0f)));
  const auto q = hn::Mul(s, s);
  auto p = hn::MulAdd(hn::Set(d, 0x1.f3facap-3f), q, hn::Set(d, 0x1.b62240p-3f));
  p = hn::MulAdd(p, q, hn::Set(d, 0x1.251382p-2f));
  p = hn::MulAdd(p, q, hn::Set(d, 0x1.99962cp-2f));
  p = hn::MulAdd(p, q, hn::Set(d, 0x1.55555ap-1f));
  p = hn::MulAdd(p, q, hn::Set(d, 2.0f));
  // If the second operand of Max is NaN, it is the result.
  return hn::MulAdd(p, s, hn::Max(hn::Zero(d), x));
}

// Returns log(1 + exp(x)).
template <class D, class V>
HWY_INLINE V Softplus(D d, V x) {
  return SoftplusOf(d, x, Exp(d, hn::Neg(hn::Abs(x))));
}

// Returns log(1 + exp(x)), and in *slope its derivative, which is Sigmoid(x).
template <class D, class V>
HWY_INLINE V Softplus(D d, V x, V* slope) {
  const auto y = Exp(d, hn::Neg(hn::Abs(x)));
  const auto one = hn::Set(d, 1.0f);
  const auto numerator = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), y, one);
  *slope = hn::Div(numerator, hn::Add(one, y));
  return SoftplusOf(d, x, y);
}

namespace detail {

// Returns the normal distribution's mass below x, and in *density its density at x times sqrt(2
// pi).
template <class D, class V>
HWY_INLINE V NormalMass(D d, V x, V* density) {
  const auto one = hn::Set(d, 1.0f);
  *density = Exp(d, hn::Mul(hn::Set(d, -0.5f), hn::Mul(x, x)));
  // The mass beyond |x| is density t P(t), where P is a minimax polynomial: the relative error is
  // 2^-25.
  const auto t = hn::Div(one, hn::MulAdd(hn::Abs(x), hn::Set(d, 0.34f), one));
  auto p = hn::MulAdd(hn::Set(d, -0x1.abf60ap-6f), t, hn::Set(d, 0x1.1db25ep-3f));
  p = hn::MulAdd(p, t, hn::Set(d, -0x1.17b088p-2f));
  p = hn::MulAdd(p, t, hn::Set(d, 0x1.9e12ccp-3f));
  p = hn::MulAdd(p, t, hn::Set(d, -0x1.6e5772p-5f));
  p = hn::MulAdd(p, t, hn::Set(d, 0x1.d8833ap-4f));
  p = hn::MulAdd(p, t, hn::Set(d, 0x1.d7d96cp-4f));
  p = hn::MulAdd(p, t, hn::Set(d, 0x1.16c1fep-3f));
  p = hn::MulAdd(p, t, hn::Set(d, 0x1.15c034p-3f));
  const auto tail = hn::Mul(*density, hn::Mul(p, t));
  return hn::IfThenElse(hn::Lt(x, hn::Zero(d)), tail, hn::Sub(one, tail));
}

constexpr float kSqrtTwoOverPi = 0.79788456080286536f, kGeluCubic = 0.044715f;

}  // namespace detail

// Returns the activation function kKind of x.
template <Activation kKind, class D, class V>
HWY_INLINE V Activate(D d, V x) {
  const auto zero = hn::Zero(d);
  if constexpr (kKind == Activation::kGeluTanh) {
    const auto slope = hn::Set(d, 2 * detail::kSqrtTwoOverPi);
    const auto cubic = hn::Set(d, 2 * detail::kSqrtTwoOverPi * detail::kGeluCubic);
    const auto inner = hn::Mul(x, hn::MulAdd(cubic, hn::Mul(x, x), slope));
    return hn::Mul(x, Sigmoid(d, inner));
  } else if constexpr (kKind == Activation::kGelu) {
    V density;
    return hn::Mul(x, detail::NormalMass(d, x, &density));
  } else if constexpr (kKind == Activation::kSilu) {
    return Silu(d, x);
  } else if constexpr (kKind == Activation::kRelu) {
    return hn::IfThenZeroElse(hn::Lt(x, zero), x);  // NaN stays NaN
  } else if constexpr (kKind == Activation::kRelu2) {
    return hn::IfThenZeroElse(hn::Lt(x, zero), hn::Mul(x, x));
  } else if constexpr (kKind == Activation::kTanh) {
    return Tanh(d, x);
  } else if constexpr (kKind == Activation::kSigmoid) {
    return Sigmoid(d, x);
  } else {
    return x;
  }
}

// Returns the derivative of Activate at x.
template <Activation kKind, class D, class V>
HWY_INLINE V ActivationSlope(D d, V x) {
  const auto zero = hn::Zero(d), one = hn::Set(d, 1.0f);
  if constexpr (kKind == Activation::kGeluTanh) {
    const auto slope = hn::Set(d, 2 * detail::kSqrtTwoOverPi);
    const auto cubic = hn::Set(d, 2 * detail::kSqrtTwoOverPi * detail::kGeluCubic);
    // Where x^2 is larger than 1e4, the slope is 0 or 1 already. If x^2 is NaN, so is the minimum,
    // because it is the second operand.
    const auto square = hn::Min(hn::Set(d, 1e4f), hn::Mul(x, x));
    const auto s = Sigmoid(d, hn::Mul(x, hn::MulAdd(cubic, square, slope)));
    const auto inner = hn::MulAdd(hn::Mul(cubic, hn::Set(d, 3.0f)), square, slope);
    return hn::MulAdd(hn::Mul(x, inner), hn::Mul(s, hn::Sub(one, s)), s);
  } else if constexpr (kKind == Activation::kGelu) {
    V density;
    const auto mass = detail::NormalMass(d, x, &density);
    return hn::MulAdd(hn::Mul(x, density), hn::Set(d, 0.5f * detail::kSqrtTwoOverPi), mass);
  } else if constexpr (kKind == Activation::kSilu) {
    const auto s = Sigmoid(d, x);
    return hn::Mul(s, hn::MulAdd(x, hn::Sub(one, s), one));
  } else if constexpr (kKind == Activation::kRelu) {
    return hn::IfThenElseZero(hn::Gt(x, zero), one);
  } else if constexpr (kKind == Activation::kRelu2) {
    return hn::IfThenElseZero(hn::Gt(x, zero), hn::Add(x, x));
  } else if constexpr (kKind == Activation::kTanh) {
    const auto t = Tanh(d, x);
    return hn::NegMulAdd(t, t, one);
  } else if constexpr (kKind == Activation::kSigmoid) {
    const auto s = Sigmoid(d, x);
    return hn::Mul(s, hn::Sub(one, s));
  } else {
    return one;
  }
}

// Calls body(kind) with the kind as a compile-time constant.
template <class Body>
HWY_INLINE void with_activation(Activation kind, const Body& body) {
  using A = Activation;
  switch (kind) {
    case A::kNone:
      return body(std::integral_constant<A, A::kNone>());
    case A::kGeluTanh:
      return body(std::integral_constant<A, A::kGeluTanh>());
    case A::kGelu:
      return body(std::integral_constant<A, A::kGelu>());
    case A::kSilu:
      return body(std::integral_constant<A, A::kSilu>());
    case A::kRelu:
      return body(std::integral_constant<A, A::kRelu>());
    case A::kRelu2:
      return body(std::integral_constant<A, A::kRelu2>());
    case A::kTanh:
      return body(std::integral_constant<A, A::kTanh>());
    case A::kSigmoid:
      return body(std::integral_constant<A, A::kSigmoid>());
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_CPU_SIMD_ACTIVATIONS_PER_TARGET
