// A task of the second launch of ssd's backward: dx and dz of a chunk in one head, and what it adds
// to dD. With the names of backward_shared.cuh,
//
//   dx_s = dt_s (tail_s dh B_s + sum over t of (C_t B_s) E_ts dg_t) + D dg_s
//   dz_t = dy_t (grown_t h C_t + sum over s of (C_t B_s) E_ts dt_s x_s + D x_t) silu'(z_t)
//
// Floor: P N + P Q / 2 multiply-adds a step, and as many again where there is a gate; dy, x, z and
// dh (with a gate also h) are read, dx and dz written, once. What other blocks of the launch read
// too, this one reads while it is in the L2 cache: the host numbers the blocks of a chunk together.
//
// A block goes through tiles of 64 channels. The matrix (C B^T) o E of the chunk is in shared
// memory for all of them.
#pragma once

#include "cuda/reduce.cuh"
#include "ops/ssd/cuda/backward_steps.cuh"

namespace fk::cuda::ssd {

// Fills a tile with (C B^T) o E, up to its diagonal.
template <class T>
__device__ __forceinline__ void put_scores(const WarpPlace& place, const Steps& steps, int count,
                                           const float* products, char* tile) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j >= 2 * place.groups_below()) break;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const int t = place.row_of(i), s = place.column_of(j, 0);
      float scores[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool seen = s + e <= t && t < count;
        scores[e] = seen ? products[t * kSide + s + e] * steps.template between<T>(t, s + e) : 0.f;
      }
      put_two<Stored<T>>(tile, t, s, scores[0], scores[1]);
    }
  }
}

// Multiplies steps' rows of B or C by the transpose of a state, (step, channel), over all states,
// and scales rows.
template <class T>
__device__ __forceinline__ void take_from_state(const BackwardArguments& a, const Segment& chunk,
                                                int group, const Rows& shared, const void* kept,
                                                int64_t at, int channel, const float* factors,
                                                const WarpPlace& place, int groups, char* left,
                                                char* right, WarpSums& sums) {
  using S = Stored<T>;
#pragma unroll 1
  for (int n = 0; n < a.in.states; n += kSide) {
    SquareLoader<T> rows, state;
    const SquareSource<T> rows_from = steps_source<T>(shared, chunk, group, a.in.states, n);
    const SquareSource<T> state_from = state_source<T>(a, kept, at, channel, n);
    rows.fetch(rows_from);
    state.fetch(state_from);
    __syncthreads();
    rows.put(left, rows_from);
    state.put(right, state_from);
    __syncthreads();
    multiply_squares<S, Major::kK, Major::kK>(sums, place, left, right, groups, 0,
                                              depth_of(a.in.states - n));
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) sums[i / 4][i % 4] *= factors[place.row_of(i % 4)];
}

// Stores dz, where `y` is what the outputs are before the gate.
template <class T>
__device__ __forceinline__ void store_gate_gradient(const BackwardArguments& a,
                                                    const Segment& chunk, int head, int channel,
                                                    const WarpPlace& place, WarpSums& y) {
  const auto element = [&](const Rows& t, int64_t step, int64_t p) {
    return to_float(static_cast<const T*>(t.data)[t.offset(chunk.batch, step, head, p)]);
  };
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t step = chunk.first + place.row_of(i);
      const int p = channel + place.column_of(j, i);
      if (step >= chunk.last || p >= a.in.channels) continue;
      y[j][i] *=
          element(a.dy, step, p) *
          activation_slope<Activation::kSilu, std::is_same_v<T, float>>(element(a.in.z, step, p));
    }
  }
  store_steps<T>(a.dz, chunk, head, a.in.channels, channel, place, y);
}

// Multiplies each row of a tile by its step's dt.
template <class S>
__device__ __forceinline__ void scale_by_time(const Steps& steps, char* tile) {
  constexpr int kWidth = kVecWidth<S>, kEach = kSide / kWidth;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kSide * kEach; i += kBackwardThreads) {
    S* const at = reinterpret_cast<S*>(tile + square_place<S>(i / kEach, i % kEach * kWidth));
    float values[kWidth];
    unpack(load<kWidth>(at), values);
#pragma unroll
    for (float& value : values) value *= steps.dt[i / kEach];
    store(at, pack<S>(values));
  }
}

// Finishes dx of a tile of channels, adds D x to y, and stores what the chunk adds to dD. The tiles
// hold x and dg.
template <class T>
__device__ __forceinline__ void finish_inputs(const BackwardArguments& a, const Segment& chunk,
                                              int64_t slot, int head, int channel,
                                              const Steps& steps, const WarpPlace& place,
                                              const char* x_tile, const char* dg_tile,
                                              float* strips, WarpSums& dx, WarpSums& y) {
  using S = Stored<T>;
  const int lane = place.lane;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int column = place.column_of(j, 0);
    float D[2], sums[2] = {};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int p = channel + column + e;
      D[e] = p < a.in.channels ? number_of_head<T>(a.in.D, head, p) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const int row = place.row_of(i);
      const float2 x = get_two<S>(x_tile, row, column);
      const float2 dg = get_two<S>(dg_tile, row, column);
      dx[j][i] = fmaf(D[0], dg.x, dx[j][i] * steps.dt[row]);
      dx[j][i + 1] = fmaf(D[1], dg.y, dx[j][i + 1] * steps.dt[row]);
      y[j][i] = fmaf(D[0], x.x, y[j][i]);
      y[j][i + 1] = fmaf(D[1], x.y, y[j][i + 1]);
      sums[0] = fmaf(dg.x, x.x, sums[0]);
      sums[1] = fmaf(dg.y, x.y, sums[1]);
    }
    if (a.dD.data == nullptr) continue;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) sums[e] += shuffle_xor(sums[e], mask);
      if (lane < 4) strips[place.row / 16 * kSide + column + e] = sums[e];
    }
  }
  if (a.dx.data != nullptr) {
    store_steps<T>(a.dx, chunk, head, a.in.channels, channel, place, dx);
  }
  if (a.dD.data == nullptr) return;
  __syncthreads();
  const int p = channel + static_cast<int>(threadIdx.x);
  if (threadIdx.x >= kSide || p >= a.in.channels) return;
  const float* const own = strips + threadIdx.x;
  a.dD_parts[(slot * a.in.heads + head) * a.in.channels + p] =
      (own[0] + own[kSide]) + (own[2 * kSide] + own[3 * kSide]);
}

template <class T>
__device__ __forceinline__ void input_gradients(const BackwardArguments& a, int64_t block,
                                                char* memory) {
  using S = Stored<T>;
  const int64_t slot = block / a.in.heads;
  const int head = static_cast<int>(block % a.in.heads), group = a.in.group(head);
  const Segment chunk = a.chunks[slot];
  if (!chunk.exists || chunk.first >= chunk.last) {
    if (a.dD.data == nullptr) return;
    float* const none = a.dD_parts + (slot * a.in.heads + head) * a.in.channels;
    for (int p = static_cast<int>(threadIdx.x); p < a.in.channels; p += kBackwardThreads)
      none[p] = 0;
    return;
  }
  char* const scores = memory;
  char* const left = memory + kSquareBytes<S>;
  char* const right = left + kSquareBytes<S>;
  Steps& steps = *reinterpret_cast<Steps*>(right + kSquareBytes<S>);
  float* const strips = reinterpret_cast<float*>(&steps + 1);
  const WarpPlace place;
  const int count = steps_of(chunk), channels = a.in.channels;
  const int64_t at = a.state_at(slot, head);
  if (threadIdx.x < 32) {
    Times<T> times;
    load_times<T>(a, chunk, head, &times);
    fill_steps<T>(a, chunk, head, times, &steps);
  }
  __syncthreads();
  put_scores<T>(place, steps, count, a.products_of(slot, group), scores);
#pragma unroll 1
  for (int p = 0; p < channels; p += kSide) {
    const int groups = place.row < count ? place.groups_of(channels - p) : 0;
    WarpSums y = {}, dx = {};
    if (a.dz.data != nullptr) {
      take_from_state<T>(a, chunk, group, a.in.C, a.states, at, p, steps.grown, place, groups, left,
                         right, y);
    }
    take_from_state<T>(a, chunk, group, a.in.B, a.dstates, at, p, steps.tail, place, groups, left,
                       right, dx);
    GradientLoader<T> dg;
    SquareLoader<T> x;
    dg.fetch(a, chunk, head, p);
    const SquareSource<T> x_from = steps_source<T>(a.in.x, chunk, head, channels, p);
    x.fetch(x_from);
    __syncthreads();
    x.put(left, x_from);
    dg.put(right, a, chunk, head, p);
    __syncthreads();
    multiply_squares<S, Major::kOuter, Major::kOuter>(dx, place, scores, right, groups, place.row,
                                                      depth_of(count));
    finish_inputs<T>(a, chunk, slot, head, p, steps, place, left, right, strips, dx, y);
    if (a.dz.data == nullptr) continue;
    __syncthreads();
    scale_by_time<S>(steps, left);
    __syncthreads();
    multiply_squares<S, Major::kK, Major::kOuter>(y, place, scores, left, groups, 0,
                                                  place.row + 16);
    store_gate_gradient<T>(a, chunk, head, p, place, y);
  }
}

}  // namespace fk::cuda::ssd
