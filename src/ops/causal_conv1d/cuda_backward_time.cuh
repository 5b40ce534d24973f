// The gradients of causal_conv1d where time is contiguous, and what both layouts need at the edges
// of sequences.
#pragma once

#include "cuda/row_walk.cuh"
#include "ops/causal_conv1d/cuda_conv.cuh"

namespace fk::cuda {

constexpr int kBackTimeAhead = 3;  // loads of a lane in flight, of x and as many of dy

// Gradient i of those of state and inputs together, which may come from the final state too.
template <class T>
__device__ __forceinline__ float from_final(const ConvArgs& a, const Segment& g, int64_t i,
                                            int64_t channel) {
  const int64_t k = i - (g.end - g.begin);
  if (k < 0 || k >= a.width - 1 || a.dfinal.data == nullptr) return 0;
  return to_float(static_cast<const T*>(
      a.dfinal
          .data)[g.sequence * a.dfinal.sequence + k * a.dfinal.place + channel * a.dfinal.channel]);
}

// ds of one step, from nothing: for the few steps at edges.
template <class T>
__device__ __noinline__ float slope_at(const ConvArgs& a, const Segment& g, int64_t i,
                                       int64_t channel) {
  if (i < 0 || i >= g.end - g.begin) return 0;
  const float dy = to_float(static_cast<const T*>(
      a.y.data)[g.batch * a.y.batch + (g.begin + i) * a.y.step + channel * a.y.channel]);
  if (!a.silu) return dy;
  float sum =
      a.bias == nullptr ? 0.f : load_either<T>(a.bias, a.bias_is_float, channel * a.bias_channel);
  for (int k = 0; k < a.width; ++k) {
    sum = fmaf(
        load_either<T>(a.weight, a.weight_is_float, channel * a.weight_channel + k * a.weight_tap),
        conv_input<T>(a, g, i - (a.width - 1) + k, channel), sum);
  }
  return dy * silu_slope(sum);
}

// The gradient of place `i` of the state.
template <class T>
__device__ __noinline__ void put_state_gradient(const ConvArgs& a, const Segment& g, int i,
                                                int64_t channel) {
  float sum = from_final<T>(a, g, i, channel);
  for (int k = 0; k <= i; ++k) {
    sum = fmaf(
        load_either<T>(a.weight, a.weight_is_float, channel * a.weight_channel + k * a.weight_tap),
        slope_at<T>(a, g, i - k, channel), sum);
  }
  static_cast<T*>(a.dinitial.data)[g.sequence * a.dinitial.sequence + i * a.dinitial.place +
                                   channel * a.dinitial.channel] = from_float<T>(sum);
}

// Backwards in time: what dx needs of later values of ds is then there already, and what ds needs
// of earlier inputs comes with the loads that are ahead anyway.
template <class T, int kTaps>
__global__ void __launch_bounds__(kConvThreads, kTaps == kUsualTaps ? 2 : 1)
    conv_back_time(const __grid_constant__ ConvArgs a) {
  constexpr int kVec = kVecWidth<T>, kStride = 32 * kVec;
  constexpr int kHalo = kTaps - 1;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t index = block_index() * (kConvThreads / 32) + threadIdx.x / 32;
  if (index >= a.channels * a.segments.slots) return;
  const int lane = threadIdx.x % 32;
  const int64_t slot = quotient(index, a.channels), channel = index - slot * a.channels;
  const Segment g = segment_at(a, slot);
  const int total = static_cast<int>(g.last - g.first), mine = lane * kVec;
  const int64_t at = channel * a.x.channel + g.batch * a.x.batch + g.first + mine;
  const T* x = static_cast<const T*>(a.x.data) + at;
  const T* dy = static_cast<const T*>(a.y.data) + channel * a.y.channel + g.batch * a.y.batch +
                g.first + mine;
  T* dx =
      static_cast<T*>(a.dx.data) + channel * a.dx.channel + g.batch * a.dx.batch + g.first + mine;
  // Vectors at step t of the lane; before the segment, the inputs there.
  const auto fetch = [&](Held<T, kVec>& held, const T* from, int t) {
    if (mine + t + kVec <= total) {
      held.load(from + t);
    } else {
      float values[kVec];
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        values[e] = mine + t + e < total ? to_float(from[t + e]) : 0.f;
      }
      held.set(values);
    }
  };
  const auto fetch_inputs = [&](Held<T, kVec>& held, int t) {
    if (t >= 0) {
      fetch(held, x, t);
    } else if (t == -kStride) {
      inputs_before_row(a, g, lane, channel, x, held);
    }
  };
  const int end = (total - 1) / kStride * kStride;  // the last row of vectors
  Held<T, kVec> in[kBackTimeAhead], grad[kBackTimeAhead];
#pragma unroll
  for (int i = 0; i < kBackTimeAhead; ++i) {
    fetch_inputs(in[i], end - i * kStride);
    if (end - i * kStride >= 0) fetch(grad[i], dy, end - i * kStride);
  }
  const ConvWeights<kTaps, 1> w = channel_weights<T, kTaps>(a, channel);
  float dw[kTaps] = {}, dbias = 0;
  // later[e]: of lane l, ds kStride steps on.
  float later[kVec] = {};
  if (!g.closes) {
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      if (mine + e < kHalo) later[e] = slope_at<T>(a, g, g.last - g.begin + mine + e, channel);
    }
  }
#pragma unroll 1
  for (int t0 = end; t0 >= 0; t0 -= kBackTimeAhead * kStride) {
#pragma unroll
    for (int i = 0; i < kBackTimeAhead; ++i) {
      const int t = t0 - i * kStride;
      if (t < 0) break;
      float window[kHalo + kVec], ds[kVec + kHalo];
      {
        float now[kVec], before[kVec];
        in[i].unpack_to(now);
        in[(i + 1) % kBackTimeAhead].unpack_to(before);
        const int next = t - kBackTimeAhead * kStride;
        fetch_inputs(in[i], next);
#pragma unroll
        for (int e = 0; e < kVec; ++e) window[kHalo + e] = now[e];
#pragma unroll
        for (int h = 1; h < kTaps; ++h) {
          const int e = (kVec - h % kVec) % kVec;
          window[kHalo - h] = h <= kVec ? from_lane<-1>(now[e], before[e], lane)
                                        : from_lane<-2>(now[e], before[e], lane);
        }
      }
      {
        float dnow[kVec];
        grad[i].unpack_to(dnow);
        const int next = t - kBackTimeAhead * kStride;
        if (next >= 0) fetch(grad[i], dy, next);
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          float sum = w.bias[0];
#pragma unroll
          for (int k = 0; k < kTaps; ++k) {
            if (has_tap<kTaps>(a, k)) sum = fmaf(w.tap[k][0], window[e + k], sum);
          }
          const float slope = silu_slope(sum);
          ds[e] = a.silu ? dnow[e] * slope : dnow[e];
        }
      }
      const auto add = [&](int e) {
        dbias += ds[e];
#pragma unroll
        for (int k = 0; k < kTaps; ++k) {
          if (has_tap<kTaps>(a, k)) dw[k] = fmaf(ds[e], window[e + k], dw[k]);
        }
      };
      if (mine + t + kVec <= total) {
#pragma unroll
        for (int e = 0; e < kVec; ++e) add(e);
      } else {
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          // Nothing beyond the sequence, even where the slope there is no number.
          if (mine + t + e >= total) {
            ds[e] = 0;
          } else {
            add(e);
          }
        }
      }
#pragma unroll
      for (int h = 0; h < kHalo; ++h) {
        ds[kVec + h] = h < kVec ? from_lane<1>(ds[h % kVec], later[h % kVec], lane)
                                : from_lane<2>(ds[h % kVec], later[h % kVec], lane);
      }
#pragma unroll
      for (int e = 0; e < kVec; ++e) later[e] = ds[e];
      float out[kVec] = {};
      const int64_t beyond = g.first + mine + t + a.width - 1;  // of the state's gradients, perhaps
      if (a.dfinal.data != nullptr && beyond + kVec > g.end) {
#pragma unroll
        for (int e = 0; e < kVec; ++e) out[e] = from_final<T>(a, g, beyond - g.begin + e, channel);
      }
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        // dx_p = sum over k of w_k ds_{p + W - 1 - k}; tap k stands at k + missing.
#pragma unroll
        for (int k = 0; k < kTaps; ++k) {
          if (has_tap<kTaps>(a, k)) out[e] = fmaf(w.tap[k][0], ds[e + kTaps - 1 - k], out[e]);
        }
      }
      if (a.dx.data == nullptr) continue;
      if (mine + t + kVec <= total) {
        store(dx + t, pack<T, kVec>(out));
      } else {
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          if (mine + t + e < total) dx[t + e] = from_float<T>(out[e]);
        }
      }
    }
  }
  if (g.opens && a.dinitial.data != nullptr && lane < a.width - 1) {
    put_state_gradient<T>(a, g, lane, channel);
  }
  dbias = warp_sum(dbias);
  float* part = a.partial + slot * (a.width + 1) * a.channels + channel;
  if (lane == 0) part[a.width * a.channels] = dbias;
#pragma unroll
  for (int k = 0; k < kTaps; ++k) {
    const float sum = warp_sum(dw[k]);
    const int tap = k - missing_taps<kTaps>(a);
    if (lane == 0 && tap >= 0) part[tap * a.channels] = sum;
  }
}

}  // namespace fk::cuda
