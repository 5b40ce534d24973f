// The formulas of a hidden unit at one step, for one thread: what becomes of the products with x
// and with h, and of gradients on the way back. Kernels take one of these structs as a parameter.
//
// `state` is what a unit carries from step to step in float: the cell of an LSTM, the output of a
// GRU. `carried` is what the backward carries to the step before: the gradient of the cell of an
// LSTM; of a GRU, the part of the gradient of h that does not go through the product with h.
#pragma once

#include "cuda/activations.cuh"
#include "ops/rnn/problem.h"

namespace fk::cuda::rnn {

using fk::rnn::kKeptGates;

template <class T>
__device__ __forceinline__ float sigmoid_for(float x) {
  return sigmoid_of<sizeof(T) == 4>(x);
}
template <class T>
__device__ __forceinline__ float tanh_for(float x) {
  return activate<Activation::kTanh, sizeof(T) == 4>(x);
}

// This is what the backward of a unit reads at a step. `before` is the state ahead of the step.
struct UnitGradient {
  float kept[kKeptGates];
  float before, cell;
};

// A unit has so many different gradients for its biases: an LSTM's are the same for both products,
// of a GRU's that of n is not.
constexpr int kBiasSums = 4;

struct LstmCell {
  static constexpr int kGates = 4;
  static constexpr bool kHasCell = true;  // beside the output

  // Returns h, and the gates to keep. `x` and `h` are the two products with their biases.
  template <class T>
  __device__ __forceinline__ static float forward(const float (&x)[4], const float (&h)[4],
                                                  float* state, float (&kept)[kKeptGates]) {
    kept[0] = sigmoid_for<T>(x[0] + h[0]);
    kept[1] = sigmoid_for<T>(x[1] + h[1]);
    kept[2] = tanh_for<T>(x[2] + h[2]);
    kept[3] = sigmoid_for<T>(x[3] + h[3]);
    *state = fmaf(kept[1], *state, kept[0] * kept[2]);
    return kept[3] * tanh_for<T>(*state);
  }

  // This is what the gradients are multiplied with: all of a backward that needs no gradient.
  static constexpr int kFactors = 6;
  template <class T>
  __device__ __forceinline__ static void factors(const UnitGradient& at, float (&to)[kFactors]) {
    const float i = at.kept[0], f = at.kept[1], g = at.kept[2], o = at.kept[3];
    const float tanh_c = tanh_for<T>(at.cell);
    to[0] = g * i * (1.f - i);
    to[1] = at.before * f * (1.f - f);
    to[2] = i * fmaf(-g, g, 1.f);
    to[3] = tanh_c * o * (1.f - o);
    to[4] = o * fmaf(-tanh_c, tanh_c, 1.f);
    to[5] = f;
  }
  // Gives the gradients of the two products, which are the same; `dh` is the whole gradient of h.
  __device__ __forceinline__ static void backward(const float (&by)[kFactors], float dh,
                                                  float* carried, float (&of_x)[4],
                                                  float (&of_h)[4]) {
    const float dc = fmaf(dh, by[4], *carried);
    of_x[0] = dc * by[0];
    of_x[1] = dc * by[1];
    of_x[2] = dc * by[2];
    of_x[3] = dh * by[3];
    *carried = dc * by[5];
#pragma unroll
    for (int gate = 0; gate < 4; ++gate) of_h[gate] = of_x[gate];
  }

  __device__ __forceinline__ static float4 for_biases(const float (&of_x)[4], const float (&)[4]) {
    return make_float4(of_x[0], of_x[1], of_x[2], of_x[3]);
  }
};

// A GRU whose reset gate meets the product with h.
struct GruCell {
  static constexpr int kGates = 3;
  static constexpr bool kHasCell = false;

  // (1 - z) n + z h, either product rounded once with what it is added to.
  __device__ __forceinline__ static float mix(float z, float h, float n) {
    return fmaf(z, h, fmaf(-z, n, n));
  }

  template <class T>
  __device__ __forceinline__ static float forward(const float (&x)[3], const float (&h)[3],
                                                  float* state, float (&kept)[kKeptGates]) {
    kept[0] = sigmoid_for<T>(x[0] + h[0]);
    kept[1] = sigmoid_for<T>(x[1] + h[1]);
    kept[2] = tanh_for<T>(fmaf(kept[0], h[2], x[2]));
    kept[3] = h[2];
    *state = mix(kept[1], *state, kept[2]);
    return *state;
  }

  static constexpr int kFactors = 5;
  template <class T>
  __device__ __forceinline__ static void factors(const UnitGradient& at, float (&to)[kFactors]) {
    const float r = at.kept[0], z = at.kept[1], n = at.kept[2], met = at.kept[3];
    to[0] = met * r * (1.f - r);
    to[1] = (at.before - n) * z * (1.f - z);
    to[2] = (1.f - z) * fmaf(-n, n, 1.f);
    to[3] = r;
    to[4] = z;
  }
  __device__ __forceinline__ static void backward(const float (&by)[kFactors], float dh,
                                                  float* carried, float (&of_x)[3],
                                                  float (&of_h)[3]) {
    of_x[1] = dh * by[1];
    of_x[2] = dh * by[2];
    of_x[0] = of_x[2] * by[0];
    of_h[0] = of_x[0];
    of_h[1] = of_x[1];
    of_h[2] = of_x[2] * by[3];
    *carried = dh * by[4];
  }

  __device__ __forceinline__ static float4 for_biases(const float (&of_x)[3],
                                                      const float (&of_h)[3]) {
    return make_float4(of_x[0], of_x[1], of_x[2], of_h[2]);
  }
};

}  // namespace fk::cuda::rnn
