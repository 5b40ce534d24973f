// This file says what a warpgroup of the Hopper forward does with its rows: the members of Consumer
// (sm90/forward.cuh) that change and mask scores, rescale sums, and bring the output to memory.
#pragma once

#include "ops/attention/sm90/forward.cuh"
#include "ops/attention/sm90/rows.cuh"

namespace fk::cuda_sm90 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

template <class Tile>
__device__ __forceinline__ void Consumer<Tile>::skip(int blocks) {
#pragma unroll 1
  for (; blocks > 0; --blocks, ++block) {
    wait_for_keys();
    wait_for_turn();
    pass_turn();
    release_keys();
    wait_for_values();
    next_values();
    release_values();
  }
}

template <class Tile>
template <int N>
__device__ __forceinline__ void Consumer<Tile>::finish_scores(float (&s)[N], int n,
                                                              int round) const {
  const TileOfQueries& t = tile(round);
  if constexpr (Tile::kScoreChange) {
    const int first_key = n * Tile::kKeys + 2 * (lane % 4);
    const float slope = a.slopes.data == nullptr
                            ? 0.f
                            : cuda::load_as(a.slope_type, a.slopes.data,
                                            t.batch * a.slopes.batch + t.head * a.slopes.head);
    if (a.softcap > 0.f) {
      const cuda::attention::Softcap<true> softcap(a.scale, a.softcap, 1.f);
#pragma unroll
      for (float& x : s) x = softcap(x);
    } else {
#pragma unroll
      for (float& x : s) x *= a.scale;
    }
    const int place = t.query + 64 * warpgroup + 16 * warp + lane / 4 + t.k_len - t.q_len;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int distance = place + 8 * row_of(i) - (first_key + 8 * (i / 4) + i % 2);
      s[i] = cuda::kLog2E * (s[i] - cuda::attention::alibi(slope, distance));
    }
  }
  mask_block<Tile::kKeys>(s, a, t, n, inner_first, inner_end, t.query + 64 * warpgroup, warp, lane);
}

template <class Tile>
__device__ __forceinline__ void Consumer<Tile>::clear_values_behind(int round) const {
  if (!a.packed) return;
  const int keys = tile(round).k_len - (end_block - 1) * Tile::kKeys;
  if (keys >= Tile::kKeys) return;
  for (int i = 8 * keys + thread; i < 8 * Tile::kKeys; i += 128) {
#pragma unroll
    for (int c = 0; c < Tile::kValueColumns; ++c) {
      *reinterpret_cast<uint4*>(v_block() + c * Tile::kKeyColumnBytes + 16 * i) = uint4{};
    }
  }
  cuda::fence_async_shared();
  sync();
}

template <class Tile>
__device__ __forceinline__ void Consumer<Tile>::finish_rows(const Softmax& softmax,
                                                            float scale_log2, int round,
                                                            float (&factor)[2]) const {
  const TileOfQueries& t = tile(round);
  float sum[2], max[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    sum[j] = softmax.sum[j];
    sum[j] += __shfl_xor_sync(0xffffffff, sum[j], 1);
    sum[j] += __shfl_xor_sync(0xffffffff, sum[j], 2);
    max[j] = softmax.max[j] * scale_log2;
    factor[j] = sum[j] == 0.f ? 0.f : reciprocal_fast(sum[j]);
  }
  if (a.sinks != nullptr) {
    const float sink = cuda::kLog2E * cuda::load_as(a.sink_type, a.sinks, t.head * a.sink_stride);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (sum[j] == 0.f) continue;
      const float both = fmaxf(max[j], sink);
      sum[j] = sum[j] * exp2_fast(max[j] - both) + exp2_fast(sink - both);
      factor[j] = __fdividef(exp2_fast(max[j] - both), sum[j]);
      max[j] = both;
    }
  }
  float* lse = t.lse;
  if (lse != nullptr && lane % 4 == 0) {
    const int row = 64 * warpgroup + 16 * warp + lane / 4, rows = t.q_len - t.query;
    lse += row * a.lse.row;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (row + 8 * j < rows) {
        lse[8 * j * a.lse.row] =
            sum[j] == 0.f ? -INFINITY : attention::kLn2 * (max[j] + log2_fast(sum[j]));
      }
    }
  }
}

template <class Tile>
__device__ __forceinline__ void Consumer<Tile>::store(const float (&o)[Tile::kValueWidth / 2],
                                                      const float (&factor)[2], int round) {
  const TileOfQueries& t = tile(round);
  const int first_row = t.query + 64 * warpgroup;
  char* const out = queries(round);
  put_rows<T, Tile::kQueryColumnBytes>(out, o, factor, warp, lane);
  const int rows = min(64, t.q_len - first_row);
  cuda::fence_async_shared();
  sync();
  if (a.out_view.data != nullptr && rows > 0) {
    if (!a.packed || rows == 64) {
      if (thread == 0)
        send_rows<Tile::kValueColumns, Tile::kQueryColumnBytes>(out, a, t, first_row);
    } else {
      copy_last_rows<T, Tile::kQueryColumnBytes>(out, a, t, first_row, rows, thread);
      sync();
    }
  }
  if (thread == 0) cuda::barrier_arrive(&barriers->tile_empty[stage_of<kTilePlaces>(round)]);
  out_round = round;
}

template <class Tile>
__device__ __forceinline__ void Consumer<Tile>::next_probabilities(
    float (&o)[Tile::kValueWidth / 2], const float (&s)[kScores],
    uint32_t (&p)[Tile::kKeys / 16][4], const Softmax& softmax, bool before) const {
  cuda::warpgroup_wait<0>();
  cuda::keep_registers(o);
  if (before) release_values();
  if (softmax.grown) {
#pragma unroll
    for (int i = 0; i < Tile::kValueWidth / 2; ++i) o[i] *= softmax.correction[row_of(i)];
  }
  round_pairs<T>(s, p);
}

#endif

}  // namespace fk::cuda_sm90
