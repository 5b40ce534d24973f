// This is attention's forward on mma.sync: a block takes kRows queries of one head and walks along
// the keys they see, kKeys at a time, with the running maximum and sum of the softmax in registers.
//
// FLOPs: 4 Lq Lk D a head (half of it causal), three times that for two-term operands. Bytes: q, k,
// v and out once, if the queries of a head run together and k, v stay in L2.
//
// A warp owns 16 kRowTiles queries and all keys of a tile, so the softmax needs no shared memory
// and p goes from the one product to the other in registers. K of the next tile is copied while
// this one's p v is computed, V while its q k is. Tiles that nobody sees are not visited; those
// seen in part take the masking branch.
#pragma once

#include "ops/attention/cuda/scores.cuh"

namespace fk::cuda::attention {

struct Forward {
  Problem problem;
  Operand q, k, v;
  // Where blocks split two-term operands themselves, this is q as it is. Strides are those of `q`.
  const float* q_floats;
  Result out;
  View lse;  // data NULL: not wanted
  ScoreChange change;
  View sinks;
  DType sinks_dtype;
  int group;            // query heads a key head
  int tiles, together;  // see find_block_rows
};

struct ForwardBlock : Block {
  int keys_end;                // what the block's queries see, from keys_begin on
  int whole_begin, whole_end;  // what each of them sees
  const uint16_t *k_rows, *v_rows;
  float operand_scale;
};

// This is what every row of the table of tiles (forward_launch.cu) says, and what most rows leave
// as it is here. A row adds how the work is cut:
//   kRowTiles  tiles of 16 queries that a warp owns
//   kWarps     warps of a block
//   kKeys      keys that pass at a time
//   kBlocks    blocks that share a multiprocessor
template <class T_, int kTerms_, int kDim_, bool kFeatures_, Use kUse_>
struct ForwardRow {
  using T = T_;                           // the operands' type
  static constexpr int kTerms = kTerms_;  // how many elements of it an operand is made of
  static constexpr int kDim = kDim_;      // columns of q, k, v and out
  static constexpr Use kUse = kUse_;      // the GPUs on which the host chooses this tile
  static constexpr bool kFeatures =
      kFeatures_;  // whether the kernel takes more than a positive scale
                   // of scores, and operands not aligned to 16 bytes
  static constexpr bool kQueriesInRegisters = false;  // whether a warp keeps its queries there
  static constexpr int kSplit = 1;  // warps with the same queries, and the same p, that each have
                                    // their own columns of out
};

// A tile is a row of the table with what follows from it.
template <class Row>
struct ForwardTile : Row {
  static constexpr int kThreads = Row::kWarps * 32;
  static constexpr int kRowWarps = Row::kWarps / Row::kSplit;
  static constexpr int kRows = Row::kRowTiles * kRowWarps * 16;
  static constexpr int kWarpColumns = Row::kDim / Row::kSplit;
  // Shared memory holds the queries, a tile of keys and one of values, and a ForwardBlock.
  static constexpr int kQueryBytes = kRows * Row::kDim * 2, kKeyBytes = Row::kKeys * Row::kDim * 2;
  static constexpr int kTileBytes = Row::kTerms * (kQueryBytes + 2 * kKeyBytes);
  static constexpr int kSharedBytes = kTileBytes + sizeof(ForwardBlock);
};

// A maximum may grow by so much (as a power of two) before sums are brought to the new one: p stays
// below 2^kSlack, and the sums are seldom touched. Two-term p is as large as float16 allows, since
// its low term has to be, too.
constexpr float kSlack = 8.f;
template <class Tile>
constexpr float kLift = Tile::kTerms == 2 ? 7.f : 0.f;

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// A row's softmax has come to this, with the head's sink if there is one.
struct RowEnd {
  float highest;  // score, as an exponent of 2
  float sum;      // of 2^(score - highest + kLift)
  float factor;   // of out
  bool none;      // every score was -inf: out is 0, with or without a sink
};
template <class Tile>
__device__ __forceinline__ RowEnd end_row(const Forward& p, int head, float highest, float keys_sum,
                                          float factor) {
  float all = keys_sum;
  if (p.sinks.data != nullptr) {
    const float sink = load_as(p.sinks_dtype, p.sinks.data, head * p.sinks.head) * kLog2e;
    const float top = fmaxf(highest, sink);
    factor *= exp2_fast(highest - top);
    all = keys_sum * exp2_fast(highest - top) + exp2_fast(sink - top + kLift<Tile>);
    highest = top;
  }
  const bool none = keys_sum == 0.f;
  const float quotient = Tile::kTerms == 2 ? factor / all : __fdividef(factor, all);
  return {highest, all, none ? 0.f : quotient, none};
}

__device__ __forceinline__ float& lse_of_row(const Forward& p, const BlockRows& place,
                                             const Sequence& sequence, int i) {
  return static_cast<float*>(
      p.lse.data)[place.batch * p.lse.batch + (sequence.q_begin + i) * p.lse.row +
                  place.head * p.lse.head];
}

// Writes a warp's rows of 16 bits, 16 bytes at a time, with one address and stores that do not wait
// for each other. `at` is where the first row begins. The compiler would make four stores of each
// plain one.
template <int kDim, int kRows>
__device__ __forceinline__ void write_pieces(uint32_t tile, const Result& out, int64_t at, int lane,
                                             int valid) {
  constexpr int kPieces = kDim / 8, kStep = 32 / kPieces;
  const int column = lane % kPieces, first = lane / kPieces;
  uint16_t* to = static_cast<uint16_t*>(out.data) + at + first * out.row + column * 8;
  valid = column * 8 < out.columns ? valid - first : 0;
#pragma unroll 8
  for (int r = 0; r < kRows; r += kStep) {
    if (r < valid) {
      __stcg(reinterpret_cast<uint4*>(to), load_shared(piece<kDim>(tile, first + r, column)));
    }
    to += kStep * out.row;
  }
}

template <class Tile>
__device__ __forceinline__ void forward_block(const Forward& p) {
  using T = typename Tile::T;
  constexpr int kDim = Tile::kDim, kKeys = Tile::kKeys, kRowTiles = Tile::kRowTiles;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t q_tile = shared_address(shared);
  const uint32_t k_tile = q_tile + Tile::kTerms * Tile::kQueryBytes;
  const uint32_t v_tile = k_tile + Tile::kTerms * Tile::kKeyBytes;

  // Registers are short in the loop: what is needed only at a mask and at the end waits here.
  ForwardBlock& block = *reinterpret_cast<ForwardBlock*>(shared + Tile::kTileBytes);

  const auto load_keys = [&](uint32_t tile, const Operand& x, const uint16_t* rows, int j,
                             int keys) {
#pragma unroll(Tile::kFeatures ? 1 : Tile::kTerms)
    for (int term = 0; term < Tile::kTerms; ++term) {
      load_tile<kDim, kKeys, Tile::kThreads, Tile::kFeatures>(
          tile + term * Tile::kKeyBytes, x, rows + j * x.row + term * x.low, keys - j);
    }
    copies_commit();
  };

  int keys_begin;
  {
    const BlockRows place = find_block_rows<Tile::kRows, Owned::kQueries>(
        p.problem, p.tiles, static_cast<int>(p.problem.heads), p.together,
        p.problem.mask.right < Mask::kUnlimited);
    if (!place.any) return;
    const Sequence sequence = p.problem.sequence(place.b);
    const int queries = static_cast<int>(sequence.q_len);
    const Window window(p.problem.mask, sequence);
    const int last_row = min(place.begin + Tile::kRows, queries) - 1;
    if (last_row < place.begin) return;
    keys_begin = window.first(place.begin) / kKeys * kKeys;
    const int kv_head = p.group == 1 ? place.head : place.head / p.group;
    const int keys_end = window.end(last_row);
    const uint16_t* k_rows = p.k.at(place.batch, sequence.k_begin, kv_head);
    float q_scale;
    if (Tile::kTerms == 2 && p.q_floats != nullptr) {
      q_scale = power_of_two(
          split_tile<kDim, Tile::kRows, Tile::kThreads>(
              q_tile, p.q,
              p.q_floats + p.q.offset(place.batch, sequence.q_begin + place.begin, place.head),
              queries - place.begin)
              .exponent);
    } else {
      const uint16_t* q_rows = p.q.at(place.batch, sequence.q_begin + place.begin, place.head);
#pragma unroll(Tile::kFeatures ? 1 : Tile::kTerms)
      for (int term = 0; term < Tile::kTerms; ++term) {
        load_tile<kDim, Tile::kRows, Tile::kThreads, Tile::kFeatures>(
            q_tile + term * Tile::kQueryBytes, p.q, q_rows + term * p.q.low, queries - place.begin);
      }
      copies_commit();
      q_scale = p.q.scale(place.batch, kv_head);
    }
    if (keys_begin < keys_end) load_keys(k_tile, p.k, k_rows, keys_begin, window.keys);
    // This comes after the copies, which take longer.
    if (threadIdx.x == 0) {
      block = {{place, sequence, window},
               keys_end,
               window.first(last_row),
               window.end(place.begin),
               k_rows,
               p.v.at(place.batch, sequence.k_begin, kv_head),
               product_scale(q_scale, p.k.scale(place.batch, kv_head))};
    }
  }
  __syncthreads();

  const int row_warp = threadIdx.x / 32 % Tile::kRowWarps;
  const LaneAddress<kDim> q_at(q_tile + row_warp * kRowTiles * 16 * kDim * 2, Patch::kStacked);
  const LaneAddress<kDim> k_at(k_tile, Patch::kSide);
  const LaneAddress<kDim> v_at =
      LaneAddress<kDim>(v_tile, Patch::kStacked)
          .moved(threadIdx.x / 32 / Tile::kRowWarps * Tile::kWarpColumns);

  // Scores times this are exponents of 2, and so are products where scores are only scaled.
  const bool plain = !Tile::kFeatures || p.change.plain;
  const float exponent = kLog2e * (plain ? p.change.scale * block.operand_scale : 1.f);

  float out[kRowTiles][Tile::kWarpColumns / 8][4] = {};
  float maximum[kRowTiles][2], sum[kRowTiles][2];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    maximum[m][0] = maximum[m][1] = -INFINITY;
    sum[m][0] = sum[m][1] = 0.f;
  }
  FromRegisters<Tile::kQueriesInRegisters ? kDim : 16, Tile::kTerms, kRowTiles> q_fragments;
  if constexpr (Tile::kQueriesInRegisters) {
    copies_wait<0>();
    __syncthreads();
    q_fragments.load({q_at, Tile::kQueryBytes});
  }

#pragma unroll 1
  for (int j0 = keys_begin; j0 < block.keys_end; j0 += kKeys) {
    copies_wait<0>();
    __syncthreads();
    load_keys(v_tile, p.v, block.v_rows, j0, block.window.keys);

    float s[kRowTiles][kKeys / 8][4];
    if constexpr (Tile::kQueriesInRegisters) {
      multiply_transposed<T, Tile::kTerms, kDim>(s, q_fragments, k_at.fresh(), Tile::kKeyBytes);
    } else {
      multiply_transposed<T, Tile::kTerms, kDim>(
          s, FromShared<kDim, Tile::kTerms == 1>{q_at.fresh(), Tile::kQueryBytes}, k_at.fresh(),
          Tile::kKeyBytes);
    }

    const bool masked = j0 < block.whole_begin || j0 + kKeys > block.whole_end;
    if (!plain || masked) {
      const Window window = block.window;
      const int thread = thread_index();
      const int first_row =
          block.place.begin + thread / 32 % Tile::kRowWarps * kRowTiles * 16 + thread % 32 / 4;
      const int first_key = j0 + thread % 4 * 2;
      const int queries = static_cast<int>(block.sequence.q_len);
      if constexpr (Tile::kFeatures) {
        if (!plain) {
          const HeadScore score(p.change, block.place, block.operand_scale, window.offset);
          change_scores<Tile::kTerms == 1, true, false>(score, s, s, first_row, first_key, queries,
                                                        window.keys);
        }
      }
      if (masked) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int i = first_row + m * 16 + r * 8;
            const int first = window.first(i), end = i < queries ? window.end(i) : 0;
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
              for (int c = 0; c < 2; ++c) {
                const int j = first_key + n * 8 + c;
                if (j < first || j >= end) s[m][n][2 * r + c] = -INFINITY;
              }
            }
          }
        }
      }
    }

    copies_wait<0>();
    __syncthreads();
    if (j0 + kKeys < block.keys_end) {
      load_keys(k_tile, p.k, block.k_rows, j0 + kKeys, block.window.keys);
    }

    float larger[kRowTiles][2];
    bool grew = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float x = maximum[m][r];
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
          x = fmaxf(x, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
        }
        larger[m][r] = quad_max(x);
        grew = grew || (larger[m][r] - maximum[m][r]) * exponent > kSlack;
      }
    }
    if (__any_sync(0xffffffffu, grew)) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float base = larger[m][r] == -INFINITY ? 0.f : larger[m][r];
          const float factor = exp2_fast((maximum[m][r] - base) * exponent);
          maximum[m][r] = larger[m][r];
          sum[m][r] *= factor;
#pragma unroll
          for (int n = 0; n < Tile::kWarpColumns / 8; ++n) {
            out[m][n][2 * r] *= factor;
            out[m][n][2 * r + 1] *= factor;
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float base =
            maximum[m][r] == -INFINITY ? 0.f : kLift<Tile> - maximum[m][r] * exponent;
        float tile_sum = 0.f;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int e = 2 * r; e < 2 * r + 2; ++e) {
            s[m][n][e] = exp2_fast(fmaf(s[m][n][e], exponent, base));
            tile_sum += s[m][n][e];
          }
        }
        sum[m][r] += tile_sum;
      }
    }
    Packed<T, Tile::kTerms, kRowTiles, kKeys> weights;
    weights.pack(s);
    multiply_add<kDim>(out, weights, v_at.fresh(), Tile::kKeyBytes);
  }

  const BlockRows place = block.place;
  const Sequence sequence = block.sequence;
  const int thread = Tile::kTerms == 2 ? thread_index() : static_cast<int>(threadIdx.x);
  const int warp = thread / 32 % Tile::kRowWarps, lane = thread % 32;
  const int columns_at = Tile::kSplit == 1 ? 0 : thread / 32 / Tile::kRowWarps * Tile::kWarpColumns;
  const int first_row = place.begin + warp * kRowTiles * 16 + lane / 4;
  const int kv_head = place.head / p.group;
  const float value_scale = p.v.scale(place.batch, kv_head);
  copies_wait<0>();
  __syncthreads();
  float factor[kRowTiles][2];
  RowEnd mine = {};  // each lane of a quad has one of its rows
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const RowEnd end =
          end_row<Tile>(p, place.head, maximum[m][r] * exponent, quad_sum(sum[m][r]), value_scale);
      factor[m][r] = end.factor;
      if (lane % 4 == 2 * m + r) mine = end;
    }
  }
  const int i = first_row + lane % 4 * 8;
  // Where warps share rows, the one with the first columns writes for all.
  const bool writes_lse = p.lse.data != nullptr && columns_at == 0;
  if (writes_lse && lane % 4 < 2 * kRowTiles && i < sequence.q_len) {
    const float power = Tile::kTerms == 2 ? log2f(mine.sum) - kLift<Tile> : log2_fast(mine.sum);
    lse_of_row(p, place, sequence, i) = mine.none ? -INFINITY : (mine.highest + power) * kLn2;
  }
  if (p.out.data == nullptr) return;
  // out leaves through the place of the warp's own queries, 16 bytes a thread.
  const uint32_t stage = shared_address(shared) + warp * kRowTiles * 16 * kDim * 2 * Tile::kTerms;
  const bool bfloat16 = std::is_same_v<T, __nv_bfloat16> || p.out.dtype == DType::kBFloat16;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = m * 16 + r * 8;  // and lane / 4
#pragma unroll
      for (int n = 0; n < Tile::kWarpColumns / 8; ++n) {
        const float x = out[m][n][2 * r] * factor[m][r], y = out[m][n][2 * r + 1] * factor[m][r];
        const int column = columns_at + n * 8;
        if constexpr (Tile::kTerms == 2) {
          store_shared(float_place<kDim>(stage, row + lane / 4, column + lane % 4 * 2), x, y);
        } else {
          store_shared(piece<kDim>(stage, lane / 4, column / 8) + row * (kDim * 2) + lane % 4 * 4,
                       bfloat16 ? pack_pair<__nv_bfloat16>(x, y) : pack_pair<__half>(x, y));
        }
      }
    }
  }
  if constexpr (Tile::kSplit == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
  const int first = place.begin + warp * kRowTiles * 16;
  const int valid = static_cast<int>(sequence.q_len) - first;
  if constexpr (Tile::kTerms == 1 && Tile::kSplit == 1) {
    if (p.out.vectors) {
      write_pieces<kDim, kRowTiles * 16>(
          stage, p.out, p.out.at(place.batch, sequence.q_begin + first, place.head), lane, valid);
      return;
    }
  }
  p.out.template write_tile<kDim, kRowTiles * 16, 32 * Tile::kSplit, Tile::kTerms == 2>(
      stage, columns_at / Tile::kWarpColumns * 32 + lane, place.batch, sequence.q_begin + first,
      place.head, valid);
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    forward(const __grid_constant__ Forward p) {
  // sm_90 runs what is compiled for sm_80 (LIKE_80 in build.cmake).
  static_assert(Tile::kUse != Use::kHopper);
  if constexpr (kCompiled<Tile>) forward_block<Tile>(p);
}

}  // namespace fk::cuda::attention
