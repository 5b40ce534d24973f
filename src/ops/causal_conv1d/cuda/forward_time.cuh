// This file holds what both kernels for contiguous time share. A warp takes a channel over a part
// of a sequence, an item, in rows of 32 vectors of 16 bytes, then its next item; rows come through
// a ring in shared memory, those of the next item behind the last ones of this.
#pragma once

#include "cuda/mma.cuh"
#include "ops/causal_conv1d/cuda/rows.cuh"

namespace fk::cuda {

struct TimeItem {
  int64_t sequence, part, channel;

  __device__ __forceinline__ TimeItem(const ConvArgs& a, int64_t index) {
    const int64_t slot = divide_likely_small(index, a.channels);
    channel = index - slot * a.channels;
    sequence = divide_likely_small(slot, a.per_row);
    part = slot - sequence * a.per_row;
  }

  // Goes to the warp's next item, without a division.
  __device__ __forceinline__ void next(const ConvArgs& a) {
    channel += a.stride.channel;
    part += a.stride.part;
    sequence += a.stride.sequence;
    if (channel >= a.channels) {
      channel -= a.channels;
      ++part;
    }
    if (part >= a.per_row) {
      part -= a.per_row;
      ++sequence;
    }
  }

  __device__ __forceinline__ bool exists(const ConvArgs& a) const {
    return sequence < a.segments.sequences.count;
  }
  __device__ __forceinline__ int64_t slot(const ConvArgs& a) const {
    return sequence * a.per_row + part;
  }
  __device__ __forceinline__ int64_t first(const ConvArgs& a) const {
    return part * a.segments.steps;
  }
  __device__ __forceinline__ int steps(const ConvArgs& a) const {
    return static_cast<int>(min(a.segments.steps, a.segments.sequences.length - first(a)));
  }
  // Returns the steps of the sequence from the item's first on, as far as they matter.
  __device__ __forceinline__ int rest(const ConvArgs& a) const {
    return static_cast<int>(
        min(a.segments.sequences.length - first(a), a.segments.steps + int64_t{1 << 20}));
  }
  template <class T>
  __device__ __forceinline__ T* at(const ConvArgs& a, const StepView& v) const {
    return static_cast<T*>(v.data) + sequence * v.batch + channel * v.channel + first(a);
  }
};

// Lane k holds tap k of a channel and lane W its bias, as they stand in memory.
template <class T>
struct LaneTap {
  uint32_t word = 0;

  __device__ __forceinline__ void load(const ConvArgs& a, int64_t channel, int lane) {
    const bool bias = lane == a.width;
    if (lane > a.width || (bias && a.bias == nullptr)) return;
    const void* data = bias ? a.bias : a.weight;
    const int64_t at =
        bias ? channel * a.bias_channel : channel * a.weight_channel + lane * a.weight_tap;
    if (sizeof(T) == 4 || (bias ? a.bias_is_float : a.weight_is_float)) {
      word = static_cast<const uint32_t*>(data)[at];
    } else {
      word = static_cast<const uint16_t*>(data)[at];
    }
  }

  template <int kTaps>
  __device__ __forceinline__ ConvWeights<kTaps, 1> all(const ConvArgs& a, int lane) const {
    float value[1] = {__uint_as_float(word)};
    if constexpr (sizeof(T) == 2) {
      if (!(lane == a.width ? a.bias_is_float : a.weight_is_float)) {
        RawVec<T, 1>{{word}}.unpack_to(value);
      }
    }
    ConvWeights<kTaps, 1> w;
    const int missing = missing_taps<kTaps>(a);
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      w.tap[k][0] = __shfl_sync(kFullMask, value[0], max(k - missing, 0));
    }
    w.bias[0] = __shfl_sync(kFullMask, value[0], a.width);
    return w;
  }
};

// Copies the first `count` elements of 16 bytes to shared memory, with zeros behind them.
template <class T>
__device__ __forceinline__ void copy_part(T* to, const T* from, int count) {
#if __CUDA_ARCH__ >= 800
  const int bytes = min(max(count, 0), kVecWidth<T>) * static_cast<int>(sizeof(T));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(bytes)
               : "memory");
#else
#pragma unroll
  for (int e = 0; e < kVecWidth<T>; ++e) to[e] = e < count ? from[e] : from_float<T>(0.f);
#endif
}

// The rows of a warp's items pass through a ring in shared memory, one after another. Forwards, the
// row before an item comes ahead of it; with kBack they go backwards, and that row comes last.
// Places in the ring (`to`, `at`) count on, and only their lower bits matter.
template <class T, bool kBack>
struct TimeStream {
  static constexpr int kVec = kVecWidth<T>, kStride = 32 * kVec, kDepth = 8,
                       kMask = kDepth * kStride - 1;
  // A row is copied to where one was whose last use is two rows ago: all lanes are past that.
  static constexpr int kAhead = kDepth - 3;
  static constexpr int kStep = kBack ? -kStride : kStride;
  struct Shared {
    T x[kDepth * kStride];
    T dy[kBack ? kDepth * kStride : kVec];
  };
  Shared& ring;
  int lane;
  TimeItem item;  // that is copied
  bool more;
  int row, rows, full;  // `full`: rows that lie within the sequence
  int to, at;
  int behind = kAhead;  // rows that are not yet under way
  const T *x, *dy;

  __device__ __forceinline__ TimeStream(const ConvArgs& a, Shared& ring, const TimeItem& item)
      : ring(ring),
        lane(threadIdx.x % 32),
        item(item),
        more(true),
        to(lane * kVec),
        at(to - kStep) {
    open(a);
  }

  __device__ __forceinline__ void open(const ConvArgs& a) {
    const int steps = item.steps(a);
    rows = (steps + kStride - 1) / kStride;
    full = item.rest(a) / kStride;
    row = kBack ? rows - (item.part + 1 == a.per_row) : -1;
    x = item.at<const T>(a, a.x) + row * kStride + lane * kVec;
    if (kBack) dy = item.at<const T>(a, a.y) + row * kStride + lane * kVec;
  }

  __device__ __forceinline__ void copy(const ConvArgs& a) {
    if (more) {
      const int place = to & kMask;
      if (row >= 0 && row < full) {
        copy_16_bytes(shared_address(ring.x + place), x, true);
        if (kBack) copy_16_bytes(shared_address(ring.dy + place), dy, true);
      } else {
        copy_edge(a, place);
      }
      to += kStep;
      x += kStep;
      if (kBack) dy += kStep;
      row += kBack ? -1 : 1;
      if (kBack ? row < -1 : row == rows) {
        item.next(a);
        more = item.exists(a);
        if (more) open(a);
      }
    }
    copies_commit();
  }

  __device__ __forceinline__ void copy_edge(const ConvArgs& a, int place) {
    if (row >= 0) {
      const int left = item.rest(a) - row * kStride - lane * kVec;
      copy_part(ring.x + place, x, left);
      if (kBack) copy_part(ring.dy + place, dy, left);
      return;
    }
    // This is the row before an item, of which the last elements matter.
    if ((lane + 1) * kVec <= kStride - (kMaxConvWidth - 1)) return;
    if (item.part > 0) {
      copy_part(ring.x + place, x, kVec);
      return;
    }
    const T* state = static_cast<const T*>(a.initial.data) + item.sequence * a.initial.sequence +
                     item.channel * a.initial.channel;
#pragma unroll 1
    for (int e = 0; e < kVec; ++e) {
      const int k = lane * kVec + e - kStride + a.width - 1;
      ring.x[place + e] =
          k >= 0 && a.initial.data != nullptr ? state[k * a.initial.place] : from_float<T>(0.f);
    }
  }

  // Goes on to the next row; with kBack, the row before it is there too.
  __device__ __forceinline__ void advance(const ConvArgs& a) {
#pragma unroll 1
    do {
      copy(a);
    } while (--behind >= 0);
    copies_wait<kAhead - (kBack ? 1 : 0)>();
    __syncwarp();
    at += kStep;
  }

  // Loads the lane's inputs and the kHalo before them.
  template <int kHalo>
  __device__ __forceinline__ void inputs(float (&window)[kHalo + kVec]) const {
    RawVec<T, kVec> own;
    own.load(ring.x + (at & kMask));
    float values[kVec];
    own.unpack_to(values);
#pragma unroll
    for (int e = 0; e < kVec; ++e) window[kHalo + e] = values[e];
    constexpr int kPart = kHalo <= 4 ? 4 : kVec, kParts = ceil_div(kHalo, kPart);
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      RawVec<T, kPart> held;
      held.load(ring.x + ((at - (p + 1) * kPart) & kMask));
      float part[kPart];
      held.unpack_to(part);
#pragma unroll
      for (int e = 0; e < kPart; ++e) {
        const int place = kHalo - (p + 1) * kPart + e;
        if (place >= 0) window[place >= 0 ? place : 0] = part[e];
      }
    }
  }

  __device__ __forceinline__ void gradients(float (&value)[kVec]) const {
    RawVec<T, kVec> held;
    held.load(ring.dy + (at & kMask));
    held.unpack_to(value);
  }
};

template <int kTaps, int kCount>
__device__ __forceinline__ float time_sum(const ConvArgs& a, const ConvWeights<kTaps, 1>& w,
                                          const float (&window)[kCount], int e) {
  float sum = w.bias[0];
#pragma unroll
  for (int k = 0; k < kTaps; ++k) {
    if (has_tap<kTaps>(a, k)) sum = fmaf(w.tap[k][0], window[e + k], sum);
  }
  return sum;
}

template <class T, int kVec>
__device__ __forceinline__ void store_part(T* to, const float (&out)[kVec], int count) {
  if (count >= kVec) {
    store_streaming(to, pack<T, kVec>(out));
  } else {
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      if (e < count) to[e] = from_float<T>(out[e]);
    }
  }
}

// Cuts a call into items for blocks of `warps` warps, of which the device runs `at_once`; returns
// how many blocks there are to be. Several follow each other, which evens out how fast
// multiprocessors are; only beyond that a warp takes more than one item. `size` is that of an
// element.
inline int64_t cut_time(ConvArgs& a, int size, int64_t at_once, int warps) {
  constexpr int kWaves = 8;
  const int64_t stride = 32 * 16 / size;
  a.segments = best_runs(a.segments.sequences,
                         {a.channels, 1, at_once * warps, 1, stride, stride, 2 * stride});
  a.per_row = a.segments.per_row();
  const int64_t items = a.channels * a.segments.slots;
  const int64_t per_warp = std::max<int64_t>(1, ceil_div(ceil_div(items, at_once * warps), kWaves));
  const int64_t blocks = ceil_div(ceil_div(items, per_warp), warps);
  const int64_t slots = blocks * warps / a.channels;
  a.stride = {slots / a.per_row, slots % a.per_row, blocks * warps % a.channels};
  return blocks;
}

}  // namespace fk::cuda
