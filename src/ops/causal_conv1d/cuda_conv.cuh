// What the kernels of causal_conv1d share: their arguments, and the taps of one channel.
#pragma once

#include <initializer_list>

#include "cuda/convert.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/gates.cuh"
#include "cuda/launch.h"
#include "cuda/parameter.cuh"
#include "ops/causal_conv1d/causal_conv1d.h"
#include "ops/selective_scan/cuda_segments.h"

namespace fk::cuda {

constexpr int kConvThreads = 256;

// (sequence, place in the state, channel)
struct ConvState {
  void* data = nullptr;  // NULL: not there
  int64_t sequence = 0, place = 0, channel = 0;
};

struct ConvArgs {
  scan::View x, y;  // y: dy in the backward
  scan::View dx;
  const void *weight, *bias;  // bias: NULL without one
  bool weight_is_float, bias_is_float;
  int64_t weight_channel, weight_tap, bias_channel;
  ConvState initial, final, dinitial, dfinal;
  int width;
  bool silu;
  int64_t channels;
  Segments segments;
  float* partial;  // (slot, width + 1, channel): parts of dweight and dbias
};

// Inputs are counted from the beginning of the sequence; before it, at -1, -2, ..., stands the
// state. A call, as are all things that happen at edges only: inlined, they would take the loops'
// registers.
template <class T>
__device__ __noinline__ float conv_input(const ConvArgs& a, const Segment& g, int64_t i,
                                         int64_t channel) {
  if (i >= 0) {
    return to_float(static_cast<const T*>(
        a.x.data)[g.batch * a.x.batch + (g.begin + i) * a.x.step + channel * a.x.channel]);
  }
  if (a.initial.data == nullptr) return 0;
  return to_float(static_cast<const T*>(
      a.initial.data)[g.sequence * a.initial.sequence + (i + a.width - 1) * a.initial.place +
                      channel * a.initial.channel]);
}

// Kernels are compiled for exactly 4 taps, and for up to 8.
constexpr int kUsualTaps = 4;

// Taps that are missing on the left.
template <int kTaps>
__device__ __forceinline__ int missing_taps(const ConvArgs& a) {
  return kTaps == kUsualTaps ? 0 : kTaps - a.width;
}
template <int kTaps>
__device__ __forceinline__ bool has_tap(const ConvArgs& a, int k) {
  return k >= missing_taps<kTaps>(a);
}

// The taps of kCount channels, right-aligned in kTaps: what is missing on the left is not applied.
template <class T, int kTaps, int kCount>
struct ConvWeights {
  float tap[kTaps][kCount], bias[kCount];

  __device__ __forceinline__ void load(const ConvArgs& a, int64_t channel) {
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      bias[c] = a.bias == nullptr
                    ? 0.f
                    : load_either<T>(a.bias, a.bias_is_float, (channel + c) * a.bias_channel);
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        const int from = k - missing_taps<kTaps>(a);
        tap[k][c] = from < 0
                        ? 0.f
                        : load_either<T>(a.weight, a.weight_is_float,
                                         (channel + c) * a.weight_channel + from * a.weight_tap);
      }
    }
  }
};

__device__ __forceinline__ float silu_slope(float x) {
  const float gate = sigmoid(x);
  return gate * fmaf(x, 1.f - gate, 1.f);
}

inline ConvState conv_state(const Tensor& t) {
  if (!t) return {};
  return {t.data, t.stride(0), t.stride(1), t.stride(2)};
}

// x or y of the update, of one step or several.
inline scan::View update_view(const Tensor& t) {
  if (!t) return {};
  return {t.data, t.dtype, t.stride(0), t.ndim == 3 ? t.stride(1) : 0, t.stride(-1)};
}

template <class Op>
ConvArgs conv_args(const Op& op) {
  ConvArgs a{};
  a.x = update_view(op.x);
  a.weight = op.weight.data;
  a.weight_is_float = op.weight.dtype == DType::kFloat32;
  a.weight_channel = op.weight.stride(0);
  a.weight_tap = op.weight.stride(1);
  if (op.bias) {
    a.bias = op.bias.data;
    a.bias_is_float = op.bias.dtype == DType::kFloat32;
    a.bias_channel = op.bias.stride(0);
  }
  a.width = static_cast<int>(op.weight.size(1));
  a.silu = op.activation == kSilu;
  a.channels = op.x.size(-1);
  return a;
}

// Which way vectors lie in all tensors of a call; neither: single elements.
struct ConvLayout {
  bool channels = true, time = true;
};

inline ConvLayout layout_of(std::initializer_list<const Tensor*> tensors, bool packed, int width) {
  ConvLayout layout;
  layout.time = !packed;
  for (const Tensor* t : tensors) {
    const auto whole = [&](int dim) { return t->size(dim) == 1 || t->stride(dim) % width == 0; };
    const bool aligned =
        reinterpret_cast<uintptr_t>(t->data) % (width * size_of(t->dtype)) == 0 && whole(0);
    layout.channels =
        layout.channels && aligned && t->stride(2) == 1 && whole(1) && t->size(2) % width == 0;
    layout.time = layout.time && aligned && t->stride(1) == 1 && whole(2);
  }
  layout.time = layout.time && !layout.channels;
  return layout;
}

}  // namespace fk::cuda
