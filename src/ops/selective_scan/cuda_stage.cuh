// How a block brings tiles of (steps, channels) from global memory into registers and back,
// whichever of the two is contiguous there. A staging thread owns units: pairs of channels at one
// step, or 8 bytes along time in one channel, so that a warp touches whole sectors either way.
// Tiles that are not whole, and tensors of other layouts, go element by element.
#pragma once

#include "cuda/convert.cuh"
#include "cuda/gates.cuh"
#include "cuda/parameter.cuh"
#include "ops/selective_scan/cuda_scan.h"

namespace fk::cuda {

// kCount elements as they were loaded.
template <class T, int kCount>
struct Raw {
  uint32_t words[kCount * sizeof(T) / 4];

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(words[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
    } else {
      const uint32_t word = words[i / 2];
      return __half2float(
          __ushort_as_half(static_cast<unsigned short>(i % 2 == 0 ? word & 0xffffu : word >> 16)));
    }
  }
};

// The units of a whole tile of kT steps and kChannels channels over kThreads threads. Where they
// lie is the place of the thread's first plus constants.
template <class T, int kT, int kChannels, int kThreads, bool kTime>
struct Units {
  static constexpr int kWidth = kTime ? 8 / static_cast<int>(sizeof(T)) : 2;
  static constexpr int kCount = kT * kChannels / kThreads / kWidth;  // of a thread
  // Four threads take 32 bytes of a channel; units of as many channels as there are quarters of the
  // threads come first, then later steps.
  static constexpr int kAcross = !kTime                     ? 1
                                 : 4 * kChannels > kThreads ? 4 * kChannels / kThreads
                                                            : 1;
  static constexpr int kAlong =
      !kTime ? 2 * kThreads / kChannels
             : kWidth * (4 * kChannels > kThreads ? 4 : kThreads / kChannels);
  static constexpr int kOwnChannels = kTime ? kAcross : 2;  // that a thread meets
  static_assert(kT * kChannels % (kThreads * kWidth) == 0 && kThreads % 4 == 0);
  static_assert(kCount % kAcross == 0 && 2 * kThreads % kChannels == 0);

  int first_step, first_channel;

  __device__ __forceinline__ explicit Units(int thread)
      : first_step(kTime ? kWidth * (thread % 4 + 4 * (thread / (4 * kChannels)))
                         : thread / (kChannels / 2)),
        first_channel(kTime ? thread / 4 % kChannels : 2 * (thread % (kChannels / 2))) {}

  __device__ __forceinline__ int channel(int i, int k) const {
    return first_channel + i % kAcross * (kThreads / 4) + (kTime ? 0 : k);
  }
  __device__ __forceinline__ int step(int i, int k) const {
    return first_step + i / kAcross * kAlong + (kTime ? k : 0);
  }
  // Which of the thread's own channels a value is of, and which channel that is.
  __device__ __forceinline__ static constexpr int own(int i, int k) {
    return kTime ? i % kAcross : k;
  }
  __device__ __forceinline__ int own_channel(int i) const {
    return kTime ? channel(i, 0) : channel(0, i);
  }

  // `data` points at the tile's first element.
  template <class Element>
  __device__ __forceinline__ Element* place(const scan::View& view, Element* data, int i) const {
    return data + first_step * view.step + first_channel * view.channel +
           (i / kAcross * kAlong) * view.step + (i % kAcross * (kThreads / 4)) * view.channel;
  }
  // kUnits units from unit kFrom on.
  template <int kFrom = 0, int kUnits = kCount>
  __device__ __forceinline__ void load(const scan::View& view, const T* data,
                                       Raw<T, kUnits * kWidth>& raw) const {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const T* p = place(view, data, kFrom + i);
      if constexpr (kWidth * sizeof(T) == 8) {
        const uint2 v = *reinterpret_cast<const uint2*>(p);
        raw.words[2 * i] = v.x;
        raw.words[2 * i + 1] = v.y;
      } else {
        raw.words[i] = *reinterpret_cast<const uint32_t*>(p);
      }
    }
  }
  __device__ __forceinline__ void save(const scan::View& view, T* data, int i,
                                       const float (&values)[kWidth]) const {
    store(place(view, data, i), pack<T, kWidth>(values));
  }
};

// Where a block works: which channels of which segment.
struct Place {
  Segment segment;
  int64_t slot;
  int64_t channel;  // first
  int channels;     // that exist
  int group, block;

  template <int kChannels>
  __device__ __forceinline__ static Place of_block(const ScanArgs& a) {
    Place p;
    const int64_t per_group = a.channels / a.groups;
    const int64_t block = blockIdx.x + int64_t{blockIdx.y} * gridDim.x;
    p.block = static_cast<int>(block % a.blocks_per_group);
    p.group = static_cast<int>(block / a.blocks_per_group % a.groups);
    p.slot = block / a.blocks_per_group / a.groups;
    p.segment = a.segments[p.slot];
    p.segment.exists = p.segment.exists && p.slot < a.segments.slots;
    const int64_t within = int64_t{p.block} * kChannels;
    p.channel = p.group * per_group + within;
    p.channels = static_cast<int>(per_group - within < kChannels ? per_group - within : kChannels);
    return p;
  }
  // Whether a tile of kT steps and kChannels channels is all there.
  template <int kT, int kChannels>
  __device__ __forceinline__ bool whole(int64_t step) const {
    return segment.last - step >= kT && channels == kChannels;
  }
  template <int kT>
  __device__ __forceinline__ int steps(int64_t step) const {
    return segment.last - step < kT ? static_cast<int>(segment.last - step) : kT;
  }
  template <class T>
  __device__ __forceinline__ T* at(const scan::View& view, int64_t step) const {
    return static_cast<T*>(view.data) + segment.batch * view.batch + step * view.step +
           channel * view.channel;
  }
};

// Of one channel of the block; 0 where there is none.
template <class T>
__device__ __forceinline__ float channel_value(const ChannelView& view, const Place& place, int c) {
  if (view.data == nullptr || c >= place.channels) return 0;
  return load_either<T>(view.data, view.is_float, (place.channel + c) * view.stride);
}

template <class T>
__device__ __forceinline__ float value_at(const scan::View& view, const T* data, int l, int c) {
  return to_float(data[l * view.step + c * view.channel]);
}

// B and C of kT steps, on their way from global memory to [step][group of kS states][B, C][kS]; 0
// where there is nothing. Neighbouring threads take neighbouring states, or steps where those are
// contiguous.
template <class T, int kT, int kS, int kStates, int kPitch, int kThreads>
struct StagedStates {
  static constexpr int kCount = kT * kStates / kThreads;
  static_assert(kT * kStates % kThreads == 0);
  T B[kCount], C[kCount];

  __device__ __forceinline__ static bool along_time(const ScanArgs& a) {
    return a.B.step == 1 && a.B.state != 1;
  }
  __device__ __forceinline__ void load(const ScanArgs& a, const Place& place, int64_t step,
                                       int steps, int thread) {
    const T* from_B = static_cast<const T*>(a.B.data) + place.segment.batch * a.B.batch +
                      step * a.B.step + place.group * a.B.group + a.first_state * a.B.state;
    const T* from_C = static_cast<const T*>(a.C.data) + place.segment.batch * a.C.batch +
                      step * a.C.step + place.group * a.C.group + a.first_state * a.C.state;
    const bool along = along_time(a);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int k = thread + i * kThreads;
      const int l = along ? k % kT : k / kStates, n = along ? k / kT : k % kStates;
      const bool exists = l < steps && a.first_state + n < a.states;
      B[i] = exists ? from_B[l * a.B.step + n * a.B.state] : from_float<T>(0.f);
      C[i] = exists ? from_C[l * a.C.step + n * a.C.state] : from_float<T>(0.f);
    }
  }
  __device__ __forceinline__ void put(const ScanArgs& a, int thread, float* out) const {
    const bool along = along_time(a);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int k = thread + i * kThreads;
      const int l = along ? k % kT : k / kStates, n = along ? k / kT : k % kStates;
      float* to = out + l * kPitch + n / kS * (2 * kS) + n % kS;
      to[0] = to_float(B[i]);
      to[kS] = to_float(C[i]);
    }
  }
};

}  // namespace fk::cuda
