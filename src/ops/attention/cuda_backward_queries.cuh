// The parts of attention's backward that walk along keys: dq without atomics, and dbias. See
// cuda_backward.cuh.
#pragma once

#include "ops/attention/cuda_backward.cuh"

namespace fk::cuda::attention {

// kRowWarps of 16 queries; kSplit of the warps have the same ones, and the same S and dP, but each
// its own columns of dq. kOneTile: k takes the place of v once dp is there.
template <class T_, int kTerms_, int kDim_, int kRowWarps_, int kKeys_, int kBlocks_, Use kUse_,
          int kSplit_ = 1, bool kOneTile_ = false>
struct QueryTile {
  using T = T_;
  static constexpr int kTerms = kTerms_, kDim = kDim_, kRowWarps = kRowWarps_, kKeys = kKeys_,
                       kBlocks = kBlocks_, kSplit = kSplit_;
  static constexpr Use kUse = kUse_;
  static constexpr bool kOneTile = kOneTile_;
  static constexpr int kThreads = kRowWarps * kSplit * 32, kRows = kRowWarps * 16;
  static constexpr int kQueryBytes = kRows * kDim * 2, kKeyBytes = kKeys * kDim * 2;
  static constexpr int kTileBytes = kTerms * (2 * kQueryBytes + (kOneTile ? 1 : 2) * kKeyBytes);
  static constexpr int kSharedBytes = kTileBytes + sizeof(Block);
};

// Where the four tiles lie, and how they are filled.
template <class Tile>
struct QueryTiles {
  uint32_t q, dout, k, v;

  __device__ __forceinline__ explicit QueryTiles(const void* shared) {
    q = shared_address(shared);
    dout = q + Tile::kTerms * Tile::kQueryBytes;
    k = dout + Tile::kTerms * Tile::kQueryBytes;
    v = Tile::kOneTile ? k : k + Tile::kTerms * Tile::kKeyBytes;
  }
  template <int kRows>
  __device__ __forceinline__ static void load(uint32_t tile, const Operand& x, int64_t batch,
                                              int64_t row, int64_t head, int valid) {
    const uint16_t* rows = x.at(batch, row, head);
#pragma unroll
    for (int term = 0; term < Tile::kTerms; ++term) {
      load_tile<Tile::kDim, kRows, Tile::kThreads, true>(tile + term * kRows * Tile::kDim * 2, x,
                                                         rows + term * x.low, valid);
    }
  }
};

// dS of one warp's 16 queries from s and dp, into dp. kDirect: the gradient of the score itself,
// which softcap's derivative is still to be multiplied to.
template <class Tile, bool kDirect>
__device__ __forceinline__ void score_gradients(
    float (&s)[1][Tile::kKeys / 8][4], float (&dp)[1][Tile::kKeys / 8][4], const HeadScore& score,
    const Window& window, const GradientFactors& factors, bool plain, bool masked, int queries,
    int first_row, int j0, const float (&exponents)[2], const float (&deltas)[2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float delta = deltas[e / 2] * factors.delta;
#pragma unroll
    for (int n = 0; n < Tile::kKeys / 8; ++n) {
      dp[0][n][e] = fmaf(dp[0][n][e], factors.dp, -delta);
    }
  }
  if (!plain) {
    change_scores<Tile::kTerms == 1, true, !kDirect>(score, s, dp, first_row, j0 + lane % 4 * 2,
                                                     queries, window.keys);
  }
  if (masked) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = first_row + e / 2 * 8;
      const int first = window.first(i), end = i < queries ? window.end(i) : 0;
#pragma unroll
      for (int n = 0; n < Tile::kKeys / 8; ++n) {
        const int j = j0 + n * 8 + lane % 4 * 2 + e % 2;
        if (j < first || j >= end) s[0][n][e] = -INFINITY;
      }
    }
  }
  const float exponent = plain ? score.scale * kLog2e : kLog2e;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float base = kProbabilityLift<Tile> - exponents[e / 2];
#pragma unroll
    for (int n = 0; n < Tile::kKeys / 8; ++n) {
      dp[0][n][e] *= exp2_fast(fmaf(s[0][n][e], exponent, base));
    }
  }
}

template <class Tile>
__device__ __forceinline__ void backward_queries_block(const Backward& p) {
  using T = typename Tile::T;
  constexpr int kDim = Tile::kDim, kKeys = Tile::kKeys;
  extern __shared__ __align__(1024) uint8_t shared[];
  const QueryTiles<Tile> tiles(shared);
  Block& block = *reinterpret_cast<Block*>(shared + Tile::kTileBytes);

  const Place found =
      find_place<Tile::kRows, true>(p.problem, p.tiles, static_cast<int>(p.problem.heads), 0,
                                    p.problem.mask.right < Mask::kUnlimited);
  if (!found.any) return;
  if (threadIdx.x == 0) {
    const Sequence sequence = p.problem.sequence(found.b);
    block = {found, sequence, Window(p.problem.mask, sequence)};
  }
  __syncthreads();
  const int queries = static_cast<int>(block.sequence.q_len);
  const int last_row = min(found.begin + Tile::kRows, queries) - 1;
  if (last_row < found.begin) return;
  const int kv_head = found.head / p.group;
  const int keys_begin = block.window.first(found.begin) / kKeys * kKeys;
  const int keys_end = block.window.end(last_row);

  const auto load_keys = [&](uint32_t tile, const Operand& x, int j) {
    if (j < keys_end) {
      QueryTiles<Tile>::template load<kKeys>(tile, x, block.place.batch, block.sequence.k_begin + j,
                                             kv_head, block.window.keys - j);
    }
    copies_commit();
  };
  const int64_t q_row = block.sequence.q_begin + found.begin;
  QueryTiles<Tile>::template load<Tile::kRows>(tiles.q, p.q, found.batch, q_row, found.head,
                                               queries - found.begin);
  QueryTiles<Tile>::template load<Tile::kRows>(tiles.dout, p.dout, found.batch, q_row, found.head,
                                               queries - found.begin);
  load_keys(tiles.v, p.v, keys_begin);
  if constexpr (!Tile::kOneTile) load_keys(tiles.k, p.k, keys_begin);

  const int warp = threadIdx.x / 32 % Tile::kRowWarps, lane = threadIdx.x % 32;
  constexpr int kWarpColumns = kDim / Tile::kSplit;
  const int columns_at = threadIdx.x / 32 / Tile::kRowWarps * kWarpColumns;
  const int first_row = found.begin + warp * 16 + lane / 4;
  const LaneAddress<kDim> q_at(tiles.q + warp * 16 * kDim * 2, Patch::kStacked);
  const LaneAddress<kDim> dout_at(tiles.dout + warp * 16 * kDim * 2, Patch::kStacked);
  float exponents[2] = {}, deltas[2] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = first_row + r * 8;
    if (i < queries) {
      const int64_t at = (found.batch * p.problem.heads + found.head) * p.problem.q_len +
                         block.sequence.q_begin + i;
      exponents[r] = p.exponents[at];
      deltas[r] = p.delta[at];
    }
  }
  const float ds_scale = score_gradient_scale(p, found.batch, kv_head);
  float dq[1][kWarpColumns / 8][4] = {};

#pragma unroll 1
  for (int j0 = keys_begin; j0 < keys_end; j0 += kKeys) {
    copies_wait<Tile::kOneTile ? 0 : 1>();
    __syncthreads();
    float dp[1][kKeys / 8][4], s[1][kKeys / 8][4];
    multiply_transposed<T, Tile::kTerms, kDim>(
        dp, FromShared<kDim>{dout_at.fresh(), Tile::kQueryBytes},
        LaneAddress<kDim>(tiles.v, Patch::kSide), Tile::kKeyBytes);
    if constexpr (Tile::kOneTile) {
      __syncthreads();
      load_keys(tiles.k, p.k, j0);
    }
    copies_wait<0>();
    __syncthreads();
    if constexpr (!Tile::kOneTile) load_keys(tiles.v, p.v, j0 + kKeys);
    multiply_transposed<T, Tile::kTerms, kDim>(s, FromShared<kDim>{q_at.fresh(), Tile::kQueryBytes},
                                               LaneAddress<kDim>(tiles.k, Patch::kSide),
                                               Tile::kKeyBytes);
    {
      const Window window = block.window;
      const Place place = block.place;
      const HeadScore score(p.change, place, product_scale(p.q, p.k, place.batch, kv_head),
                            window.offset);
      const GradientFactors factors = gradient_factors<Tile>(p, place.batch, kv_head, ds_scale);
      const int last = min(place.begin + Tile::kRows, queries) - 1;
      // Rows after the last one are zeros, and give zeros.
      const bool masked = j0 < window.first(last) || j0 + kKeys > window.end(place.begin);
      score_gradients<Tile, false>(s, dp, score, window, factors, p.plain, masked, queries,
                                   first_row, j0, exponents, deltas);
    }
    Packed<T, Tile::kTerms, 1, kKeys> ds;
    ds.pack(dp);
    multiply_add<kDim>(dq, ds, LaneAddress<kDim>(tiles.k, Patch::kStacked).moved(columns_at),
                       Tile::kKeyBytes);
    __syncthreads();
    load_keys(Tile::kOneTile ? tiles.v : tiles.k, Tile::kOneTile ? p.v : p.k, j0 + kKeys);
  }

  const Place place = block.place;
  __syncthreads();
  put_sums<kDim>(tiles.q, dq, p.change.scale * ds_scale * p.k.scale(place.batch, kv_head),
                 warp * 16, columns_at);
  __syncthreads();
  p.dq.template write_tile<kDim, Tile::kRows, Tile::kThreads, true>(
      tiles.q, threadIdx.x, place.batch, block.sequence.q_begin + place.begin, place.head,
      queries - place.begin);
}

// A block takes kRows x kKeys elements of bias; a dim of length 1 that is repeated is one row or
// column, and the block then walks along all of it. bias is never packed.
template <class Tile>
__device__ __forceinline__ void backward_bias_block(const Backward& p) {
  using T = typename Tile::T;
  constexpr int kDim = Tile::kDim, kKeys = Tile::kKeys, kRows = Tile::kRows;
  extern __shared__ __align__(1024) uint8_t shared[];
  const QueryTiles<Tile> tiles(shared);
  const Problem& problem = p.problem;
  const Sequence sequence = problem.sequence(0);
  const Window window(problem.mask, sequence);
  const int queries = static_cast<int>(problem.q_len), keys = static_cast<int>(problem.k_len);
  const bool one_row = p.bias_queries == 1 && queries != 1;
  const bool one_column = p.bias_keys == 1 && keys != 1;

  const int64_t index = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  const int64_t key_tiles = (p.bias_keys + kKeys - 1) / kKeys;
  const int64_t query_tiles = (p.bias_queries + kRows - 1) / kRows;
  const int64_t j_tile = index % key_tiles, i_tile = index / key_tiles % query_tiles;
  const int64_t rest = index / key_tiles / query_tiles;
  const int64_t bias_head = rest % p.bias_heads, bias_batch = rest / p.bias_heads;
  if (bias_batch >= p.bias_batch) return;
  const bool all_batch = p.bias_batch == 1, all_heads = p.bias_heads == 1;
  const int i_begin = one_row ? 0 : static_cast<int>(i_tile) * kRows;
  const int i_end = one_row ? queries : min(i_begin + kRows, queries);
  const int j_begin = one_column ? 0 : static_cast<int>(j_tile) * kKeys;
  const int j_end = one_column ? keys : min(j_begin + kKeys, keys);

  const int warp = threadIdx.x / 32 % Tile::kRowWarps, lane = threadIdx.x % 32;
  const LaneAddress<kDim> q_at(tiles.q + warp * 16 * kDim * 2, Patch::kStacked);
  const LaneAddress<kDim> dout_at(tiles.dout + warp * 16 * kDim * 2, Patch::kStacked);
  float sum[kKeys / 8][4] = {};

  Place place = {};
  for (place.b = all_batch ? 0 : bias_batch; place.b < (all_batch ? problem.batch : bias_batch + 1);
       ++place.b) {
    place.batch = place.b;
    const int head_end = static_cast<int>(all_heads ? problem.heads : bias_head + 1);
    for (place.head = all_heads ? 0 : static_cast<int>(bias_head); place.head < head_end;
         ++place.head) {
      const int kv_head = place.head / p.group;
      const float ds_scale = score_gradient_scale(p, place.batch, kv_head);
      const HeadScore score(p.change, place, product_scale(p.q, p.k, place.batch, kv_head),
                            window.offset);
      const GradientFactors factors = gradient_factors<Tile>(p, place.batch, kv_head, ds_scale);
#pragma unroll 1
      for (int i0 = i_begin; i0 < i_end; i0 += kRows) {
        const int seen_begin = window.first(i0), seen_end = window.end(min(i0 + kRows, i_end) - 1);
        const int first_row = i0 + warp * 16 + lane / 4;
        float exponents[2] = {}, deltas[2] = {};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (first_row + r * 8 < queries) {
            const int64_t at =
                (place.batch * problem.heads + place.head) * problem.q_len + first_row + r * 8;
            exponents[r] = p.exponents[at];
            deltas[r] = p.delta[at];
          }
        }
#pragma unroll 1
        for (int j0 = j_begin; j0 < j_end; j0 += kKeys) {
          if (j0 >= seen_end || j0 + kKeys <= seen_begin) continue;
          using Loader = QueryTiles<Tile>;
          Loader::template load<kRows>(tiles.q, p.q, place.batch, i0, place.head, queries - i0);
          Loader::template load<kRows>(tiles.dout, p.dout, place.batch, i0, place.head,
                                       queries - i0);
          if constexpr (!Tile::kOneTile) {
            Loader::template load<kKeys>(tiles.k, p.k, place.batch, j0, kv_head, keys - j0);
          }
          Loader::template load<kKeys>(tiles.v, p.v, place.batch, j0, kv_head, keys - j0);
          copies_commit();
          copies_wait<0>();
          __syncthreads();
          float dp[1][kKeys / 8][4], s[1][kKeys / 8][4];
          multiply_transposed<T, Tile::kTerms, kDim>(
              dp, FromShared<kDim>{dout_at.fresh(), Tile::kQueryBytes},
              LaneAddress<kDim>(tiles.v, Patch::kSide), Tile::kKeyBytes);
          if constexpr (Tile::kOneTile) {
            __syncthreads();
            Loader::template load<kKeys>(tiles.k, p.k, place.batch, j0, kv_head, keys - j0);
            copies_commit();
            copies_wait<0>();
            __syncthreads();
          }
          multiply_transposed<T, Tile::kTerms, kDim>(
              s, FromShared<kDim>{q_at.fresh(), Tile::kQueryBytes},
              LaneAddress<kDim>(tiles.k, Patch::kSide), Tile::kKeyBytes);
          score_gradients<Tile, true>(s, dp, score, window, factors, false, true, queries,
                                      first_row, j0, exponents, deltas);
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[n][e] += dp[0][n][e] * ds_scale;
          }
          __syncthreads();
        }
      }
    }
  }

  if (one_column) {
    // Every element of a row goes to its one column.
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      float total = 0.f;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) total += sum[n][e] + sum[n][e + 1];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      sum[0][e] = total;
    }
  }
  if (one_row) {
    float* rows = reinterpret_cast<float*>(shared);  // the warps' sums, one after another
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float total = sum[n][e] + sum[n][e + 2];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          total += __shfl_xor_sync(0xffffffffu, total, step);
        }
        if (lane / 4 == 0) rows[warp * kKeys + n * 8 + lane % 4 * 2 + e] = total;
      }
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float total = 0.f;
        for (int w = 0; w < Tile::kRowWarps; ++w) {
          total += rows[w * kKeys + n * 8 + lane % 4 * 2 + e];
        }
        sum[n][e] = total;
      }
    }
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int i =
        one_row ? warp * 16 + lane / 4 + e / 2 * 8 : i_begin + warp * 16 + lane / 4 + e / 2 * 8;
    if (i >= (one_row ? 1 : i_end)) continue;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      const int column = n * 8 + lane % 4 * 2 + e % 2;
      const int j = one_column ? column : j_begin + column;
      if (j >= (one_column ? 1 : j_end)) continue;
      p.dbias.store_one(bias_batch * p.dbias.batch + bias_head * p.dbias.head + i * p.dbias.row +
                            j * p.dbias.column,
                        sum[n][e]);
    }
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    backward_queries(const __grid_constant__ Backward p) {
  if constexpr (kCompiled<Tile>) backward_queries_block<Tile>(p);
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    backward_bias(const __grid_constant__ Backward p) {
  if constexpr (kCompiled<Tile>) backward_bias_block<Tile>(p);
}

}  // namespace fk::cuda::attention
