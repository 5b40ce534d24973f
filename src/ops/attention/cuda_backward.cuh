// Attention's backward on mma.sync. With P = exp(s - lse), dP = dout v^T, delta = rowsum(dout out)
// - dlse and dS = P (dP - delta):
//   dv = P^T dout,  dk = scale dS^T q,  dq = scale dS k,  dbias = dS, summed where bias repeats.
//
// FLOPs: 5 products of 2 Lq Lk D a head (half of it causal), three times that for two-term
// operands. Bytes: the tensors once, and dq's float32 sums added to once per tile of keys.
//
// backward_keys: a block takes kKeys keys of a key head and walks along the queries that see them,
// of all query heads that share it, so dk and dv need no atomics. Its warps share the keys and,
// kSplit of them with the same keys, the queries of S and dP and the columns of dk and dv: a piece
// of a product that is about square needs the fewest reads from shared memory, which is what the
// kernel spends its time on. P and dS therefore go through shared memory. dq is added up in float32
// by atomics.
// backward_queries: a block takes queries and walks along the keys, as the forward does: dq without
// atomics, for 7 products in all.
// backward_bias: a block takes a tile of bias and walks along all that it is repeated over.
#pragma once

#include "ops/attention/cuda_scores.cuh"

namespace fk::cuda::attention {

struct Backward {
  Problem problem;
  Operand q, k, v, dout;
  // (batch, heads, queries): lse / ln 2 (inf where it was -inf: such rows have no gradients),
  // delta.
  const float *exponents, *delta;
  const uint32_t* delta_maxima;  // as Operand::maxima; NULL: not scaled
  ScoreChange change;
  bool plain;  // scores are only scaled
  Result dq, dk, dv;
  float* dq_sums;  // (batch, queries, heads, dq_columns); NULL: not wanted here
  int64_t dq_columns;
  int group;  // query heads a key head
  int tiles;

  Result dbias;                 // (batch, head, row: query; column: key), with strides of 0
  int bias_queries, bias_keys;  // 1 where repeated
  int64_t bias_batch, bias_heads;
};

enum BackwardParts { kValues = 1, kKeysAndQueries = 2, kAllParts = 3 };

// How dS is made from products of scaled operands: what they are multiplied with.
struct GradientFactors {
  float dp, delta;
};

// What a block of backward_keys works on; kept in shared memory, registers are short.
struct KeysBlock : Block {
  int queries;
  int i_begin, head_steps;     // tiles of queries: the first, and how many of a head
  int whole_begin, whole_end;  // queries that see all of the block's keys
  float operand_scale, ds_scale;
  GradientFactors factors;
};

// kParts: all in one, or (where shared memory does not hold it all at once) one by one. kStages 0:
// q takes the place of dout once dp is there.
template <class T_, int kTerms_, int kDim_, int kKeyTiles_, int kKeyWarps_, int kSplit_,
          int kQueries_, int kStages_, int kBlocks_, int kParts_, bool kFeatures_, Use kUse_>
struct BackwardTile {
  using T = T_;
  static constexpr int kTerms = kTerms_, kDim = kDim_, kKeyTiles = kKeyTiles_,
                       kKeyWarps = kKeyWarps_, kSplit = kSplit_, kQueries = kQueries_,
                       kStages = kStages_, kBlocks = kBlocks_;
  static constexpr bool kWithValues = kParts_ & kValues, kWithKeys = kParts_ & kKeysAndQueries,
                        kFeatures = kFeatures_;
  static constexpr Use kUse = kUse_;
  static constexpr int kWarps = kKeyWarps * kSplit;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kKeys = kKeyTiles * kKeyWarps * 16;
  static constexpr int kKeyBytes = kKeys * kDim * 2, kQueryBytes = kQueries * kDim * 2;
  static constexpr int kScoreBytes = kKeys * kQueries * 2;
  static constexpr bool kOneTile = kStages == 0;
  static constexpr int kStageBytes = kTerms * (kOneTile ? 1 : 2) * kQueryBytes + 2 * kQueries * 4;
  static constexpr int kSharedBytes =
      kTerms * ((kWithKeys ? 2 : 1) * kKeyBytes +
                ((kWithKeys ? 1 : 0) + (kWithValues ? 1 : 0)) * kScoreBytes) +
      (kOneTile ? 1 : kStages) * kStageBytes + sizeof(KeysBlock);
  // What a warp has of S and dP, and of dk and dv.
  static constexpr int kWarpQueries = kQueries / kSplit, kWarpColumns = kDim / kSplit;
  static_assert(kWarpQueries % 16 == 0);
  // dq: warps side by side over rows, each with as square a piece as there is.
  static constexpr int kRowTiles = kQueries >= 32 && kWarps > 1 ? 2 : 1;
  static constexpr int kRowWarps =
      kQueries / (16 * kRowTiles) < kWarps ? kQueries / (16 * kRowTiles) : kWarps;
  static constexpr int kColumnWarps = kWarps / kRowWarps;
  static_assert(kRowWarps * kRowTiles * 16 == kQueries && kRowWarps * kColumnWarps == kWarps);
};

// P is lifted to fill float16 where it has a low term.
template <class Tile>
constexpr int kProbabilityLift = Tile::kTerms == 2 ? 14 : 0;

// dS is stored divided by this, in float16: a bound of it that is not too far away.
__device__ __forceinline__ float score_gradient_scale(const Backward& p, int64_t batch,
                                                      int kv_head) {
  if (p.delta_maxima == nullptr) return 1.f;
  const float product = p.dout.scale(batch, kv_head) * p.v.scale(batch, kv_head) * 1073741824.f *
                        static_cast<float>(p.v.columns);
  const float delta = __uint_as_float(p.delta_maxima[batch * p.problem.kv_heads + kv_head]);
  return scale_of(__float_as_uint(product + delta));
}

template <class Tile>
__device__ __forceinline__ GradientFactors gradient_factors(const Backward& p, int64_t batch,
                                                            int kv_head, float ds_scale) {
  const float lift = 1.f / static_cast<float>(1 << kProbabilityLift<Tile>);
  return {p.dout.scale(batch, kv_head) * p.v.scale(batch, kv_head) / ds_scale * lift,
          lift / ds_scale};
}

// Two neighbours of a tile, term by term.
template <class T, int kTerms>
__device__ __forceinline__ void store_terms(uint32_t at, int term_bytes, const float (&pair)[2]) {
  const uint32_t high = pack_pair<T>(pair[0], pair[1]);
  store_shared(at, high);
  if constexpr (kTerms == 2) store_shared(at + term_bytes, pack_rest(pair[0], pair[1], high));
}

// P or dS, transposed, as the left side of a product: kRowTiles of its rows from `row` on.
template <class T_, int kTerms_, int kRowTiles_, int kColumns>
struct ScoresFromShared {
  using T = T_;
  static constexpr int kTerms = kTerms_, kSteps = kColumns / 16;
  LaneAddress<kColumns> at;
  int term_bytes;

  __device__ __forceinline__ ScoresFromShared(uint32_t tile, int row, int bytes)
      : at(tile + row * kColumns * 2, Patch::kStacked), term_bytes(bytes) {}
  __device__ __forceinline__ void get(uint32_t (&a)[kTerms][kRowTiles_][4], int step) const {
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
#pragma unroll
      for (int m = 0; m < kRowTiles_; ++m) {
        load_matrices(a[term][m], at.at(m * 16, step * 16) + term * term_bytes);
      }
    }
  }
};

// out += a^T b of one warp: rows of both, those summed over, lie in shared memory (a side, b
// stacked).
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

template <class Tile>
__device__ __forceinline__ void backward_keys_block(const Backward& p) {
  using T = typename Tile::T;
  constexpr int kDim = Tile::kDim, kKeys = Tile::kKeys, kQueries = Tile::kQueries,
                kTerms = Tile::kTerms, kKeyTiles = Tile::kKeyTiles;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t k_tile = shared_address(shared);
  const uint32_t v_tile = k_tile + kTerms * Tile::kKeyBytes;
  const uint32_t ds_tile = v_tile + (Tile::kWithKeys ? kTerms * Tile::kKeyBytes : 0);
  const uint32_t p_tile = ds_tile + (Tile::kWithKeys ? kTerms * Tile::kScoreBytes : 0);
  const uint32_t stages = p_tile + (Tile::kWithValues ? kTerms * Tile::kScoreBytes : 0);

  KeysBlock& block = *reinterpret_cast<KeysBlock*>(shared + Tile::kSharedBytes - sizeof(KeysBlock));
  constexpr int kStages = Tile::kOneTile ? 1 : Tile::kStages;
  constexpr int kStatistics = Tile::kStageBytes - 2 * kQueries * 4;  // where they begin in a stage

  const int group = p.group;
  {
    const Place place =
        find_place<kKeys, false>(p.problem, p.tiles, static_cast<int>(p.problem.kv_heads), false);
    if (!place.any) return;
    const Sequence sequence = p.problem.sequence(place.b);
    const Window window(p.problem.mask, sequence);
    const int queries = static_cast<int>(sequence.q_len);
    const int last_key = min(place.begin + kKeys, window.keys) - 1;
    if (last_key < place.begin) return;
    if (threadIdx.x == 0) {
      const int i_begin = window.first_query(place.begin) / kQueries * kQueries;
      const int i_end = window.end_query(last_key, queries);
      const float ds_scale = score_gradient_scale(p, place.batch, place.head);
      block = {{place, sequence, window},
               queries,
               i_begin,
               i_end > i_begin ? (i_end - i_begin + kQueries - 1) / kQueries : 0,
               window.first_query(last_key),
               last_key + 1 == place.begin + kKeys ? window.end_query(place.begin, queries) : 0,
               p.q.scale(place.batch, place.head) * p.k.scale(place.batch, place.head),
               ds_scale,
               gradient_factors<Tile>(p, place.batch, place.head, ds_scale)};
    }
  }
  __syncthreads();
  const int steps = block.head_steps * group;

  const auto load_keys = [&](uint32_t tile, const Operand& x) {
    const uint16_t* rows =
        x.at(block.place.batch, block.sequence.k_begin + block.place.begin, block.place.head);
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
      load_tile<kDim, kKeys, Tile::kThreads, Tile::kFeatures>(
          tile + term * Tile::kKeyBytes, x, rows + term * x.low,
          block.window.keys - block.place.begin);
    }
  };
  const auto load_queries = [&](int step, bool with_q, bool with_dout) {
    const int in_group = step / block.head_steps;
    const int head = block.place.head * group + in_group;
    const int i = block.i_begin + (step - in_group * block.head_steps) * kQueries;
    const uint32_t stage = stages + (step % kStages) * Tile::kStageBytes;
#pragma unroll
    for (int operand = 0; operand < 2; ++operand) {
      if (operand == 0 ? !with_q : !with_dout) continue;
      const Operand& x = operand == 0 ? p.q : p.dout;
      const int tile = Tile::kOneTile ? 0 : operand;
      const uint16_t* rows = x.at(block.place.batch, block.sequence.q_begin + i, head);
#pragma unroll
      for (int term = 0; term < kTerms; ++term) {
        load_tile<kDim, kQueries, Tile::kThreads, Tile::kFeatures>(
            stage + (tile * kTerms + term) * Tile::kQueryBytes, x, rows + term * x.low,
            block.queries - i);
      }
    }
    const int64_t at =
        (block.place.batch * p.problem.heads + head) * p.problem.q_len + block.sequence.q_begin + i;
    const uint32_t statistics = stage + kStatistics;
    for (int x = threadIdx.x; x < 2 * kQueries; x += Tile::kThreads) {
      const int row = x % kQueries;
      const bool in = i + row < block.queries;
      copy_float(statistics + x * 4, (x < kQueries ? p.exponents : p.delta) + (in ? at + row : 0),
                 in);
    }
    copies_commit();
  };

  load_keys(k_tile, p.k);
  if constexpr (Tile::kWithKeys) load_keys(v_tile, p.v);
  if (steps > 0) load_queries(0, !Tile::kOneTile, true);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int key_at = warp % Tile::kKeyWarps * kKeyTiles * 16;  // this warp's first key
  const int part = warp / Tile::kKeyWarps;
  const int query_at = part * Tile::kWarpQueries;
  const LaneAddress<kDim> k_at(k_tile + key_at * kDim * 2, Patch::kStacked);
  const LaneAddress<kDim> v_at(v_tile + key_at * kDim * 2, Patch::kStacked);
  constexpr int kWarpQueries = Tile::kWarpQueries, kWarpColumns = Tile::kWarpColumns;
  float dk[Tile::kWithKeys ? kKeyTiles : 1][kWarpColumns / 8][4] = {};
  float dv[Tile::kWithValues ? kKeyTiles : 1][kWarpColumns / 8][4] = {};

#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    copies_wait<0>();
    __syncthreads();
    if (kStages == 2 && step + 1 < steps) load_queries(step + 1, true, true);
    const uint32_t stage = stages + (step % kStages) * Tile::kStageBytes;
    const uint32_t q_tile = stage;
    const uint32_t dout_tile = stage + (Tile::kOneTile ? 0 : kTerms * Tile::kQueryBytes);
    const uint8_t* statistics = shared + (stage - k_tile) + kStatistics;
    const int in_group = step / block.head_steps;
    const int i0 = block.i_begin + (step - in_group * block.head_steps) * kQueries;

    // Columns are queries here.
    float dp[Tile::kWithKeys ? kKeyTiles : 1][kWarpQueries / 8][4];
    if constexpr (Tile::kWithKeys) {
      multiply_transposed<T, kTerms, kDim>(
          dp, FromShared<kDim>{v_at.fresh(), Tile::kKeyBytes},
          LaneAddress<kDim>(dout_tile + query_at * kDim * 2, Patch::kSide), Tile::kQueryBytes);
    }
    if constexpr (Tile::kOneTile) {
      static_assert(!Tile::kWithValues);
      __syncthreads();
      load_queries(step, true, false);
      copies_wait<0>();
      __syncthreads();
    }
    float s[kKeyTiles][kWarpQueries / 8][4];
    multiply_transposed<T, kTerms, kDim>(
        s, FromShared<kDim>{k_at.fresh(), Tile::kKeyBytes},
        LaneAddress<kDim>(q_tile + query_at * kDim * 2, Patch::kSide), Tile::kQueryBytes);
    if (!Tile::kFeatures && (i0 < block.whole_begin || i0 + kQueries > block.whole_end)) {
      const Window window = block.window;
#pragma unroll
      for (int n = 0; n < kWarpQueries / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int i = i0 + query_at + n * 8 + lane % 4 * 2 + c;
          const int first = window.first(i), end = i < block.queries ? window.end(i) : 0;
#pragma unroll
          for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const int j = block.place.begin + key_at + m * 16 + lane / 4 + r * 8;
              if (j < first || j >= end) s[m][n][2 * r + c] = -INFINITY;
            }
          }
        }
      }
    }
    const float exponent = p.change.scale * kLog2e * block.operand_scale;
    const GradientFactors factors = block.factors;
    // A group's heads differ in slope and bias.
    Place query_place = block.place;
    query_place.head = query_place.head * group + in_group;
    const HeadScore score(p.change, query_place, block.operand_scale, block.window.offset);
#pragma unroll
    for (int n = 0; n < kWarpQueries / 8; ++n) {
      const int column = query_at + n * 8 + lane % 4 * 2;
      const float2 row_exponents = *reinterpret_cast<const float2*>(statistics + column * 4);
      const float2 row_delta =
          *reinterpret_cast<const float2*>(statistics + (kQueries + column) * 4);
      const float bases[2] = {kProbabilityLift<Tile> - row_exponents.x,
                              kProbabilityLift<Tile> - row_exponents.y};
      const float deltas[2] = {row_delta.x * factors.delta, row_delta.y * factors.delta};
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float probabilities[2], gradients[2];
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float change = 1.f;
            if constexpr (Tile::kFeatures) {
              const int i = i0 + column + c;
              const int j = block.place.begin + key_at + m * 16 + lane / 4 + r * 8;
              float squeezed = 0.f;
              probabilities[c] = 0.f;
              if (i < block.queries && block.window.sees(i, j)) {
                probabilities[c] =
                    exp2_approx(fmaf(score(s[m][n][2 * r + c], i, j, &squeezed), kLog2e, bases[c]));
              }
              change = 1.f - squeezed * squeezed;
            } else {
              probabilities[c] = exp2_approx(fmaf(s[m][n][2 * r + c], exponent, bases[c]));
            }
            if constexpr (Tile::kWithKeys) {
              gradients[c] =
                  probabilities[c] * change * fmaf(dp[m][n][2 * r + c], factors.dp, -deltas[c]);
            }
          }
          const int row = key_at + m * 16 + lane / 4 + r * 8;
          const uint32_t at = piece<kQueries>(0, row, query_at / 8 + n) + lane % 4 * 4;
          if constexpr (Tile::kWithValues) {
            store_terms<T, kTerms>(p_tile + at, Tile::kScoreBytes, probabilities);
          }
          if constexpr (Tile::kWithKeys) {
            store_terms<T, kTerms>(ds_tile + at, Tile::kScoreBytes, gradients);
          }
        }
      }
    }
    __syncthreads();

    if constexpr (Tile::kWithValues) {
      multiply_add<kDim>(
          dv, ScoresFromShared<T, kTerms, kKeyTiles, kQueries>(p_tile, key_at, Tile::kScoreBytes),
          LaneAddress<kDim>(dout_tile, Patch::kStacked).moved(part * kWarpColumns),
          Tile::kQueryBytes);
    }
    if constexpr (Tile::kWithKeys) {
      multiply_add<kDim>(
          dk, ScoresFromShared<T, kTerms, kKeyTiles, kQueries>(ds_tile, key_at, Tile::kScoreBytes),
          LaneAddress<kDim>(q_tile, Patch::kStacked).moved(part * kWarpColumns), Tile::kQueryBytes);
    }
    if (kStages == 1) {
      __syncthreads();
      if (step + 1 < steps) load_queries(step + 1, !Tile::kOneTile, true);
    }

    if constexpr (Tile::kWithKeys) {
      if (p.dq_sums != nullptr) {
        // As many columns at a time as there are registers beside dk and dv.
        constexpr int kMost = kTerms == 2 ? 32 : 64;
        constexpr int kAll = kDim / Tile::kColumnWarps, kColumns = kAll < kMost ? kAll : kMost;
        const int row_warp = warp % Tile::kRowWarps, column_warp = warp / Tile::kRowWarps;
        const int rows_at = row_warp * Tile::kRowTiles * 16;
        const Place place = block.place;
        const float factor = p.change.scale * block.ds_scale * p.k.scale(place.batch, place.head);
        const int head = place.head * group + in_group;
#pragma unroll 1
        for (int chunk = 0; chunk < kAll / kColumns; ++chunk) {
          const int columns_at = column_warp * kAll + chunk * kColumns;
          float dq[Tile::kRowTiles][kColumns / 8][4] = {};
          multiply_add_transposed<T, kTerms, kKeys / 16>(
              dq, LaneAddress<kQueries>(ds_tile, Patch::kSide).moved(rows_at), Tile::kScoreBytes,
              LaneAddress<kDim>(k_tile, Patch::kStacked).moved(columns_at), Tile::kKeyBytes);
#pragma unroll
          for (int m = 0; m < Tile::kRowTiles; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const int i = i0 + rows_at + m * 16 + r * 8 + lane / 4;
              if (i >= block.queries) continue;
              float* row =
                  p.dq_sums +
                  ((place.batch * p.problem.q_len + block.sequence.q_begin + i) * p.problem.heads +
                   head) *
                      p.dq_columns;
#pragma unroll
              for (int n = 0; n < kColumns / 8; ++n) {
                const int column = columns_at + n * 8 + lane % 4 * 2;
                if (column < p.dq_columns) {
                  add_pair(row + column, dq[m][n][2 * r] * factor, dq[m][n][2 * r + 1] * factor);
                }
              }
            }
          }
        }
      }
    }
  }

  const Place place = block.place;
  const Sequence sequence = block.sequence;
  const float dk_factor = p.change.scale * block.ds_scale * p.q.scale(place.batch, place.head);
  const float dv_factor =
      p.dout.scale(place.batch, place.head) / static_cast<float>(1 << kProbabilityLift<Tile>);
#pragma unroll
  for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int j = place.begin + key_at + m * 16 + r * 8 + lane / 4;
      if (j >= sequence.k_len) continue;
      if constexpr (Tile::kWithKeys) {
        if (p.dk.data != nullptr) {
          const int64_t at = p.dk.at(place.batch, sequence.k_begin + j, place.head);
#pragma unroll
          for (int n = 0; n < kWarpColumns / 8; ++n) {
            p.dk.store_pair(at, part * kWarpColumns + n * 8 + lane % 4 * 2,
                            dk[m][n][2 * r] * dk_factor, dk[m][n][2 * r + 1] * dk_factor);
          }
        }
      }
      if constexpr (Tile::kWithValues) {
        if (p.dv.data != nullptr) {
          const int64_t at = p.dv.at(place.batch, sequence.k_begin + j, place.head);
#pragma unroll
          for (int n = 0; n < kWarpColumns / 8; ++n) {
            p.dv.store_pair(at, part * kWarpColumns + n * 8 + lane % 4 * 2,
                            dv[m][n][2 * r] * dv_factor, dv[m][n][2 * r + 1] * dv_factor);
          }
        }
      }
    }
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    backward_keys(const __grid_constant__ Backward p) {
  if constexpr (kCompiled<Tile>) backward_keys_block<Tile>(p);
}

}  // namespace fk::cuda::attention
