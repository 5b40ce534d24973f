// What the kernels of causal_conv1d share: their arguments, and the taps of one channel.
#pragma once

#include <initializer_list>

#include "cuda/convert.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/gates.cuh"
#include "cuda/held.cuh"
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
  int64_t per_row;  // segments of a sequence that is not packed
  int lanes;        // threads side by side across channels, a power of two
  int64_t tiles;    // of `lanes` threads across the channels
  float* partial;   // (part, width + 1, channel): parts of dweight and dbias
};

__device__ __forceinline__ Segment segment_at(const ConvArgs& a, int64_t slot) {
  if (a.segments.sequences.packed) return a.segments[slot];
  Segment g;
  g.sequence = g.batch = quotient(slot, a.per_row);
  const int64_t index = slot - g.sequence * a.per_row;
  g.begin = 0;
  g.end = a.segments.sequences.length;
  g.first = index * a.segments.steps;
  g.last = g.first + a.segments.steps < g.end ? g.first + a.segments.steps : g.end;
  g.opens = index == 0;
  g.closes = g.last == g.end;
  g.exists = true;
  return g;
}

// Where a thread that walks along time works: the block's threads stand in rows of a.lanes, side by
// side across channels, each row in a segment of its own.
template <int kVec>
struct ConvPlace {
  int lane, row;
  int tile, strip;  // of the block: strips of threads / lanes segments
  int64_t slot, channel;

  __device__ __forceinline__ ConvPlace(const ConvArgs& a, int64_t block, int threads) {
    const int shift = __ffs(a.lanes) - 1;
    lane = threadIdx.x & (a.lanes - 1);
    row = threadIdx.x >> shift;
    strip = static_cast<int>(quotient(block, a.tiles));
    tile = static_cast<int>(block - strip * a.tiles);
    slot = int64_t{strip} * (threads >> shift) + row;
    channel = ((int64_t{tile} << shift) + lane) * kVec;
  }
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
template <int kTaps, int kCount>
struct ConvWeights {
  float tap[kTaps][kCount], bias[kCount];
};

// The taps of one channel, the same for all lanes of a warp. All loads go ahead of the first
// conversion, which would wait for its own.
template <class T, int kTaps>
__device__ __forceinline__ ConvWeights<kTaps, 1> channel_weights(const ConvArgs& a,
                                                                 int64_t channel) {
  ConvWeights<kTaps, 1> w;
  const int missing = missing_taps<kTaps>(a);
  const int64_t row = channel * a.weight_channel;
  Held<T, 1> bias = {}, tap[kTaps] = {};
  if (a.bias != nullptr && !a.bias_is_float) {
    bias.load(static_cast<const T*>(a.bias) + channel * a.bias_channel);
  }
  if (a.weight_is_float) {
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      w.tap[k][0] = k < missing
                        ? 0.f
                        : static_cast<const float*>(a.weight)[row + (k - missing) * a.weight_tap];
    }
  } else {
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      if (k >= missing) {
        tap[k].load(static_cast<const T*>(a.weight) + row + (k - missing) * a.weight_tap);
      }
    }
  }
  w.bias[0] = 0;
  if (a.bias != nullptr && a.bias_is_float) {
    w.bias[0] = static_cast<const float*>(a.bias)[channel * a.bias_channel];
  } else if (a.bias != nullptr) {
    bias.unpack_to(w.bias);
  }
  if (!a.weight_is_float) {
#pragma unroll
    for (int k = 0; k < kTaps; ++k) tap[k].unpack_to(w.tap[k]);
  }
  return w;
}

// Those of all channels of a block come through shared memory: in the tensor the taps of a channel
// stand together, so that a thread's own loads would take a cache line each.
template <class T, int kTaps, int kVec>
struct TapTile {
  static constexpr int kMaxChannels = 32 * kVec;
  alignas(16) float values[kTaps + 1][kMaxChannels];

  __device__ __forceinline__ void fill(const ConvArgs& a, int tile) {
    const int64_t first = int64_t{tile} * a.lanes * kVec;
    const int64_t left = a.channels - first;
    const int count = left < a.lanes * kVec ? static_cast<int>(left) : a.lanes * kVec;
    for (int i = threadIdx.x; i < count * a.width; i += blockDim.x) {
      const int channel = i / a.width, k = i - channel * a.width;
      values[k + missing_taps<kTaps>(a)][channel] = load_either<T>(
          a.weight, a.weight_is_float, (first + channel) * a.weight_channel + k * a.weight_tap);
    }
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      values[kTaps][i] =
          a.bias == nullptr ? 0.f
                            : load_either<T>(a.bias, a.bias_is_float, (first + i) * a.bias_channel);
    }
    __syncthreads();
  }

  __device__ __forceinline__ ConvWeights<kTaps, kVec> of_lane(const ConvArgs& a, int lane) const {
    ConvWeights<kTaps, kVec> w;
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      w.bias[c] = values[kTaps][lane * kVec + c];
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        w.tap[k][c] = has_tap<kTaps>(a, k) ? values[k][lane * kVec + c] : 0.f;
      }
    }
    return w;
  }
};

// The kCount inputs before input `first`, oldest first, for kVec channels: whole vectors where they
// all are inputs.
template <class T, int kVec, int kCount>
__device__ __forceinline__ void inputs_before(const ConvArgs& a, const Segment& g, int64_t first,
                                              int64_t channel, float (&window)[kCount][kVec]) {
  if (first >= kCount) {
    const T* x = static_cast<const T*>(a.x.data) + g.batch * a.x.batch +
                 (g.begin + first - kCount) * a.x.step + channel * a.x.channel;
    Held<T, kVec> in[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) in[k].load(x + k * a.x.step);
#pragma unroll
    for (int k = 0; k < kCount; ++k) in[k].unpack_to(window[k]);
    return;
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const int64_t i = first - kCount + k, place = i + a.width - 1;
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      window[k][c] = 0;
      if (i >= 0) {
        window[k][c] = to_float(
            static_cast<const T*>(a.x.data)[g.batch * a.x.batch + (g.begin + i) * a.x.step +
                                            (channel + c) * a.x.channel]);
      } else if (place >= 0 && a.initial.data != nullptr) {
        window[k][c] = to_float(static_cast<const T*>(
            a.initial.data)[g.sequence * a.initial.sequence + place * a.initial.place +
                            (channel + c) * a.initial.channel]);
      }
    }
  }
}

// Time contiguous: the vector of inputs 32 vectors before the lane's first in the segment, of which
// only those just before the segment matter. `x`: at the lane's first.
template <class T, int kVec>
__device__ __forceinline__ void inputs_before_row(const ConvArgs& a, const Segment& g, int lane,
                                                  int64_t channel, const T* x,
                                                  Held<T, kVec>& held) {
  float values[kVec] = {};
  if (g.first >= 32 * kVec) {
    held.load(x - 32 * kVec);
    return;
  }
  if (a.initial.data != nullptr || g.first > 0) {
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      const int64_t i = g.first + (lane - 32) * kVec + e;
      if (i > g.first - a.width) values[e] = conv_input<T>(a, g, i, channel);
    }
  }
  held.set(values);
}

// Lane l gets from lane l + kAway, around the end: `near` from lanes that are within the row of
// vectors, `far` from those that are reached around its end.
template <int kAway>
__device__ __forceinline__ float from_lane(float near, float far, int lane) {
  const bool around = kAway > 0 ? lane < kAway : lane >= 32 + kAway;
  return __shfl_sync(0xffffffffu, around ? far : near, (lane + kAway) & 31);
}

__device__ __forceinline__ float silu_slope(float x) {
  const float gate = sigmoid(x);
  return fmaf(gate, fmaf(-x, gate, x), gate);
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

struct RunLimits {
  int64_t shortest, longest;
};

// The longest runs of time that leave blocks for `waves` times what the device runs at once, two on
// each multiprocessor. A block has `rows` segments, beside it stand `tiles` - 1 others.
inline Segments segments_that_fill(const scan::Sequences& sequences, const RunLimits& limits,
                                   int64_t tiles, int64_t rows, int waves, int device) {
  const int64_t wanted = int64_t{waves} * device_properties(device).multiprocessors * 19 / 10;
  int64_t steps = limits.longest;
  while (steps > limits.shortest &&
         tiles * ceil_div(segments_of(sequences, steps).slots, rows) < wanted) {
    steps /= 2;
  }
  return segments_of(sequences, steps);
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
