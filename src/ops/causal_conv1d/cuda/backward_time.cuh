// This file computes the gradients of causal_conv1d where time is contiguous.
#pragma once

#include "ops/causal_conv1d/cuda/forward_time.cuh"

namespace fk::cuda {

constexpr int kBackTimeWarps = 2;
// Returns how many blocks share a multiprocessor.
constexpr int back_time_blocks(int size, int taps) {
  return taps > kUsualTaps ? 6 : size == 4 ? 8 : 10;
}

// Lane l gets a value from lane l + kAway, around the end: `near` from lanes that are within the
// row of vectors, `far` from those that are reached around its end.
template <int kAway>
__device__ __forceinline__ float from_lane(float near, float far, int lane) {
  const bool around = lane < kAway;
  return __shfl_sync(kFullMask, around ? far : near, (lane + kAway) & 31);
}

template <class T, int kTaps>
__global__ void __launch_bounds__(32 * kBackTimeWarps, back_time_blocks(sizeof(T), kTaps))
    conv_back_time(const __grid_constant__ ConvArgs a) {
  constexpr int kVec = kVecWidth<T>, kStride = 32 * kVec, kHalo = kTaps - 1;
  constexpr int kLater = kHalo < kVec ? kHalo : kVec;
  using Stream = TimeStream<T, true>;
  __shared__ __align__(16) typename Stream::Shared rings[kBackTimeWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  TimeItem next(a, block_index() * kBackTimeWarps + warp);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (!next.exists(a)) return;
  Stream stream(a, rings[warp], next);
  LaneTap<T> tap;
  tap.load(a, next.channel, lane);
#pragma unroll 1
  while (next.exists(a)) {
    const TimeItem item = next;
    const ConvWeights<kTaps, 1> w = tap.template all<kTaps>(a, lane);
    next.next(a);
    if (next.exists(a)) tap.load(a, next.channel, lane);
    const int steps = item.steps(a), rest = item.rest(a);
    // Rows are taken backwards, so that the later values of ds which dx needs are there already.
    // Those behind the item's end come from a row of the next part.
    int t = item.part + 1 < a.per_row ? steps : (steps + kStride - 1) / kStride * kStride - kStride;
    T* dx = item.at<T>(a, a.dx) + t + lane * kVec;
    float dw[kTaps] = {}, dbias = 0;
    float later[kLater] = {};  // the lane's first values of ds in the row after
#pragma unroll 1
    for (; t >= -kStride; t -= kStride) {
      stream.advance(a);
      if (t < 0) break;  // the row before
      const bool edge = t + kStride > rest;
      const int left = rest - t - lane * kVec;  // of the sequence, from the lane's first on
      float window[kHalo + kVec], value[kVec], ds[kVec + kHalo];
      stream.template inputs<kHalo>(window);
      stream.gradients(value);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const float slope = silu_slope(time_sum(a, w, window, e));
        ds[e] = a.silu ? value[e] * slope : value[e];
      }
      // Nothing beyond the sequence counts, even where the slope there is no number.
      if (edge) {
#pragma unroll
        for (int e = 0; e < kVec; ++e) ds[e] = e < left ? ds[e] : 0.f;
      }
#pragma unroll
      for (int h = 0; h < kHalo; ++h) {
        ds[kVec + h] = h < kVec ? from_lane<1>(ds[h % kVec], later[h % kVec], lane)
                                : from_lane<2>(ds[h % kVec], later[h % kVec], lane);
      }
#pragma unroll
      for (int e = 0; e < kLater; ++e) later[e] = ds[e];
      if (t < steps) {
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          dbias += ds[e];
#pragma unroll
          for (int k = 0; k < kTaps; ++k) {
            if (has_tap<kTaps>(a, k)) dw[k] = fmaf(ds[e], window[e + k], dw[k]);
          }
        }
        float out[kVec] = {};
        // The last W - 1 inputs are the final state, too; the row before the last may have some.
        if (a.dfinal.data != nullptr && t + kStride + kMaxConvWidth > rest) {
          const T* dfinal = static_cast<const T*>(a.dfinal.data) +
                            item.sequence * a.dfinal.sequence + item.channel * a.dfinal.channel;
#pragma unroll
          for (int e = 0; e < kVec; ++e) {
            const int k = e - left + a.width - 1;
            if (k >= 0 && k < a.width - 1) out[e] = to_float(dfinal[k * a.dfinal.place]);
          }
        }
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          // dx_p is the sum over k of w_k ds_{p + W - 1 - k}; tap k stands at k + missing.
#pragma unroll
          for (int k = 0; k < kTaps; ++k) {
            if (has_tap<kTaps>(a, k)) out[e] = fmaf(w.tap[k][0], ds[e + kTaps - 1 - k], out[e]);
          }
        }
        if (a.dx.data != nullptr) store_part(dx, out, edge ? left : kVec);
      }
      dx -= kStride;
    }
    // Lane k stores the sum of tap k, and the lane after the taps that of the bias.
    float sum = warp_sum(dbias);
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      const float tap_sum = warp_sum(dw[k]);
      if (lane == k) sum = tap_sum;
    }
    const int to = lane - missing_taps<kTaps>(a);
    float* part = a.partial + item.slot(a) * (a.width + 1) * a.channels + item.channel;
    if (lane <= kTaps && to >= 0) part[to * a.channels] = sum;
  }
}

}  // namespace fk::cuda
