// This file holds the parts of cuda/backward_keys.cuh: its tiles, how queries come in, and the
// products it has of its own.
#pragma once

#include "ops/attention/cuda/backward.cuh"

namespace fk::cuda::attention {

// Holds what a block of backward_keys works on. It lies in shared memory, because registers are
// short.
struct KeysBlock : Block {
  int queries;
  int i_begin, i_end;  // queries that see any of the block's keys
  // These belong to the sequence's first query and the group's first head.
  const uint16_t *q_rows, *dout_rows;
  int64_t statistics_at, dq_at;
  int whole_begin, whole_end;  // queries that see all of the block's keys
  float operand_scale, ds_scale, k_scale;
  uint32_t largest_value;  // as bits; while k and v are split
  GradientFactors factors;
};

// This is what every row of the table of tiles (backward_launch.cu) says. A row adds how the work
// is cut:
//   kKeyTiles  tiles of 16 keys that a warp owns
//   kKeyWarps  warps side by side over the keys
//   kSplit     warps with the same keys, that share the queries of S and dP and the columns of dk,
//   dv kQueries   queries of a step kPiece     of those that a warp has, how many it multiplies at
//   a time kStages    steps whose queries are in shared memory; 0: q takes the place of dout once
//   dp is there kBlocks    blocks that share a multiprocessor
template <class T_, int kTerms_, int kDim_, bool kFeatures_, int kParts_, Use kUse_>
struct BackwardRow {
  using T = T_;                                  // the operands' type
  static constexpr int kTerms = kTerms_;         // how many elements of it an operand is made of
  static constexpr int kDim = kDim_;             // columns of all tensors
  static constexpr bool kFeatures = kFeatures_;  // as ForwardRow::kFeatures
  // Says which gradients one launch makes: all, or dv apart where shared memory does not hold what
  // all need.
  static constexpr bool kWithValues = kParts_ & kValues, kWithKeys = kParts_ & kKeysAndQueries;
  static constexpr Use kUse = kUse_;  // the GPUs on which the host chooses this tile
};

// A tile is a row of the table with what follows from it.
template <class Row>
struct BackwardTile : Row {
  static constexpr int kWarps = Row::kKeyWarps * Row::kSplit;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kKeys = Row::kKeyTiles * Row::kKeyWarps * 16;
  static constexpr bool kInRegisters = Row::kSplit == 1;  // P and dS, for dv and dk
  // Shared memory holds the keys, the values if dk is wanted, P and dS, and stages of q and dout
  // with two statistics of each query.
  static constexpr int kKeyBytes = kKeys * Row::kDim * 2,
                       kQueryBytes = Row::kQueries * Row::kDim * 2;
  static constexpr int kScoreTiles =
      (Row::kWithKeys ? 1 : 0) + (Row::kWithValues && !kInRegisters ? 1 : 0);
  static constexpr int kScoreBytes = kKeys * Row::kQueries * 2;
  static constexpr bool kOneTile = Row::kStages == 0;
  static constexpr int kStatistics = Row::kTerms * (kOneTile ? 1 : 2) * kQueryBytes;  // in a stage
  static constexpr int kStageBytes = kStatistics + 2 * Row::kQueries * 4;
  static constexpr int kSharedBytes =
      Row::kTerms * ((Row::kWithKeys ? 2 : 1) * kKeyBytes + kScoreTiles * kScoreBytes) +
      (kOneTile ? 1 : Row::kStages) * kStageBytes + sizeof(KeysBlock);
  // dk and dv leave through the place of keys and values.
  static_assert(Row::kTerms * (Row::kWithKeys ? 2 : 1) * kKeyBytes >= kKeys * Row::kDim * 4);
  // A warp has these parts of S and dP, and of dk and dv. Where there are more warps than pieces of
  // 16 queries, some make the same S and dP, since registers must hold dk and dv.
  static constexpr int kWarpQueries =
      Row::kQueries / Row::kSplit < 16 ? 16 : Row::kQueries / Row::kSplit;
  static constexpr int kWarpColumns = Row::kDim / Row::kSplit;
  static_assert(kWarpQueries % Row::kPiece == 0 && Row::kPiece % 16 == 0);
  // For dq, warps stand side by side over rows, each with as square a piece as there is.
  static constexpr int kRowTiles = Row::kQueries >= 32 && kWarps > 1 ? 2 : 1;
  static constexpr int kRowWarps =
      Row::kQueries / (16 * kRowTiles) < kWarps ? Row::kQueries / (16 * kRowTiles) : kWarps;
  static constexpr int kColumnWarps = kWarps / kRowWarps;
  static_assert(kRowWarps * kRowTiles * 16 == Row::kQueries && kRowWarps * kColumnWarps == kWarps);
};

// Operands that are not scaled have constants here, because registers are short.
template <class Tile>
__device__ __forceinline__ float operand_scale(const KeysBlock& block) {
  return kScaledOperands<Tile> ? block.operand_scale : 1.f;
}
template <class Tile>
__device__ __forceinline__ GradientFactors step_factors(const KeysBlock& block) {
  return kScaledOperands<Tile> ? block.factors : GradientFactors{1.f, 1.f};
}

// Returns threadIdx.x. It is read anew where P and dS leave no registers to keep over a step what
// depends on it.
template <class Tile>
__device__ __forceinline__ unsigned step_thread() {
  return Tile::kInRegisters ? thread_index() : threadIdx.x;
}

// Says whether a result of 16 bits is bfloat16: as operands are, unless those had to be scaled.
template <class Tile>
__device__ __forceinline__ bool is_bfloat16(const Result& result) {
  return kScaledOperands<Tile> ? result.dtype == DType::kBFloat16
                               : std::is_same_v<typename Tile::T, __nv_bfloat16>;
}

// P or dS, transposed, serves as the left side of a product. Its rows begin with `row`.
template <class T_, int kTerms_, int kColumns>
struct ScoresFromShared : FromShared<kColumns> {
  using T = T_;
  static constexpr int kTerms = kTerms_, kSteps = kColumns / 16;

  __device__ __forceinline__ ScoresFromShared(uint32_t tile, int row, int term_bytes)
      : FromShared<kColumns>{{tile + row * kColumns * 2, Patch::kStacked}, term_bytes} {}
};

// Adds a^T b of one warp to out. The rows of both, over which it sums, lie in shared memory (a side
// by side, b stacked).
template <class T, int kTerms, int kSteps, int kLeftDim, int kDim, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void multiply_add_transposed(float (&out)[kRowTiles][kColumnTiles][4],
                                                        const LaneAddress<kLeftDim>& a_at,
                                                        int a_term_bytes,
                                                        const LaneAddress<kDim>& b_at,
                                                        int b_term_bytes) {
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    uint32_t a[kTerms][kRowTiles][4];
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        load_matrices_transposed(a[term][m], a_at.at(j * 16, m * 16) + term * a_term_bytes);
      }
    }
#pragma unroll
    for (int n = 0; n < kColumnTiles / 2; ++n) {
      uint32_t b[kTerms][4];
#pragma unroll
      for (int term = 0; term < kTerms; ++term) {
        load_matrices_transposed(b[term], b_at.at(j * 16, n * 16) + term * b_term_bytes);
      }
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if constexpr (kTerms == 2) {
            mma_16816(out[m][2 * n + h], a[0][m], b[1][2 * h], b[1][2 * h + 1], T());
            mma_16816(out[m][2 * n + h], a[1][m], b[0][2 * h], b[0][2 * h + 1], T());
          }
          mma_16816(out[m][2 * n + h], a[0][m], b[0][2 * h], b[0][2 * h + 1], T());
        }
      }
    }
  }
}

// Tells where a step's queries are read. This is found before a barrier, to be used after it.
template <class Tile>
struct Step {
  static constexpr int kPieces = Tile::kDim / 8;
  const uint16_t *q, *dout;  // of this thread, if operands are whole pieces of 16 bytes
  int64_t statistics_at;
  int valid;  // rows

  __device__ __forceinline__ Step(const Backward& p, const KeysBlock& block, int in_group, int i) {
    const int thread = thread_index();
    q = first(p.q, block.q_rows, in_group, i, thread);
    dout = first(p.dout, block.dout_rows, in_group, i, thread);
    statistics_at = block.statistics_at + in_group * p.problem.q_len + i;
    valid = block.queries - i;
  }
  __device__ __forceinline__ static const uint16_t* first(const Operand& x, const uint16_t* rows,
                                                          int in_group, int i, int thread) {
    rows += in_group * x.head + i * x.row;
    if constexpr (!Tile::kFeatures) {
      rows += thread / kPieces * x.row + thread % kPieces * 8;
    }
    return rows;
  }

  __device__ __forceinline__ void load(const Backward& p, uint32_t stage, bool with_q,
                                       bool with_dout) const {
    constexpr int kTerms = Tile::kTerms;
    const unsigned thread = step_thread<Tile>();
#pragma unroll(Tile::kFeatures ? 1 : 2 * kTerms)
    for (int i = with_q ? 0 : kTerms; i < (with_dout ? 2 : 1) * kTerms; ++i) {
      const Operand& x = i < kTerms ? p.q : p.dout;
      const uint16_t* from = (i < kTerms ? q : dout) + i % kTerms * x.low;
      const uint32_t tile = stage + (Tile::kOneTile ? i % kTerms : i) * Tile::kQueryBytes;
      if constexpr (Tile::kFeatures) {
        load_tile<Tile::kDim, Tile::kQueries, Tile::kThreads, kAnyStrides>(tile, x, from, valid);
      } else {
        copy_rows<Tile::kDim, Tile::kQueries, Tile::kThreads>(tile, x, from, thread, valid);
      }
    }
#pragma unroll
    for (int x0 = 0; x0 < 2 * Tile::kQueries; x0 += Tile::kThreads) {
      const int x = x0 + thread, row = x % Tile::kQueries;
      if (2 * Tile::kQueries % Tile::kThreads == 0 || x < 2 * Tile::kQueries) {
        copy_float(stage + Tile::kStatistics + x * 4,
                   (x < Tile::kQueries ? p.exponents : p.delta) + statistics_at + row, row < valid);
      }
    }
    copies_commit();
  }
};

}  // namespace fk::cuda::attention
