// This is what is known of each step of a chunk in one head: its time step, and how much of a state
// decays from one step to another.
//
// The logarithms of decays are summed in double and kept as a float and the rest: differences of
// such sums have all the digits of a float, however large the sums are. Their base is 2. Exponents
// that a mask hides are never taken to a power.
#pragma once

#include <cmath>

#include "cuda/math.cuh"
#include "cuda/parameter.cuh"
#include "cuda/scan_step.cuh"
#include "ops/ssd/cuda/inputs.h"

namespace fk::cuda::ssd {

// Beyond this, a step's decay is 0 or infinity, and larger logarithms would take digits from those
// of other steps.
constexpr double kMostLogDecay = 1e5;
constexpr double kLog2EInDouble = 1.4426950408889634074;

// Returns 2^x as exactly as T shows it. For float the special function unit's own errors would
// show: a polynomial takes what is beyond a whole number. NaN stays NaN.
template <class T>
__device__ __forceinline__ float decay_of(float x) {
  if constexpr (!std::is_same_v<T, float>) return exp2_fast(x);
  constexpr float kMost = 300.f;
  const float within = x > kMost ? kMost : x < -kMost ? -kMost : x;
  float whole;
  const float rest = split_product(within, 1.f, whole);
  return power_of_sum(whole, rest);
}

// Returns log(1 + x) for x from 0 to 1, with what 1 + x is rounded by made good.
__device__ __forceinline__ float log_of_more(float x) {
  const float more = 1.f + x, taken = more - 1.f;
  return taken == 0.f ? x : logf(more) * (x / taken);
}

// Returns x, or the end that it lies beyond. NaN stays NaN.
__device__ __forceinline__ double within(double x, double most) {
  return x > most ? most : x < -most ? -most : x;
}

// The time step that a step's raw number becomes, and the derivative of the one by the other.
struct TimeStep {
  float dt, slope;

  __device__ __forceinline__ TimeStep(const Inputs& in, float raw, float bias) {
    dt = raw + bias;
    slope = 1.f;
    if (in.softplus) {
      const float e = expf(-fabsf(dt));
      slope = (dt < 0.f ? e : 1.f) / (1.f + e);
      dt = fmaxf(dt, 0.f) + log_of_more(e);
    }
    // Comparisons are false for NaN, which stays NaN.
    if (dt < in.least || dt > in.most) {
      dt = dt < in.least ? in.least : in.most;
      slope = 0.f;
    }
  }
};

template <class T>
__device__ __forceinline__ float number_of_head(const HeadNumbers& numbers, int head,
                                                int channel = 0) {
  if (numbers.data == nullptr) return 0.f;
  return load_either<T>(numbers.data, numbers.is_float,
                        head * numbers.head + channel * numbers.channel);
}

// The raw dt of a chunk's steps in a warp: a lane has neighbouring ones. They are loaded ahead.
template <class T, int kSteps>
struct RawSteps {
  static constexpr int kEach = kSteps / 32;
  float raw[kEach];

  __device__ __forceinline__ void load(const Inputs& in, int64_t batch, int64_t step, int count,
                                       int head) {
    const int first = static_cast<int>(threadIdx.x % 32) * kEach;
    const T* const p = static_cast<const T*>(in.dt.data) + in.dt.offset(batch, step, head);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      raw[i] = first + i < count ? to_float(p[(first + i) * in.dt.strides[1]]) : 0.f;
    }
  }
};

template <int kSteps>
struct alignas(16) StepDecays {
  float high[kSteps], low[kSteps];  // the logarithm of the decay from the chunk's begin to a step
  float dt[kSteps];                 // 0 behind the last step
  float grown[kSteps];              // the decay from the chunk's begin to a step
  float tail[kSteps];               // the decay from a step to the chunk's end
  float weight[kSteps];  // tail dt: what a step's input counts in the state at the chunk's end
  float whole;           // the decay of the whole chunk

  // Fills in everything; one warp calls it. `A` and `bias` are the head's.
  template <class T>
  __device__ __forceinline__ void fill(const Inputs& in, const RawSteps<T, kSteps>& steps,
                                       int count, float A, float bias) {
    constexpr int kEach = RawSteps<T, kSteps>::kEach;
    const int lane = threadIdx.x % 32, first = lane * kEach;
    float own[kEach];
    double sums[kEach], sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const bool exists = first + i < count;
      own[i] = exists ? TimeStep(in, steps.raw[i], bias).dt : 0.f;
      const double log_decay = static_cast<double>(own[i]) * static_cast<double>(A);
      if (exists) sum += within(log_decay, kMostLogDecay);
      sums[i] = sum;
    }
    double before = sum;  // up to this lane's steps, at first with them
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const double other = __shfl_up_sync(0xffffffffu, before, distance);
      if (lane >= distance) before += other;
    }
    const double last = __shfl_sync(0xffffffffu, before, 31) * kLog2EInDouble;
    before = __shfl_up_sync(0xffffffffu, before, 1);
    if (lane == 0) before = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const double exponent = (before + sums[i]) * kLog2EInDouble;
      const int at = first + i;
      high[at] = static_cast<float>(exponent);
      low[at] = static_cast<float>(exponent - static_cast<double>(high[at]));
      dt[at] = own[i];
      grown[at] = decay_of<T>(static_cast<float>(exponent));
      tail[at] = decay_of<T>(static_cast<float>(last - exponent));
      weight[at] = at < count ? tail[at] * own[i] : 0.f;
    }
    if (lane == 0) whole = decay_of<T>(static_cast<float>(last));
  }

  // Returns the decay from step s to step t, and 0 where s is later than t.
  template <class T>
  __device__ __forceinline__ float between(int t, int s) const {
    const float exponent = (high[t] - high[s]) + (low[t] - low[s]);
    return s > t ? 0.f : decay_of<T>(exponent);
  }
};

}  // namespace fk::cuda::ssd
