// This file holds what the kernels of causal_conv1d share: their arguments, the taps, the inputs at
// the edges of sequences, and how a call is cut into pieces.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "cuda/convert.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/gates.cuh"
#include "cuda/launch.h"
#include "cuda/parameter.cuh"
#include "cuda/raw_vec.cuh"
#include "cuda/row_partition.cuh"
#include "cuda/segments.h"
#include "ops/causal_conv1d/causal_conv1d.h"

namespace fk::cuda {

constexpr int kConvThreads = 256;

// A state is indexed by (sequence, place in the state, channel).
struct ConvState {
  void* data = nullptr;  // NULL: not there
  int64_t sequence = 0, place = 0, channel = 0;
};

struct ConvArgs {
  StepView x, y;  // y: dy in the backward
  StepView dx;
  const void *weight, *bias;  // bias: NULL without one
  bool weight_is_float, bias_is_float;
  int64_t weight_channel, weight_tap, bias_channel;
  ConvState initial, final, dinitial, dfinal;
  int width;
  bool silu;
  int64_t channels;
  Segments segments;
  int64_t per_row;  // segments of a sequence that is not packed
  int64_t tiles;    // of the channels that a warp takes side by side
  struct {
    int64_t sequence, part, channel;
  } stride;        // time contiguous: from one item of a warp to its next
  float* partial;  // (part, width + 1, channel): parts of dweight and dbias
};

__device__ __forceinline__ Segment segment_at(const ConvArgs& a, int64_t slot) {
  if (a.segments.sequences.packed) {
    Segments segments = a.segments;
    segments.sequences.packed = true;  // known to the compiler: less code
    return segments[slot];
  }
  Segment g;
  g.sequence = g.batch = divide_likely_small(slot, a.per_row);
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

// Finds what this thread has, in kernels with a thread per channel and sequence: the sequence is
// one segment. Returns false where there is none.
__device__ __forceinline__ bool find_sequence(const ConvArgs& a, int64_t* channel, Segment* g) {
  const int64_t index = block_index() * kConvThreads + threadIdx.x;
  if (index >= a.channels * a.segments.sequences.count) return false;
  *channel = index % a.channels;
  g->sequence = index / a.channels;
  const SequenceSteps q = a.segments.sequences[g->sequence];
  g->batch = q.batch;
  g->begin = q.begin;
  g->end = q.end;
  return true;
}

// Returns an input. Inputs are counted from the beginning of the sequence; before it, at -1, -2,
// ..., stands the state.
template <class T>
__device__ __forceinline__ float conv_input(const ConvArgs& a, const Segment& g, int64_t i,
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

// Returns how many taps are missing on the left.
template <int kTaps>
__device__ __forceinline__ int missing_taps(const ConvArgs& a) {
  return kTaps == kUsualTaps ? 0 : kTaps - a.width;
}
template <int kTaps>
__device__ __forceinline__ bool has_tap(const ConvArgs& a, int k) {
  return k >= missing_taps<kTaps>(a);
}

// Holds the taps of kCount channels, right-aligned in kTaps. What is missing on the left is not
// applied.
template <int kTaps, int kCount>
struct ConvWeights {
  float tap[kTaps][kCount], bias[kCount];
};

// All loads go ahead of the first conversion, which would wait for its own.
template <class T, int kTaps, int kCount>
__device__ __forceinline__ ConvWeights<kTaps, kCount> channel_weights(const ConvArgs& a,
                                                                      int64_t channel) {
  ConvWeights<kTaps, kCount> w;
  const int missing = missing_taps<kTaps>(a);
  const int64_t row = channel * a.weight_channel - missing * a.weight_tap;
  RawVec<T, 1> bias[kCount] = {}, tap[kTaps][kCount] = {};
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
    w.bias[c] = 0;
    if (a.bias == nullptr) continue;
    if (a.bias_is_float) {
      w.bias[c] = static_cast<const float*>(a.bias)[(channel + c) * a.bias_channel];
    } else {
      bias[c].load(static_cast<const T*>(a.bias) + (channel + c) * a.bias_channel);
    }
  }
  if (a.weight_is_float) {
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        const int64_t at = row + c * a.weight_channel + k * a.weight_tap;
        w.tap[k][c] = k < missing ? 0.f : static_cast<const float*>(a.weight)[at];
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        const int64_t at = row + c * a.weight_channel + k * a.weight_tap;
        if (k >= missing) tap[k][c].load(static_cast<const T*>(a.weight) + at);
      }
    }
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) w.tap[k][c] = value_of(tap[k][c]);
    }
  }
  if (a.bias != nullptr && !a.bias_is_float) {
#pragma unroll
    for (int c = 0; c < kCount; ++c) w.bias[c] = value_of(bias[c]);
  }
  return w;
}

// Loads the kCount inputs before input `first` of a sequence, oldest first, for kVec channels.
// `first` is 0 or not below kCount.
template <class T, int kVec, int kCount>
__device__ __forceinline__ void inputs_before(const ConvArgs& a, const Segment& g, int64_t first,
                                              int64_t channel, RawVec<T, kVec> (&in)[kCount]) {
  if (first > 0) {
    const T* x = static_cast<const T*>(a.x.data) + g.batch * a.x.batch +
                 (g.begin + first - kCount) * a.x.step + channel * a.x.channel;
#pragma unroll
    for (int k = 0; k < kCount; ++k) in[k].load(x + k * a.x.step);
    return;
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    in[k] = {};
    const int place = k - kCount + a.width - 1;
    if (a.initial.data == nullptr || place < 0) continue;
    float values[kVec];
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      values[c] = to_float(static_cast<const T*>(
          a.initial.data)[g.sequence * a.initial.sequence + place * a.initial.place +
                          (channel + c) * a.initial.channel]);
    }
    in[k].set(values);
  }
}

__device__ __forceinline__ float silu_slope(float x) {
  const float gate = sigmoid(x);
  return fmaf(gate, fmaf(-x, gate, x), gate);
}

inline ConvState conv_state(const Tensor& t) {
  if (!t) return {};
  return {t.data, t.stride(0), t.stride(1), t.stride(2)};
}

// Returns x or y of the update, of one step or several.
inline StepView update_view(const Tensor& t) {
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

// A kernel takes so much at once: `tiles` units beside each other for each `rows` segments, of
// which the device runs `at_once`.
struct RunShape {
  int64_t tiles, rows, at_once;
  int waves;                // at least
  int64_t least, multiple;  // steps of a segment
  int64_t extra;            // what a segment costs beside its own, in steps
};

// Returns segments such that the device is done soonest: long ones do little twice, short ones fill
// the last wave.
inline Segments best_runs(const Sequences& sequences, const RunShape& shape) {
  constexpr int64_t kLongest = 1 << 20;
  const int64_t length = std::max<int64_t>(sequences.length, 1);
  Segments best;
  int64_t best_cost = INT64_MAX;
  for (int waves = shape.waves; waves < shape.waves + 8; ++waves) {
    const int64_t slots = std::max<int64_t>(1, waves * shape.at_once / shape.tiles) * shape.rows;
    const int64_t per_sequence =
        sequences.packed ? slots - sequences.count : slots / std::max<int64_t>(1, sequences.count);
    const int64_t steps = ceil_div(length, std::max<int64_t>(1, per_sequence));
    const Segments runs = segments_of(
        sequences,
        std::clamp(ceil_div(steps, shape.multiple) * shape.multiple, shape.least, kLongest));
    const int64_t units = shape.tiles * ceil_div(runs.slots, shape.rows);
    const int64_t cost =
        ceil_div(units, shape.at_once) * (std::min(runs.steps, length) + shape.extra);
    if (cost < best_cost) {
      best_cost = cost;
      best = runs;
    }
  }
  return best;
}

// Says which way vectors lie in all tensors of a call. If neither is set, there are single
// elements.
struct ConvLayout {
  bool channels = true, time = true;
};

// `vector` is the number of channels of a thread. Along time, vectors have 16 bytes.
inline ConvLayout layout_of(std::initializer_list<const Tensor*> tensors, bool packed, int vector) {
  ConvLayout layout;
  layout.time = !packed;
  for (const Tensor* t : tensors) {
    const int size = static_cast<int>(size_of(t->dtype));
    const auto lies = [&](int dim, int other, int width) {
      return t->stride(dim) == 1 && reinterpret_cast<uintptr_t>(t->data) % (width * size) == 0 &&
             (t->size(0) == 1 || t->stride(0) % width == 0) &&
             (t->size(other) == 1 || t->stride(other) % width == 0);
    };
    layout.channels = layout.channels && lies(2, 1, vector) && t->size(2) % vector == 0;
    layout.time = layout.time && lies(1, 2, 16 / size);
  }
  layout.time = layout.time && !layout.channels;
  return layout;
}

}  // namespace fk::cuda
