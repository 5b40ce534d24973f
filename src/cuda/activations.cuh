// The activation functions of core/activation.h and their derivatives, for one element in one
// thread.
//
// kExact asks for float's accuracy, for outputs in float. For outputs in half precision, which show
// less, the special function unit's approximations serve: their error is a few units in the last
// place of a float relative to the result, so that small results keep their digits.
#pragma once

#include <type_traits>

#include "core/activation.h"
#include "cuda/math.cuh"

namespace fk::cuda {

constexpr float kSqrtHalf = 0.70710678118654752f;
constexpr float kSqrtTwoOverPi = 0.79788456080286536f;
constexpr float kGeluCubic = 0.044715f;

// Returns 1 / (1 + exp(-x)).
template <bool kExact>
__device__ __forceinline__ float sigmoid_of(float x) {
  if constexpr (kExact) return 1.f / (1.f + expf(-x));
  return reciprocal_fast(1.f + exp2_fast(-kLog2E * x));
}

// Returns the derivative of sigmoid_of, s (1 - s). In float that difference would have lost its
// digits where s is near 1.
template <bool kExact>
__device__ __forceinline__ float sigmoid_slope(float x) {
  if constexpr (kExact) {
    const float e = expf(-fabsf(x));
    return e / ((1.f + e) * (1.f + e));
  } else {
    const float s = sigmoid_of<false>(x);
    return s * (1.f - s);
  }
}

// Returns the activation function kKind of x.
template <Activation kKind, bool kExact>
__device__ __forceinline__ float activate(float x) {
  if constexpr (kKind == Activation::kGeluTanh) {
    // x / (1 + exp(-x (a x^2 + b))).
    constexpr float b = 2.f * kSqrtTwoOverPi, a = b * kGeluCubic;
    if constexpr (kExact) return x * sigmoid_of<true>(x * fmaf(a, x * x, b));
    const float power = x * fmaf(-kLog2E * a, x * x, -kLog2E * b);
    return x * reciprocal_fast(1.f + exp2_fast(power));
  } else if constexpr (kKind == Activation::kGelu) {
    return 0.5f * x * (1.f + erff(x * kSqrtHalf));
  } else if constexpr (kKind == Activation::kSilu) {
    return x * sigmoid_of<kExact>(x);
  } else if constexpr (kKind == Activation::kRelu) {
    return x < 0.f ? 0.f : x;  // NaN stays NaN
  } else if constexpr (kKind == Activation::kRelu2) {
    return x < 0.f ? 0.f : x * x;
  } else if constexpr (kKind == Activation::kTanh) {
    if constexpr (kExact) return tanhf(x);
    return fmaf(2.f, sigmoid_of<false>(2.f * x), -1.f);
  } else if constexpr (kKind == Activation::kSigmoid) {
    return sigmoid_of<kExact>(x);
  } else {
    return x;
  }
}

// Returns the derivative of `activate` at x.
template <Activation kKind, bool kExact>
__device__ __forceinline__ float activation_slope(float x) {
  if constexpr (kKind == Activation::kGeluTanh) {
    const float square = fminf(x * x, 1e4f);  // for larger ones the slope is 0 or 1 already
    const float z = x * fmaf(2.f * kSqrtTwoOverPi * kGeluCubic, square, 2.f * kSqrtTwoOverPi);
    const float z_slope = fmaf(6.f * kSqrtTwoOverPi * kGeluCubic, square, 2.f * kSqrtTwoOverPi);
    return fmaf(x * z_slope, sigmoid_slope<kExact>(z), sigmoid_of<kExact>(z));
  } else if constexpr (kKind == Activation::kGelu) {
    const float density = 0.5f * kSqrtTwoOverPi * exp2_fast(-0.5f * kLog2E * x * x);
    return fmaf(x, density, 0.5f * (1.f + erff(x * kSqrtHalf)));
  } else if constexpr (kKind == Activation::kSilu) {
    return fmaf(x, sigmoid_slope<kExact>(x), sigmoid_of<kExact>(x));
  } else if constexpr (kKind == Activation::kRelu) {
    return x > 0.f ? 1.f : 0.f;
  } else if constexpr (kKind == Activation::kRelu2) {
    return x > 0.f ? 2.f * x : 0.f;
  } else if constexpr (kKind == Activation::kTanh) {
    const float t = activate<Activation::kTanh, kExact>(x);
    return fmaf(-t, t, 1.f);
  } else if constexpr (kKind == Activation::kSigmoid) {
    return sigmoid_slope<kExact>(x);
  } else {
    return 1.f;
  }
}

// Calls body(kind) with the kind as a compile-time constant.
template <class Body>
__device__ __forceinline__ void with_activation(Activation kind, const Body& body) {
  switch (kind) {
    case Activation::kNone:
      return body(std::integral_constant<Activation, Activation::kNone>());
    case Activation::kGeluTanh:
      return body(std::integral_constant<Activation, Activation::kGeluTanh>());
    case Activation::kGelu:
      return body(std::integral_constant<Activation, Activation::kGelu>());
    case Activation::kSilu:
      return body(std::integral_constant<Activation, Activation::kSilu>());
    case Activation::kRelu:
      return body(std::integral_constant<Activation, Activation::kRelu>());
    case Activation::kRelu2:
      return body(std::integral_constant<Activation, Activation::kRelu2>());
    case Activation::kTanh:
      return body(std::integral_constant<Activation, Activation::kTanh>());
    case Activation::kSigmoid:
      return body(std::integral_constant<Activation, Activation::kSigmoid>());
  }
}

}  // namespace fk::cuda
