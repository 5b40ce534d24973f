// What one thread computes in one step of a selective scan: the decay, the time step and the gate.
#pragma once

#include <type_traits>

#include "cuda/gates.cuh"

namespace fk::cuda {

constexpr float kLog2ERest = 1.925963033500e-8f;  // of log2(e) beyond a float

// x log2(e), rounded once: a constant rounded to a float would shorten every exponent alike.
__device__ __forceinline__ float times_log2e(float x) { return fmaf(x, kLog2E, x * kLog2ERest); }

// What x y is beyond the nearest whole number, which goes to `whole`. |x y| up to 1e16.
__device__ __forceinline__ float split_product(float x, float y, float& whole) {
  constexpr float kRound = 1.5f * (1 << 23);  // added and taken away: to a whole number
  whole = fmaf(x, y, kRound) - kRound;
  return fmaf(x, y, -whole);
}

// Returns 2^(whole + rest), where |rest| is at most 1/2.
__device__ __forceinline__ float power_of_sum(float whole, float rest) {
  float p = fmaf(1.5469738e-4f, rest, 1.3390878e-3f);
  p = fmaf(p, rest, 9.618031e-3f);
  p = fmaf(p, rest, 5.550357e-2f);
  p = fmaf(p, rest, 2.402265e-1f);
  p = fmaf(p, rest, 6.931472e-1f);
  return exp2_fast(whole) * fmaf(p, rest, 1.f);
}

// 2^(x y), as exact as T needs it for decays.
template <class T>
__device__ __forceinline__ float power(float x, float y) {
  if constexpr (!std::is_same_v<T, float>) return exp2_fast(x * y);
  float whole;
  const float rest = split_product(x, y, whole);
  return power_of_sum(whole, rest);
}

// The decays over kSteps steps for one state. For float, one instruction each would be off to the
// same side step after step, which adds up: so a piece of four steps has its exact decay as well,
// and a state that was walked through it is put right by `add` times the state before it.
template <class T, int kSteps>
struct Decays {
  static constexpr int kPiece = 4;
  static constexpr bool kExact = std::is_same_v<T, float>;
  float step[kSteps], add[kExact ? kSteps / kPiece : 1];

  Decays() = default;
  __device__ __forceinline__ Decays(const float (&dt)[kSteps], float A) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) step[k] = kExact ? exp2_fast(dt[k] * A) : power<T>(dt[k], A);
    if constexpr (kExact) {
#pragma unroll
      for (int k = 0; k < kSteps; k += kPiece) {
        const float time = (dt[k] + dt[k + 1]) + (dt[k + 2] + dt[k + 3]);
        const float exact = power<T>(time, A);
        const float made = (step[k] * step[k + 1]) * (step[k + 2] * step[k + 3]);
        add[k / kPiece] = exact == made ? 0.f : exact - made;  // of two infinities as well
      }
    }
  }
  // Takes the state `h` through step k, `before` being the state before its piece.
  __device__ __forceinline__ void walk(int k, float added, float& h, float& before) const {
    if (k % kPiece == 0) before = h;
    h = fmaf(step[k], h, added);
    if (kExact && k % kPiece == kPiece - 1) h = fmaf(add[k / kPiece], before, h);
  }
};

// x within what `power` takes; no number stays none.
constexpr float kMostExponent = 1e12f;
template <class T>
__device__ __forceinline__ float within_power(float x) {
  return std::is_same_v<T, float> && fabsf(x) > kMostExponent ? copysignf(kMostExponent, x) : x;
}

// Returns exp(x).
__device__ __forceinline__ float exponential(float x) {
  float whole;
  const float rest = split_product(x, kLog2E, whole);
  return power_of_sum(whole, fmaf(x, kLog2ERest, rest));
}

// x / y, as exact as T shows.
template <class T>
__device__ __forceinline__ float quotient(float x, float y) {
  const float inverse = reciprocal_fast(y);
  const float q = x * inverse;
  if constexpr (!std::is_same_v<T, float>) return q;
  return fmaf(fmaf(-y, q, x), inverse, q);
}

// Returns (log2(e) dt, dt). The factor goes into dt, not into A: the product's rounding is then
// another one in each step, instead of one that adds up over time.
template <class T>
__device__ __forceinline__ float2 time_step(float delta, float bias, bool through_softplus) {
  if (std::is_same_v<T, float>) {
    float dt = delta + bias;
    if (through_softplus) {
      // log(1 + e) as 2 atanh(e / (2 + e)): small results keep their relative precision.
      const float e = exponential(fmaxf(-fabsf(dt), -100.f));
      const float w = quotient<T>(e, 2.f + e);
      const float v = w * w;
      float p = fmaf(2.f / 13, v, 2.f / 11);
      p = fmaf(p, v, 2.f / 9);
      p = fmaf(p, v, 2.f / 7);
      p = fmaf(p, v, 2.f / 5);
      p = fmaf(p, v, 2.f / 3);
      p = fmaf(p * v, w, 2.f * w);
      dt = isnan(dt) ? dt : p + fmaxf(dt, 0.f);
    }
    // Infinite steps decay to 0, as far as `power` reaches.
    const float log2_e_dt = times_log2e(dt);
    return make_float2(fminf(fmaxf(log2_e_dt, -kMostExponent), kMostExponent), dt);
  }
  float x = (delta + bias) * kLog2E;
  if (through_softplus) x = fmaxf(x, 0.f) + log2_fast(1.f + exp2_fast(-fabsf(x)));
  return make_float2(x, x * kLn2);
}

// Returns y silu(z).
template <class T>
__device__ __forceinline__ float gated(float y, float z) {
  if constexpr (!std::is_same_v<T, float>) return y * z * sigmoid(z);
  return quotient<T>(y * z, 1.f + exponential(fminf(fmaxf(-z, -80.f), 80.f)));
}

}  // namespace fk::cuda
