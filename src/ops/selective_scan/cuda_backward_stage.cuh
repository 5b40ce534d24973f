// How a block of the backward brings its channels of a chunk into shared memory, as floats and
// through softplus and gate, and the gradients back, and how lanes add up.
#pragma once

#include "cuda/convert.cuh"
#include "cuda/gates.cuh"
#include "cuda/parameter.cuh"
#include "ops/selective_scan/cuda_backward.h"
#include "ops/selective_scan/cuda_step.cuh"

namespace fk::cuda {

// Keeps what is made of a value from being held in registers around a loop: it is made again.
__device__ __forceinline__ int make_again(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Where a block works. It lies in shared memory, found by one thread: registers are for the states.
struct BackwardPlace {
  Segment segment;
  int64_t slot;
  int64_t channel;   // first
  int64_t kept_row;  // of the state before the segment's first step
  int64_t part_row;  // of the segment's first chunk, among those of all blocks of channels
  int channels;      // that exist
  int group;
  int chunks;  // of the segment

  __device__ __forceinline__ void find(const BackwardArgs& a) {
    const int64_t per_group = a.channels / a.groups;
    const int64_t index = blockIdx.x + int64_t{blockIdx.y} * gridDim.x;
    const int width = a.warps * kWarpChannels;
    const int64_t block = index % a.blocks_per_group;
    group = static_cast<int>(index / a.blocks_per_group % a.groups);
    slot = index / a.blocks_per_group / a.groups;
    segment = a.segments[slot];
    segment.exists = segment.exists && slot < a.segments.slots;
    const int64_t within = block * width;
    channel = group * per_group + within;
    channels = static_cast<int>(per_group - within < width ? per_group - within : width);
    chunks =
        segment.exists ? static_cast<int>((segment.last - segment.first + kChunk - 1) / kChunk) : 0;
    const int64_t before = (segment.first - segment.begin) / kChunk;
    kept_row = a.kept.base(a.segments, segment) + before;
    part_row = (block * a.groups + group) * a.chunks.slots + a.chunks.first_slot(segment.sequence) +
               before;
  }
  template <class T>
  __device__ __forceinline__ T* at(const scan::View& view, int64_t step) const {
    return static_cast<T*>(view.data) + segment.batch * view.batch + step * view.step +
           channel * view.channel;
  }
  template <class T>
  __device__ __forceinline__ float channel_value(const ChannelView& view, int c) const {
    if (view.data == nullptr || c >= channels) return 0;
    return load_either<T>(view.data, view.is_float, (channel + c) * view.stride);
  }
};

// The four pairs of channels of a chunk that a thread stages: neighbouring threads take
// neighbouring pairs, or steps where those lie side by side.
struct ChunkPairs {
  static constexpr int kCount = 4;
  int step, pair, next_step, next_pair;  // of the first, and on to the next

  __device__ __forceinline__ ChunkPairs(int warps, bool time, int thread) {
    const int log_pairs = __ffs(warps * (kWarpChannels / 2)) - 1;
    step = time ? thread % 32 : thread >> log_pairs;
    pair = time ? thread / 32 : thread & ((1 << log_pairs) - 1);
    next_step = time ? 0 : kChunk / kCount;
    next_pair = time ? warps : 0;
  }
  __device__ __forceinline__ int step_of(int i) const { return step + i * next_step; }
  __device__ __forceinline__ int pair_of(int i) const { return pair + i * next_pair; }
  // How many channels of pair i there are, of a chunk of `steps` steps.
  __device__ __forceinline__ int channels(int i, int steps, const BackwardPlace& place) const {
    return step_of(i) < steps ? place.channels - 2 * pair_of(i) : 0;
  }
  template <class T>
  __device__ __forceinline__ T* at(const scan::View& view, const BackwardPlace& place,
                                   int64_t first) const {
    return place.at<T>(view, first + step) + 2 * pair * view.channel;
  }
  __device__ __forceinline__ int64_t next(const scan::View& view) const {
    return next_step * view.step + 2 * next_pair * view.channel;
  }
};

// A load without a branch around it, 0 where there is nothing: many are on their way at once.
template <class T>
__device__ __forceinline__ T load_if(bool exists, const T* p) {
  if constexpr (sizeof(T) == 2) {
    uint16_t v;
    asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; mov.b16 %0, 0; @p ld.global.b16 %0, [%1];}"
                 : "=h"(v)
                 : "l"(p), "r"(static_cast<int>(exists)));
    return *reinterpret_cast<T*>(&v);
  } else if constexpr (sizeof(T) == 4) {
    uint32_t v;
    asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; mov.b32 %0, 0; @p ld.global.b32 %0, [%1];}"
                 : "=r"(v)
                 : "l"(p), "r"(static_cast<int>(exists)));
    return *reinterpret_cast<T*>(&v);
  } else {
    uint2 v;
    asm volatile(
        "{.reg .pred p; setp.ne.s32 p, %3, 0; mov.b32 %0, 0; mov.b32 %1, 0;"
        "@p ld.global.v2.b32 {%0, %1}, [%2];}"
        : "=r"(v.x), "=r"(v.y)
        : "l"(p), "r"(static_cast<int>(exists)));
    return *reinterpret_cast<T*>(&v);
  }
}

// kBatch of a thread's pairs of one tensor; 0 where there is nothing. kPairs: loaded at once.
template <class T, bool kPairs>
struct PairValues {
  static constexpr int kBatch = kPairs && sizeof(T) == 2 ? ChunkPairs::kCount : 2;
  Vec<T, 2> both[kPairs ? kBatch : 1];
  T first[kPairs ? 1 : kBatch], second[kPairs ? 1 : kBatch];

  __device__ __forceinline__ void load(const scan::View& view, const BackwardPlace& place,
                                       const ChunkPairs& pairs, int from, int64_t step, int steps) {
    const int64_t next = pairs.next(view);
    const T* p = pairs.at<const T>(view, place, step) + from * next;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int channels = pairs.channels(from + i, steps, place);
      if constexpr (kPairs) {
        both[i] = load_if(channels > 0, reinterpret_cast<const Vec<T, 2>*>(p));
      } else {
        first[i] = load_if(channels > 0, p);
        second[i] = load_if(channels > 1, p + view.channel);
      }
      p += next;
    }
  }
  __device__ __forceinline__ float2 operator[](int i) const {
    if constexpr (kPairs) {
      float v[2];
      unpack(both[i], v);
      return make_float2(v[0], v[1]);
    } else {
      return make_float2(to_float(first[i]), to_float(second[i]));
    }
  }
};

// Asks for the chunk at `step` of one tensor, to come nearer.
template <class T>
__device__ __forceinline__ void prefetch_chunk(const BackwardArgs& a, const scan::View& view,
                                               const BackwardPlace& place, int64_t step, int row) {
  if (view.data == nullptr) return;
  const T* p = place.at<const T>(view, step);
  if (a.time_contiguous) {
    if (row < place.channels)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(p + row * view.channel));
    return;
  }
  if (row >= kChunk) return;
  constexpr int kLine = 128 / sizeof(T);
#pragma unroll
  for (int c = 0; c < kMostWarps * kWarpChannels; c += kLine) {
    if (c < place.channels) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(p + row * view.step + c * view.channel));
    }
  }
}

struct TimeStep {
  float dt, slope;  // and d dt / d delta

  template <class T>
  __device__ __forceinline__ static TimeStep of(float delta, bool through_softplus) {
    if (!through_softplus) return {delta, 1.f};
    const float e = exp2_fast(-kLog2E * fabsf(delta));
    return {softplus<T>(delta), (delta >= 0.f ? 1.f : e) * reciprocal_fast(1.f + e)};
  }
};

// dy silu(z), and what dz is of the output before the gate.
struct Gate {
  float dy, dz;
  __device__ __forceinline__ Gate(float dy_value, float z, bool gated) : dy(dy_value), dz(0.f) {
    if (!gated) return;
    const float s = sigmoid(z);
    dy = dy_value * z * s;
    dz = dy_value * s * fmaf(z, 1.f - s, 1.f);
  }
};

// A chunk in shared memory, [step][channel]: {dt log2(e), u ln(2)}, whose product is dt u; dy
// silu(z); {factor of dz, d dt / d delta}. du, ddelta and dz take the places of the first three.
// Pitches spread steps over the banks.
struct ChunkShared {
  int pitch, gradient_pitch;
  float* inputs;
  float* factors;
  float* gradients;
  float* bias;  // and D, of channels
  float* D;

  __device__ __forceinline__ ChunkShared(float* shared, int warps)
      : pitch(2 * warps * kWarpChannels + 4), gradient_pitch(warps * kWarpChannels + 2) {
    inputs = shared;
    factors = inputs + kChunk * pitch;
    gradients = factors + kChunk * pitch;
    bias = gradients + kChunk * gradient_pitch;
    D = bias + warps * kWarpChannels;
  }
};

// B and C of kChunk steps and kGroupStates states, on their way to [step][B, C][state]; 0 where
// there is nothing. A block of kMostWarps takes all of them at once, another in turns.
template <class T>
struct ChunkStates {
  static constexpr int kCount = kChunk * kGroupStates / 32 / kMostWarps;
  const BackwardArgs& a;
  int l, n, next_l, next_n;
  const T *from_B, *from_C;
  T B[kCount], C[kCount];

  __device__ __forceinline__ ChunkStates(const BackwardArgs& args, const BackwardPlace& place,
                                         int64_t step, int first_state, int thread)
      : a(args),
        l(thread / kGroupStates),
        n(thread % kGroupStates),
        next_l(2 * args.warps),
        next_n(0) {
    if (a.B.step == 1 && a.B.state != 1) {
      l = thread % kChunk;
      n = thread / kChunk;
      next_l = 0;
      next_n = a.warps;
    }
    const auto place_of = [&](const scan::GroupView& view) {
      return static_cast<const T*>(view.data) + place.segment.batch * view.batch +
             (step + l) * view.step + place.group * view.group + (first_state + n) * view.state;
    };
    from_B = place_of(a.B);
    from_C = place_of(a.C);
  }
  __device__ __forceinline__ void load(int steps, int states) { load(steps, states, 0, B, C); }
  __device__ __forceinline__ void put(float* shared) const { put(shared, 0, B, C); }
  // What is left where a block has fewer warps.
  __device__ __forceinline__ void take_rest(int steps, int states, float* shared) const {
#pragma unroll 1
    for (int i = kCount; i < kCount * kMostWarps / a.warps; i += 8) {
      T more_B[8], more_C[8];
      load(steps, states, i, more_B, more_C);
      put(shared, i, more_B, more_C);
    }
  }

 private:
  template <int kValues>
  __device__ __forceinline__ void load(int steps, int states, int from, T (&b)[kValues],
                                       T (&c)[kValues]) const {
    const int64_t next_B = next_l * a.B.step + next_n * a.B.state;
    const int64_t next_C = next_l * a.C.step + next_n * a.C.state;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int k = from + i;
      const bool exists = l + k * next_l < steps && n + k * next_n < states;
      b[i] = load_if(exists, from_B + k * next_B);
      c[i] = load_if(exists, from_C + k * next_C);
    }
  }
  template <int kValues>
  __device__ __forceinline__ void put(float* shared, int from, const T (&b)[kValues],
                                      const T (&c)[kValues]) const {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int to_l = l + (from + i) * next_l, to_n = n + (from + i) * next_n;
      if (to_l >= kChunk || to_n >= kGroupStates) continue;
      shared[to_l * 2 * kGroupStates + to_n] = to_float(b[i]);
      shared[(to_l * 2 + 1) * kGroupStates + to_n] = to_float(c[i]);
    }
  }
};

// Sums over two lanes of twice kCount values: a lane keeps those of its half, in the first kCount.
template <int kCount, int kAll>
__device__ __forceinline__ void halve(float (&v)[kAll], int mask, bool upper) {
  static_assert(2 * kCount <= kAll);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float keep = upper ? v[i + kCount] : v[i], send = upper ? v[i] : v[i + kCount];
    v[i] = keep + __shfl_xor_sync(0xffffffffu, send, mask);
  }
}

}  // namespace fk::cuda
