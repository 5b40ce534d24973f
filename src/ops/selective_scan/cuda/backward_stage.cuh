// How a block of the backward brings its channels of a chunk into shared memory, as floats and
// through softplus and gate, and the gradients back, and how lanes add up.
#pragma once

#include "cuda/convert.cuh"
#include "cuda/gates.cuh"
#include "cuda/parameter.cuh"
#include "cuda/scan_step.cuh"
#include "ops/selective_scan/cuda/backward.h"

namespace fk::cuda {

// Keeps what is made of a value from being held in registers around a loop: it is made again.
__device__ __forceinline__ int make_again(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Returns 2^(x y) by one instruction. The special function unit's results are too small, by 0.1 of
// 2^-24 on average for exponents up to 2^-8, by 0.4 up to 1 and by 0.8 beyond. Float, whose states
// that fade slowly add that up, therefore asks for as much more: in the product, where it costs
// nothing.
template <class T>
__device__ __forceinline__ float fast_power(float x, float y) {
  constexpr float kMore = 3.3e-8f;
  return exp2_fast(std::is_same_v<T, float> ? fmaf(x, y, kMore) : x * y);
}

// Returns an adjoint after many steps, of which `sum` is that of dt log2(e), with what those add. 0
// stays 0, whatever decays beyond 1 make of the others.
template <class T>
__device__ __forceinline__ float pass_through(float sum, float A, float adjoint, float added) {
  return adjoint == 0 ? added : fmaf(power<T>(within_power<T>(sum), A), adjoint, added);
}

// Says where a block works. It lies in shared memory, found by one thread, because registers are
// for the states.
struct BackwardPlace {
  Segment segment;
  int64_t slot;
  int64_t channel;   // first
  int64_t kept_row;  // of the state before the segment's first step
  int64_t part_row;  // of the segment's first chunk, among those of all blocks of channels
  int64_t B, C;      // where those of the batch row and group begin
  int64_t of_A;      // the block's parts of dA
  int64_t of_D;      // and of dD, ddelta_bias
  int channels;      // that exist
  int group;
  int chunks;  // of the segment

  __device__ __forceinline__ void find(const BackwardArgs& a) {
    const int64_t per_group = a.channels / a.groups;
    const int width = a.warps * kWarpChannels;
    int64_t block;
    const auto split = [&](auto index) {
      using Index = decltype(index);
      const Index blocks = static_cast<Index>(a.blocks_per_group);
      const Index groups = static_cast<Index>(a.groups);
      block = static_cast<int64_t>(index % blocks);
      group = static_cast<int>(index / blocks % groups);
      slot = static_cast<int64_t>(index / blocks / groups);
    };
    if (gridDim.y == 1) {  // short divisions
      split(blockIdx.x);
    } else {
      split(blockIdx.x + uint64_t{blockIdx.y} * gridDim.x);
    }
    segment = a.segments[slot];
    segment.exists = segment.exists && slot < a.segments.slots;
    const int64_t within = block * width;
    channel = group * per_group + within;
    channels = static_cast<int>(per_group - within < width ? per_group - within : width);
    chunks =
        segment.exists ? static_cast<int>((segment.last - segment.first + kChunk - 1) / kChunk) : 0;
    of_A = (slot * a.channels + channel) * a.states;
    of_D = slot * 2 * a.channels + channel;
    B = segment.batch * a.B.batch + group * a.B.group;
    C = segment.batch * a.C.batch + group * a.C.group;
    const int64_t before = (segment.first - segment.begin) / kChunk;
    kept_row = a.kept.base(a.segments, segment) + before;
    part_row = (block * a.groups + group) * a.chunks.slots + a.chunks.first_slot(segment.sequence) +
               before;
  }
  template <class T>
  __device__ __forceinline__ T* at(const StepView& view, int64_t step) const {
    return static_cast<T*>(view.data) + segment.batch * view.batch + step * view.step +
           channel * view.channel;
  }
  template <class T>
  __device__ __forceinline__ float channel_value(const ChannelView& view, int c) const {
    if (view.data == nullptr || c >= channels) return 0;
    return load_either<T>(view.data, view.is_float, (channel + c) * view.stride);
  }
};

// Begins a block, with all its threads: the first one finds its place.
__device__ __forceinline__ void begin_block(const BackwardArgs& a, BackwardPlace& place) {
  if (threadIdx.x == 0) {
    if (a.segments.sequences.packed) wait_for_earlier_kernels();  // offsets lie in memory
    place.find(a);
  }
  wait_for_earlier_kernels();
  let_next_kernel_start();
  __syncthreads();
}

// Returns x steps or channels of a stride, in fewer instructions than a product of int64_t takes.
__device__ __forceinline__ int64_t times(int x, int64_t stride) {
  return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(x)) *
                              static_cast<uint64_t>(stride));
}

// Returns where a step's pair of channels lies among a warp's inputs. These are spread over the
// banks, whether threads take neighbouring pairs, neighbouring steps or four steps of a channel
// each.
__device__ __forceinline__ int place_of_pair(int step, int pair) {
  return step * kStepInputs + 4 * (pair ^ (step & 2) ^ (step >> 2 & 1));
}

// A thread stages four pairs of channels of a chunk. Neighbouring threads take neighbouring pairs
// of channels, or steps where those lie side by side.
struct ChunkPairs {
  static constexpr int kCount = 4;
  int step, pair, next_step, next_pair;  // of the first, and on to the next

  __device__ __forceinline__ ChunkPairs(int warps, bool time, int thread) {
    const int log_pairs = __ffs(warps * (kWarpChannels / 2)) - 1;
    step = time ? thread & 31 : thread >> log_pairs;
    pair = time ? thread >> 5 << 2 : thread & ((1 << log_pairs) - 1);
    next_step = time ? 0 : kChunk / kCount;
    next_pair = time ? 1 : 0;
  }
  // All of a thread's pairs belong to one warp: to which, and where there the inputs of pair i and
  // its gradients lie, all other bits of their places being those of the first pair.
  static_assert(kCount == kWarpChannels / 2);
  __device__ __forceinline__ int warp() const { return pair >> 2; }
  __device__ __forceinline__ int pair_of_warp(int i) const { return (pair & 3) + i * next_pair; }
  __device__ __forceinline__ int input_at(int i) const {
    return place_of_pair(step, pair & 3) ^ i * (next_step * kStepInputs + next_pair * 4);
  }
  __device__ __forceinline__ int gradient_at(int i) const {
    return kGradientsAt + ((step * kWarpChannels + (pair & 3) * 2) ^
                           i * (next_step * kWarpChannels + next_pair * 2));
  }
  __device__ __forceinline__ int step_of(int i) const { return step + i * next_step; }
  __device__ __forceinline__ int pair_of(int i) const { return pair + i * next_pair; }
  // Returns how many channels of pair i there are, of a chunk of `steps` steps.
  __device__ __forceinline__ int channels(int i, int steps, const BackwardPlace& place) const {
    return step_of(i) < steps ? place.channels - 2 * pair_of(i) : 0;
  }
  template <class T>
  __device__ __forceinline__ T* at(const StepView& view, const BackwardPlace& place,
                                   int64_t first) const {
    return at(place.at<T>(view, first), view);
  }
  // Bit i says that pair i has a first channel, and bit kCount + i that it has a second one.
  __device__ __forceinline__ int exist(int steps, int channels) const {
    if (steps == kChunk && channels == kMostWarps * kWarpChannels) return (1 << 2 * kCount) - 1;
    int bits = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const bool step_exists = step_of(i) < steps;
      bits |= step_exists && 2 * pair_of(i) < channels ? 1 << i : 0;
      bits |= step_exists && 2 * pair_of(i) + 1 < channels ? 1 << (kCount + i) : 0;
    }
    return bits;
  }
  // Returns where the first pair lies in a tensor at a chunk's beginning. kPairs says that channels
  // are neighbours.
  template <bool kPairs = false, class T>
  __device__ __forceinline__ T* at(T* chunk, const StepView& view) const {
    return chunk + (times(step, view.step) + (kPairs ? 2 * pair : times(2 * pair, view.channel)));
  }
  __device__ __forceinline__ int64_t next(const StepView& view) const {
    return times(next_step, view.step) + times(2 * next_pair, view.channel);
  }
};

// Describes a tensor where a block works, in shared memory. Strides count elements.
struct BlockTensor {
  void* first;    // chunk of the segment; NULL: not there
  int64_t chunk;  // from one to the next
  int64_t next;   // of ChunkPairs
  int64_t row;    // of steps, or of channels where time is contiguous

  template <class T>
  __device__ __forceinline__ void set(const BackwardArgs& a, const BackwardPlace& place,
                                      const StepView& view) {
    first = view.data == nullptr ? nullptr : place.at<T>(view, place.segment.first);
    chunk = kChunk * view.step;
    next = ChunkPairs(a.warps, a.time_contiguous, 0).next(view);
    row = a.time_contiguous ? view.channel : view.step;
  }
  template <class T>
  __device__ __forceinline__ T* at(int i) const {
    return static_cast<T*>(first) + times(i, chunk);
  }
};

// Loads without a branch around it, with 0 where there is nothing, so that many loads are on their
// way at once.
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

// Holds a thread's pairs of one tensor, with 0 where there is nothing.
template <class T>
struct PairValues {
  using Bits = std::conditional_t<sizeof(T) == 2, uint32_t, uint2>;
  Bits both[ChunkPairs::kCount];

  // p is where the first pair lies, `next` leads from one to the next, and `exist` is that of
  // ChunkPairs. kPairs says that two channels are loaded at once.
  template <bool kPairs>
  __device__ __forceinline__ void load(const T* p, int64_t next, int64_t channel, int exist) {
#pragma unroll
    for (int i = 0; i < ChunkPairs::kCount; ++i) {
      const bool first = exist >> i & 1;
      if constexpr (kPairs) {
        both[i] = load_if(first, reinterpret_cast<const Bits*>(p));
      } else {
        const bool second = exist >> (ChunkPairs::kCount + i) & 1;
        const T values[2] = {load_if(first, p), load_if(second, p + channel)};
        memcpy(&both[i], values, sizeof(Bits));
      }
      p += next;
    }
  }
  __device__ __forceinline__ float2 operator[](int i) const {
    Vec<T, 2> values;
    memcpy(&values, &both[i], sizeof(Bits));
    float v[2];
    unpack(values, v);
    return make_float2(v[0], v[1]);
  }
};

// Asks for chunk i of one tensor, of so many steps, to come nearer.
template <class T>
__device__ __forceinline__ void prefetch_chunk(const BackwardArgs& a, const BlockTensor& tensor,
                                               const BackwardPlace& place, int i, int steps,
                                               int row) {
  if (tensor.first == nullptr || row >= (a.time_contiguous ? place.channels : steps)) return;
  const T* p = tensor.at<const T>(i) + times(row, tensor.row);
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
  constexpr int kLine = 128 / sizeof(T);
  if (a.time_contiguous || kLine >= place.channels) return;
#pragma unroll
  for (int c = kLine; c < kMostWarps * kWarpChannels; c += kLine) {
    if (c < place.channels) asm volatile("prefetch.global.L2 [%0];" ::"l"(p + c));
  }
}

struct TimeStep {
  float dt, slope;  // and d dt / d delta

  template <class T>
  __device__ __forceinline__ static TimeStep of(float delta, bool through_softplus) {
    // log(1 + e) is computed as 2 atanh(e / (2 + e)), so that small results keep their relative
    // precision. There are no branches, so that elements wait for the special function unit
    // together.
    const float e = exp2_fast(-kLog2E * fabsf(delta));
    const float w = e * reciprocal_fast(2.f + e), v = w * w;
    float p = 2.f / 9;
    if (std::is_same_v<T, float>) p = fmaf(fmaf(2.f / 13, v, 2.f / 11), v, p);
    p = fmaf(p, v, 2.f / 7);
    p = fmaf(p, v, 2.f / 5);
    p = fmaf(p, v, 2.f / 3);
    p = fmaf(p, v, 2.f);
    const float dt = fmaf(p, w, fmaxf(delta, 0.f));
    const float slope = (delta >= 0.f ? 1.f : e) * reciprocal_fast(1.f + e);
    return {through_softplus ? dt : delta, through_softplus ? slope : 1.f};
  }
};

// Holds dy silu(z), and what dz is of the output before the gate; s is sigmoid(z).
struct Gate {
  float dy, dz;
  __device__ __forceinline__ Gate(float dy_value, float z, float s, bool gated) {
    const float part = dy_value * s;
    dy = gated ? part * z : dy_value;
    dz = gated ? part * fmaf(z, 1.f - s, 1.f) : 0.f;
  }
};

// Returns the order in which a lane has its four states, state s ^ order_of(lane) as the s-th:
// lanes that differ in one channel bit then exchange halves, or single states, without choosing
// between registers.
__device__ __forceinline__ int order_of(int lane) { return (lane >> 3 & 2) | (lane >> 1 & 1); }

// Returns where B of a step lies in that order; C is 2 * kGroupStates behind.
__device__ __forceinline__ int place_of_order(int order) {
  return (order & 2) * 2 * kGroupStates + (order & 1) * kGroupStates;
}

// Brings B and C of kChunk steps and kGroupStates states, kStepStates a step, with 0 where there is
// nothing. A block of kMostWarps takes all of them at once, another in turns.
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
    const auto place_of = [&](const scan::GroupView& view, int64_t begin) {
      return static_cast<const T*>(view.data) + begin + (step + l) * view.step +
             times(first_state + n, view.state);
    };
    from_B = place_of(a.B, place.B);
    from_C = place_of(a.C, place.C);
  }
  __device__ __forceinline__ void load(int steps, int states) { load(steps, states, 0, B, C); }
  __device__ __forceinline__ void put(float* shared) const { put<false>(shared, 0, B, C); }
  // Takes what is left where a block has fewer warps.
  __device__ __forceinline__ void take_rest(int steps, int states, float* shared) const {
#pragma unroll 1
    for (int i = kCount; i < kCount * kMostWarps / a.warps; i += 8) {
      T more_B[8], more_C[8];
      load(steps, states, i, more_B, more_C);
      put<true>(shared, i, more_B, more_C);
    }
  }

 private:
  template <int kValues>
  __device__ __forceinline__ void load(int steps, int states, int from, T (&b)[kValues],
                                       T (&c)[kValues]) const {
    const int64_t next_B = times(next_l, a.B.step) + times(next_n, a.B.state);
    const int64_t next_C = times(next_l, a.C.step) + times(next_n, a.C.state);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int k = from + i;
      const bool exists = l + k * next_l < steps && n + k * next_n < states;
      b[i] = load_if(exists, from_B + k * next_B);
      c[i] = load_if(exists, from_C + k * next_C);
    }
  }
  template <bool kSome, int kValues>  // kSome: not all are of the chunk
  __device__ __forceinline__ void put(float* shared, int from, const T (&b)[kValues],
                                      const T (&c)[kValues]) const {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int to_l = l + (from + i) * next_l, to_n = n + (from + i) * next_n;
      if (kSome && (to_l >= kChunk || to_n >= kGroupStates)) continue;
      float* const to = shared + to_l * kStepStates;
      const float first = to_float(b[i]), second = to_float(c[i]);
#pragma unroll
      for (int order = 0; order < 4; ++order) {
        float* const in_order = to + place_of_order(order) + (to_n ^ order);
        in_order[0] = first;
        in_order[2 * kGroupStates] = second;
      }
    }
  }
};

// Adds 2 kCount values up over two lanes: a lane keeps the sums of its half, in the first kCount.
template <int kCount, int kAll>
__device__ __forceinline__ void halve(float (&v)[kAll], int mask, bool upper) {
  static_assert(2 * kCount <= kAll);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float keep = upper ? v[i + kCount] : v[i], send = upper ? v[i] : v[i + kCount];
    v[i] = keep + __shfl_xor_sync(0xffffffffu, send, mask);
  }
}

// Does so for each array again and again, over lanes that differ in kMask, in the bit below it and
// so on, until a lane has one sum of each. At first there are 2 kCount values.
template <int kCount, int kMask, class... Arrays>
__device__ __forceinline__ void halve_to_one(int lane, Arrays&... v) {
  (halve<kCount>(v, kMask, lane & kMask), ...);
  if constexpr (kCount > 1) halve_to_one<kCount / 2, kMask / 2>(lane, v...);
}

}  // namespace fk::cuda
