// These are the parts of attention's backward that walk along keys: dq without atomics, and dbias.
// See cuda/backward.cuh.
#pragma once

#include "ops/attention/cuda/backward.cuh"

namespace fk::cuda::attention {

// Holds what a block works on. For dq that is a place (a head's rows of queries) and all keys it
// sees. For dbias it is the places that are summed up in kRows x kKeys elements, one place after
// another. A dim of length 1 that is repeated is one row or column, and the block walks along all
// of it.
struct QueryBlock : Block {
  int i_begin, i_end, j_begin, j_end;
  int head_begin, head_end;
  int64_t b_end;
  // These belong to the place.
  int kv_head, keys_begin, keys_end;
  float operand_scale, ds_scale;
  GradientFactors factors;

  template <class Tile>
  __device__ __forceinline__ void begin_place(const Backward& p) {
    keys_begin = keys_end = 0;
    if (place.b >= p.problem.batch || place.head >= p.problem.heads) return;  // dbias is 0
    const int last = min(place.begin + Tile::kRows, static_cast<int>(sequence.q_len)) - 1;
    kv_head = place.head / p.group;
    keys_begin = max(j_begin, window.first(place.begin) / Tile::kKeys * Tile::kKeys);
    keys_end = min(j_end, window.end(last));
    operand_scale = product_scale<Tile>(p, place.batch, kv_head);
    ds_scale = score_gradient_scale<Tile>(p, place.batch, kv_head);
    factors = gradient_factors<Tile>(p, place.batch, kv_head, ds_scale);
  }
  template <int kRows>
  __device__ __forceinline__ void next_place() {
    if (place.begin + kRows < i_end) {
      place.begin += kRows;
    } else if (place.head + 1 < head_end) {
      place.begin = i_begin;
      ++place.head;
    } else if (place.b + 1 < b_end) {
      place.begin = i_begin;
      place.head = head_begin;
      place.batch = ++place.b;  // bias is never packed
    } else {
      place.any = false;
    }
  }
};

// This is what every row of the table of tiles (backward_launch.cu) says, and what most rows leave
// as it is here. A row adds how the work is cut:
//   kRowWarps  warps side by side over queries, 16 each
//   kKeys      keys that pass at a time
//   kBlocks    blocks that share a multiprocessor
template <class T_, int kTerms_, int kDim_, Use kUse_>
struct QueryRow {
  using T = T_;                           // the operands' type
  static constexpr int kTerms = kTerms_;  // how many elements of it an operand is made of
  static constexpr int kDim = kDim_;      // columns of all tensors
  static constexpr Use kUse = kUse_;      // the GPUs on which the host chooses this tile
  static constexpr int kSplit = 1;  // warps with the same queries, and the same S and dP, that each
                                    // have their own columns of dq
  static constexpr bool kOneTile = false;  // whether k takes the place of v once dp is there
};

// A tile is a row of the table with what follows from it.
template <class Row>
struct QueryTile : Row {
  static constexpr int kThreads = Row::kRowWarps * Row::kSplit * 32, kRows = Row::kRowWarps * 16;
  // Shared memory holds q, dout, a tile of keys and one of values, and a QueryBlock.
  static constexpr int kQueryBytes = kRows * Row::kDim * 2, kKeyBytes = Row::kKeys * Row::kDim * 2;
  static constexpr int kTileBytes =
      Row::kTerms * (2 * kQueryBytes + (Row::kOneTile ? 1 : 2) * kKeyBytes);
  static constexpr int kSharedBytes = kTileBytes + sizeof(QueryBlock);
};

// Tells where the four tiles lie, and fills them.
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
#pragma unroll 1
    for (int term = 0; term < Tile::kTerms; ++term) {
      load_tile<Tile::kDim, kRows, Tile::kThreads, kAnyStrides>(
          tile + term * kRows * Tile::kDim * 2, x, rows + term * x.low, valid);
    }
  }
};

// Makes dS of one warp's 16 queries from s and dp, in the place of dp.
template <class Tile>
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
    change_scores<Tile::kTerms == 1, true, true>(score, s, dp, first_row, j0 + lane % 4 * 2,
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

// Finds which block of dbias this one is. It has no place if there are more blocks than are needed.
template <class Tile>
__device__ __forceinline__ QueryBlock find_bias(const Backward& p) {
  constexpr int kKeys = Tile::kKeys, kRows = Tile::kRows;
  const Problem& problem = p.problem;
  const int queries = static_cast<int>(problem.q_len), keys = static_cast<int>(problem.k_len);
  unsigned index = blockIdx.y * gridDim.x + blockIdx.x;  // memory holds fewer elements than 2^32
  const auto next = [&](int count) {
    const unsigned rest = index % static_cast<unsigned>(count);
    index /= static_cast<unsigned>(count);
    return static_cast<int>(rest);
  };
  const int j_begin = next(ceil_div(p.bias_keys, kKeys)) * kKeys;
  const int i_begin = next(ceil_div(p.bias_queries, kRows)) * kRows;
  const int head = next(static_cast<int>(p.bias_heads));
  const int64_t b = index;
  const Sequence sequence = problem.sequence(0);
  return {{{b, b, head, i_begin, b < p.bias_batch}, sequence, Window(problem.mask, sequence)},
          i_begin,
          p.bias_queries == 1 ? queries : min(i_begin + kRows, queries),
          j_begin,
          p.bias_keys == 1 ? keys : min(j_begin + kKeys, keys),
          head,
          p.bias_heads == 1 ? static_cast<int>(problem.heads) : head + 1,
          p.bias_batch == 1 ? problem.batch : b + 1};
}

// Adds the sums of a block's places, a tile of kRows x kKeys of float32, to where they belong.
template <class Tile>
__device__ __forceinline__ void write_bias(const Backward& p, const QueryBlock& block,
                                           const uint8_t* tile) {
  const bool one_row = p.bias_queries == 1, one_column = p.bias_keys == 1;
  const int rows = one_row ? 1 : block.i_end - block.i_begin;
  const int columns = one_column ? 1 : block.j_end - block.j_begin;
#pragma unroll 1
  for (int x = threadIdx.x; x < rows * columns; x += Tile::kThreads) {
    const int i = x / columns, j = x % columns;
    float total = 0.f;
#pragma unroll 1
    for (int r = i; r < (one_row ? Tile::kRows : i + 1); ++r) {
#pragma unroll 1
      for (int c = j; c < (one_column ? Tile::kKeys : j + 1); ++c) {
        total += *reinterpret_cast<const float*>(tile + float_place<Tile::kDim>(0, r, c));
      }
    }
    // The strides are 0 where bias is repeated.
    p.dbias.store_one(p.dbias.at(block.place.b, block.i_begin + i, block.place.head) +
                          (block.j_begin + j) * p.dbias.column,
                      total);
  }
}

// The kernel makes dbias if p has it, else dq.
template <class Tile>
__device__ __forceinline__ void backward_queries_block(const Backward& p) {
  using T = typename Tile::T;
  constexpr int kDim = Tile::kDim, kKeys = Tile::kKeys;
  extern __shared__ __align__(1024) uint8_t shared[];
  const QueryTiles<Tile> tiles(shared);
  QueryBlock& block = *reinterpret_cast<QueryBlock*>(shared + Tile::kTileBytes);
  const bool bias = p.dbias.data != nullptr;
  if (bias) {
    if (threadIdx.x == 0) block = find_bias<Tile>(p);
  } else {
    const BlockRows found = find_block_rows<Tile::kRows, Owned::kQueries>(
        p.problem, p.tiles, static_cast<int>(p.problem.heads), 0,
        p.problem.mask.right < Mask::kUnlimited);
    if (!found.any) return;
    if (threadIdx.x == 0) {
      const Sequence sequence = p.problem.sequence(found.b);
      const Window window(p.problem.mask, sequence);
      block = {{found, sequence, window}, 0, 0, 0, window.keys, 0, 0, 0};
    }
  }
  __syncthreads();
  if (!block.place.any) return;

  const int warp = threadIdx.x / 32 % Tile::kRowWarps, lane = threadIdx.x % 32;
  constexpr int kWarpColumns = kDim / Tile::kSplit;
  const int columns_at = threadIdx.x / 32 / Tile::kRowWarps * kWarpColumns;
  const LaneAddress<kDim> q_at(tiles.q + warp * 16 * kDim * 2, Patch::kStacked);
  const LaneAddress<kDim> dout_at(tiles.dout + warp * 16 * kDim * 2, Patch::kStacked);
  static_assert(kWarpColumns >= kKeys);
  float sums[1][kWarpColumns / 8][4] = {};  // of dq, or of kKeys columns of dbias

#pragma unroll 1
  do {
    if (threadIdx.x == 0) block.template begin_place<Tile>(p);
    __syncthreads();
    const auto load_keys = [&](uint32_t tile, const Operand& x, int j) {
      if (j < block.keys_end) {
        QueryTiles<Tile>::template load<kKeys>(tile, x, block.place.batch,
                                               block.sequence.k_begin + j, block.kv_head,
                                               block.window.keys - j);
      }
      copies_commit();
    };
    const int begin = block.place.begin, queries = static_cast<int>(block.sequence.q_len);
    if (block.keys_begin < block.keys_end) {
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        QueryTiles<Tile>::template load<Tile::kRows>(
            i == 0 ? tiles.q : tiles.dout, i == 0 ? p.q : p.dout, block.place.batch,
            block.sequence.q_begin + begin, block.place.head, queries - begin);
      }
      load_keys(tiles.v, p.v, block.keys_begin);
      if constexpr (!Tile::kOneTile) load_keys(tiles.k, p.k, block.keys_begin);
    }
    const int first_row = begin + warp * 16 + lane / 4;
    float exponents[2] = {}, deltas[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = first_row + r * 8;
      if (i < queries && block.keys_begin < block.keys_end) {
        const int64_t at =
            (block.place.batch * p.problem.heads + block.place.head) * p.problem.q_len +
            block.sequence.q_begin + i;
        exponents[r] = p.exponents[at];
        deltas[r] = p.delta[at];
      }
    }

#pragma unroll 1
    for (int j0 = block.keys_begin; j0 < block.keys_end; j0 += kKeys) {
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
      multiply_transposed<T, Tile::kTerms, kDim>(
          s, FromShared<kDim>{q_at.fresh(), Tile::kQueryBytes},
          LaneAddress<kDim>(tiles.k, Patch::kSide), Tile::kKeyBytes);
      {
        const Window window = block.window;
        HeadScore score(p.change, block.place, block.operand_scale, window.offset);
        score.direct = bias;
        const int rows = static_cast<int>(block.sequence.q_len), row = block.place.begin;
        // In dq, rows after the last one are zeros, and give zeros.
        const bool masked = bias || j0 < window.first(min(row + Tile::kRows, rows) - 1) ||
                            j0 + kKeys > window.end(row);
        score_gradients<Tile>(s, dp, score, window, block.factors, p.change.plain, masked, rows,
                              first_row, j0, exponents, deltas);
      }
      if (bias) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[0][n][e] += dp[0][n][e] * block.ds_scale;
        }
      } else {
        Packed<T, Tile::kTerms, 1, kKeys> ds;
        ds.pack(dp);
        multiply_add<kDim>(sums, ds, LaneAddress<kDim>(tiles.k, Patch::kStacked).moved(columns_at),
                           Tile::kKeyBytes);
      }
      __syncthreads();
      load_keys(Tile::kOneTile ? tiles.v : tiles.k, Tile::kOneTile ? p.v : p.k, j0 + kKeys);
    }
    __syncthreads();
    if (threadIdx.x == 0) block.template next_place<Tile::kRows>();
    __syncthreads();
  } while (block.place.any);

  const BlockRows place = block.place;
  const float factor =
      bias ? 1.f
           : p.change.scale * block.ds_scale * scale_of<Tile>(p.k, place.batch, block.kv_head);
  put_sums<kDim>(tiles.q, sums, factor, warp * 16, columns_at);
  __syncthreads();
  if (bias) {
    write_bias<Tile>(p, block, shared);
  } else {
    p.dq.template write_tile<kDim, Tile::kRows, Tile::kThreads, Result::kFromFloats>(
        tiles.q, threadIdx.x, place.batch, block.sequence.q_begin + place.begin, place.head,
        static_cast<int>(block.sequence.q_len) - place.begin);
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    backward_queries(const __grid_constant__ Backward p) {
  if constexpr (kCompiled<Tile>) backward_queries_block<Tile>(p);
}

}  // namespace fk::cuda::attention
