// This is the kernel of attention's backward that makes dk, dv and, by atomics, dq: see
// cuda/backward.cuh.
#pragma once

#include "cuda/dependent_launch.cuh"
#include "ops/attention/cuda/backward_tiles.cuh"

namespace fk::cuda::attention {

// Splits the block's k and v into two terms, and sets in `block` what depends on their scales.
template <class Tile>
__device__ __forceinline__ void split_block(const Backward& p, KeysBlock& block, uint32_t k_tile,
                                            uint32_t v_tile) {
  const BlockRows place = block.place;
  const int64_t row = block.sequence.k_begin + place.begin;
  const int valid = block.window.keys - place.begin;
  const auto split = [&](uint32_t tile, const Operand& x, const float* floats) {
    return split_tile<Tile::kDim, Tile::kKeys, Tile::kThreads>(
        tile, x, floats + x.offset(place.batch, row, place.head), valid);
  };
  const int k_exponent = split(k_tile, p.k, p.k_floats).exponent;
  const TileScale v = split(v_tile, p.v, p.v_floats);
  atomicMax(&block.largest_value, __reduce_max_sync(0xffffffffu, v.magnitude));
  __syncthreads();
  if (threadIdx.x == 0) {
    block.k_scale = power_of_two(k_exponent);
    block.operand_scale =
        product_scale(p.q.scale(place.batch, place.head), power_of_two(k_exponent));
    block.ds_scale =
        score_gradient_scale(p, place.batch, place.head, __uint_as_float(block.largest_value));
    block.factors = gradient_factors<Tile>(
        p.dout.scale(place.batch, place.head) * power_of_two(v.exponent), block.ds_scale);
  }
}

template <class Tile>
__device__ __forceinline__ void backward_keys_block(const Backward& p) {
  using T = typename Tile::T;
  constexpr int kDim = Tile::kDim, kKeys = Tile::kKeys, kQueries = Tile::kQueries,
                kTerms = Tile::kTerms, kKeyTiles = Tile::kKeyTiles, kPiece = Tile::kPiece;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t k_tile = shared_address(shared);
  const uint32_t v_tile = k_tile + kTerms * Tile::kKeyBytes;
  const uint32_t ds_tile = v_tile + (Tile::kWithKeys ? kTerms * Tile::kKeyBytes : 0);
  const uint32_t p_tile = ds_tile + (Tile::kWithKeys ? kTerms * Tile::kScoreBytes : 0);
  const uint32_t stages = ds_tile + kTerms * Tile::kScoreTiles * Tile::kScoreBytes;

  KeysBlock& block = *reinterpret_cast<KeysBlock*>(shared + Tile::kSharedBytes - sizeof(KeysBlock));
  const int group = p.group;
  {
    const BlockRows place = find_block_rows<kKeys, Owned::kKeys>(
        p.problem, p.tiles, static_cast<int>(p.problem.kv_heads), p.together, false);
    if (!place.any) return;
    const Sequence sequence = p.problem.sequence(place.b);
    const Window window(p.problem.mask, sequence);
    const int queries = static_cast<int>(sequence.q_len);
    const int last_key = min(place.begin + kKeys, window.keys) - 1;
    if (last_key < place.begin) return;
    if (!kSplitsKeys<Tile> || p.k_floats == nullptr) {
#pragma unroll(Tile::kFeatures ? 1 : 2 * kTerms)
      for (int i = 0; i < (Tile::kWithKeys ? 2 : 1) * kTerms; ++i) {  // terms of k, then of v
        const Operand& x = i < kTerms ? p.k : p.v;
        const uint16_t* rows = x.at(place.batch, sequence.k_begin + place.begin, place.head);
        load_tile<kDim, kKeys, Tile::kThreads, Tile::kFeatures>(
            k_tile + i * Tile::kKeyBytes, x, rows + i % kTerms * x.low, window.keys - place.begin);
      }
      copies_commit();
    }
    if (threadIdx.x == 0) {
      const int i_begin = window.first_query(place.begin) / kQueries * kQueries;
      const float ds_scale = kSplitsKeys<Tile> && p.k_floats != nullptr
                                 ? 1.f
                                 : score_gradient_scale<Tile>(p, place.batch, place.head);
      const int64_t head = place.batch * p.problem.heads + place.head * group;
      block = {
          {place, sequence, window},
          queries,
          i_begin,
          window.end_query(last_key, queries),
          p.q.at(place.batch, sequence.q_begin, place.head * group),
          p.dout.at(place.batch, sequence.q_begin, place.head * group),
          head * p.problem.q_len + sequence.q_begin,
          (head * p.dq_rows + first_patch_row(p.problem, sequence.q_begin, place.b)) * p.dq_columns,
          window.first_query(last_key),
          last_key + 1 == place.begin + kKeys ? window.end_query(place.begin, queries) : 0,
          product_scale<Tile>(p, place.batch, place.head),
          ds_scale,
          scale_of<Tile>(p.k, place.batch, place.head),
          0,
          gradient_factors<Tile>(p, place.batch, place.head, ds_scale)};
    }
  }
  __syncthreads();
  int next_group = block.i_begin < block.i_end ? 0 : group, next_i = block.i_begin;
  if (next_group < group) Step<Tile>(p, block, 0, next_i).load(p, stages, !Tile::kOneTile, true);
  if constexpr (kSplitsKeys<Tile>) {
    if (p.k_floats != nullptr) split_block<Tile>(p, block, k_tile, v_tile);
  }

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int key_at = warp % Tile::kKeyWarps * kKeyTiles * 16;  // this warp's first key
  const int part = warp / Tile::kKeyWarps;
  const LaneAddress<kDim> k_at(k_tile + key_at * kDim * 2, Patch::kStacked);
  const LaneAddress<kDim> v_at(v_tile + key_at * kDim * 2, Patch::kStacked);
  constexpr int kWarpColumns = Tile::kWarpColumns;
  float dk[Tile::kWithKeys ? kKeyTiles : 1][kWarpColumns / 8][4] = {};
  float dv[Tile::kWithValues ? kKeyTiles : 1][kWarpColumns / 8][4] = {};

  // One of the warps that make the same S and dP stores them.
  const bool stores =
      Tile::kSplit * Tile::kWarpQueries <= kQueries || part * Tile::kWarpQueries < kQueries;
  const auto store_terms = [&](uint32_t at, const uint32_t(&words)[kTerms]) {
    if (!stores) return;
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
      store_shared(at + term * Tile::kScoreBytes, words[term]);
    }
  };

  const bool plain = !Tile::kFeatures || p.change.plain;
  uint32_t stage = stages;
#pragma unroll 1
  while (next_group < group) {
    const int step_group = next_group, step_i = next_i;
    next_i += kQueries;
    if (next_i >= block.i_end) {
      next_i = block.i_begin;
      ++next_group;
    }
    const uint32_t q_tile = stage;
    const uint32_t dout_tile = stage + (Tile::kOneTile ? 0 : kTerms * Tile::kQueryBytes);
    const uint8_t* statistics = shared + (stage - k_tile) + Tile::kStatistics;
    if constexpr (Tile::kStages == 2) {
      const Step<Tile> next(p, block, next_group, next_i);
      stage = stages + (stage == stages ? Tile::kStageBytes : 0);
      copies_wait<0>();
      __syncthreads();
      if (next_group < group) next.load(p, stage, true, true);
    } else {
      copies_wait<0>();
      __syncthreads();
    }

#pragma unroll(Tile::kInRegisters ? Tile::kWarpQueries / kPiece : 1)
    for (int piece_at = 0; piece_at < Tile::kWarpQueries; piece_at += kPiece) {
      const int query_at = part * Tile::kWarpQueries % kQueries + piece_at;
      // The columns of s and dp are queries here.
      float dp[kKeyTiles][kPiece / 8][4];
      if constexpr (Tile::kWithKeys) {
        multiply_transposed<T, kTerms, kDim>(
            dp, FromShared<kDim>{v_at.fresh(), Tile::kKeyBytes},
            LaneAddress<kDim>(dout_tile + query_at * kDim * 2, Patch::kSide), Tile::kQueryBytes);
      }
      if constexpr (Tile::kOneTile) {
        static_assert(!Tile::kWithValues && kPiece == Tile::kWarpQueries);
        __syncthreads();
        Step<Tile>(p, block, step_group, step_i).load(p, stage, true, false);
        copies_wait<0>();
        __syncthreads();
      }
      float s[kKeyTiles][kPiece / 8][4];
      multiply_transposed<T, kTerms, kDim>(
          s, FromShared<kDim>{k_at.fresh(), Tile::kKeyBytes},
          LaneAddress<kDim>(q_tile + query_at * kDim * 2, Patch::kSide), Tile::kQueryBytes);
      const GradientFactors factors = step_factors<Tile>(block);
      if constexpr (Tile::kFeatures) {
        if constexpr (Tile::kWithKeys) {
#pragma unroll
          for (int n = 0; n < kPiece / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int column = kQueries + query_at + n * 8 + lane % 4 * 2 + e % 2;
              const float delta =
                  reinterpret_cast<const float*>(statistics)[column] * factors.delta;
#pragma unroll
              for (int m = 0; m < kKeyTiles; ++m) {
                dp[m][n][e] = fmaf(dp[m][n][e], factors.dp, -delta);
              }
            }
          }
        }
        if (!plain) {
          // A group's heads differ in slope and bias.
          BlockRows query_place = block.place;
          query_place.head = query_place.head * group + step_group;
          const HeadScore score(p.change, query_place, operand_scale<Tile>(block),
                                block.window.offset);
          change_scores<kTerms == 1, false, Tile::kWithKeys>(
              score, s, dp, step_i + query_at + lane % 4 * 2, block.place.begin + key_at + lane / 4,
              block.queries, block.window.keys);
        }
      }
      if (step_i < block.whole_begin || step_i + kQueries > block.whole_end) {
        const Window window = block.window;
#pragma unroll
        for (int n = 0; n < kPiece / 8; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int i = step_i + query_at + n * 8 + lane % 4 * 2 + c;
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
      const float exponent = kLog2e * (plain ? p.change.scale * operand_scale<Tile>(block) : 1.f);
      Packed<T, kTerms, kKeyTiles, kPiece> probability_fragments, gradient_fragments;
#pragma unroll
      for (int n = 0; n < kPiece / 8; ++n) {
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
              const int e = 2 * r + c;
              probabilities[c] = exp2_fast(fmaf(s[m][n][e], exponent, bases[c]));
              if constexpr (Tile::kWithKeys) {
                gradients[c] =
                    probabilities[c] *
                    (Tile::kFeatures ? dp[m][n][e] : fmaf(dp[m][n][e], factors.dp, -deltas[c]));
              }
            }
            const int row = key_at + m * 16 + lane / 4 + r * 8;
            const uint32_t at = piece<kQueries>(0, row, query_at / 8 + n) + lane % 4 * 4;
            uint32_t words[kTerms];
            if constexpr (Tile::kWithValues) {
              split_pair<T>(words, probabilities[0], probabilities[1]);
              if constexpr (Tile::kInRegisters) {
                probability_fragments.set(m, n, r, words);
              } else {
                store_terms(p_tile + at, words);
              }
            }
            if constexpr (Tile::kWithKeys) {
              split_pair<T>(words, gradients[0], gradients[1]);
              if constexpr (Tile::kInRegisters) gradient_fragments.set(m, n, r, words);
              store_terms(ds_tile + at, words);
            }
          }
        }
      }
      if constexpr (Tile::kInRegisters) {
        if constexpr (Tile::kWithValues) {
          multiply_add<kDim>(dv, probability_fragments,
                             LaneAddress<kDim>(dout_tile + piece_at * kDim * 2, Patch::kStacked),
                             Tile::kQueryBytes);
        }
        if constexpr (Tile::kWithKeys) {
          multiply_add<kDim>(dk, gradient_fragments,
                             LaneAddress<kDim>(q_tile + piece_at * kDim * 2, Patch::kStacked),
                             Tile::kQueryBytes);
        }
      }
    }
    if constexpr (!Tile::kInRegisters || Tile::kWithKeys) __syncthreads();

    if constexpr (!Tile::kInRegisters) {
      if constexpr (Tile::kWithValues) {
        multiply_add<kDim>(dv,
                           ScoresFromShared<T, kTerms, kQueries>(p_tile, key_at, Tile::kScoreBytes),
                           LaneAddress<kDim>(dout_tile, Patch::kStacked).moved(part * kWarpColumns),
                           Tile::kQueryBytes);
      }
      if constexpr (Tile::kWithKeys) {
        multiply_add<kDim>(
            dk, ScoresFromShared<T, kTerms, kQueries>(ds_tile, key_at, Tile::kScoreBytes),
            LaneAddress<kDim>(q_tile, Patch::kStacked).moved(part * kWarpColumns),
            Tile::kQueryBytes);
      }
    }
    if constexpr (Tile::kStages != 2) {
      if constexpr (!Tile::kInRegisters || !Tile::kWithKeys) __syncthreads();
      if (next_group < group) {
        Step<Tile>(p, block, next_group, next_i).load(p, stage, !Tile::kOneTile, true);
      }
    }

    if constexpr (Tile::kWithKeys) {
      if (p.dq_sums != nullptr) {
        // A warp takes as many columns at a time as there are registers beside dk and dv.
        constexpr int kMost = kTerms == 2 ? 32 : 64;
        constexpr int kAll = kDim / Tile::kColumnWarps, kColumns = kAll < kMost ? kAll : kMost;
        const unsigned thread = step_thread<Tile>();
        const int dq_warp = thread / 32, dq_lane = thread % 32;
        const int rows_at = dq_warp % Tile::kRowWarps * Tile::kRowTiles * 16;
        float factor = p.change.scale;
        if constexpr (kScaledOperands<Tile>) {
          factor *= block.ds_scale * block.k_scale;
        }
        float* sums = p.dq_sums + block.dq_at +
                      (step_group * p.dq_rows + step_i + rows_at) * p.dq_columns +
                      dq_lane * kPatchLane;
#pragma unroll 1
        for (int chunk = 0; chunk < kAll / kColumns; ++chunk) {
          const int columns_at = dq_warp / Tile::kRowWarps * kAll + chunk * kColumns;
          float dq[Tile::kRowTiles][kColumns / 8][4] = {};
          multiply_add_transposed<T, kTerms, kKeys / 16>(
              dq, LaneAddress<kQueries>(ds_tile, Patch::kSide, thread).moved(rows_at),
              Tile::kScoreBytes,
              LaneAddress<kDim>(k_tile, Patch::kStacked, thread).moved(columns_at),
              Tile::kKeyBytes);
          float* patch = sums + columns_at * 16;
          const int columns = static_cast<int>(p.dq_columns);
          if (step_i + kQueries <= block.queries && columns == kDim) {
            add_patches<kColumns / 8>(patch, dq, factor, columns, Tile::kRowTiles, kColumns / 8);
          } else {
            add_patches<kColumns / 8>(patch, dq, factor, columns,
                                      (block.queries - step_i - rows_at + 15) / 16,
                                      (columns - columns_at) / 8);
          }
        }
      }
    }
  }

  const BlockRows place = block.place;
  const int64_t row = block.sequence.k_begin + place.begin;
  const int valid = static_cast<int>(block.sequence.k_len) - place.begin;
  const float dk_factor = p.change.scale * (kScaledOperands<Tile> ? block.ds_scale : 1.f) *
                          scale_of<Tile>(p.q, place.batch, place.head);
  const float dv_factor = scale_of<Tile>(p.dout, place.batch, place.head) /
                          static_cast<float>(1 << kProbabilityLift<Tile>);
  copies_wait<0>();
  __syncthreads();
  const auto write = [&](auto floats, uint32_t tile, const Result& result) {
    if (result.data == nullptr) return;
    result.template write_tile<kDim, kKeys, Tile::kThreads, decltype(floats)::value>(
        tile, threadIdx.x, place.batch, row, place.head, valid);
  };
  if constexpr (kTerms == 1) {
    static_assert(Tile::kWithKeys && Tile::kWithValues);
    // dk and dv go out through the places of k and v, both at once; dk that is yet to be rotated is
    // float32 and takes both.
    const bool dk_sums = p.dk.dtype == DType::kFloat32;
    if (dk_sums) {
      put_sums<kDim>(k_tile, dk, dk_factor, key_at, part * kWarpColumns);
      __syncthreads();
      write(std::true_type(), k_tile, p.dk);
      __syncthreads();
    } else {
      put_halves<kDim>(k_tile, dk, dk_factor, key_at, part * kWarpColumns, is_bfloat16<Tile>(p.dk));
    }
    put_halves<kDim>(v_tile, dv, dv_factor, key_at, part * kWarpColumns, is_bfloat16<Tile>(p.dv));
    __syncthreads();
#pragma unroll 1
    for (int i = dk_sums ? 1 : 0; i < 2; ++i) {
      write(std::false_type(), i == 0 ? k_tile : v_tile, i == 0 ? p.dk : p.dv);
    }
  } else {
    // Two terms leave as much room as float32 sums need.
    if constexpr (Tile::kWithKeys) {
      put_sums<kDim>(k_tile, dk, dk_factor, key_at, part * kWarpColumns);
    }
    if constexpr (Tile::kWithValues) {
      put_sums<kDim>(Tile::kWithKeys ? v_tile : k_tile, dv, dv_factor, key_at, part * kWarpColumns);
    }
    __syncthreads();
#pragma unroll 1
    for (int i = Tile::kWithKeys ? 0 : 1; i < (Tile::kWithValues ? 2 : 1); ++i) {
      write(std::true_type(), i == 0 || !Tile::kWithKeys ? k_tile : v_tile, i == 0 ? p.dk : p.dv);
    }
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    backward_keys(const __grid_constant__ Backward p) {
  if constexpr (kCompiled<Tile>) {
    wait_for_earlier_kernels();
    backward_keys_block<Tile>(p);
  }
}

}  // namespace fk::cuda::attention
