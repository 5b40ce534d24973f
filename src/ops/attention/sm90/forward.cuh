// Attention forward on Hopper: out = softmax(scale q k^T) v, tile by tile.
//
// Floor: 4 Lq Lk D FLOPs per head on the tensor cores (half of it causal). With 16 exponentials a
// clock and multiprocessor against 4096 FLOPs, the exponentials take as long as the multiplications
// at D = 64 and half as long at D = 128, so both must run at once.
//
// A block has a warpgroup that feeds shared memory by the copy engine (sm90/forward_tiles.cuh)
// and two or three that each own 64 queries. Keys and values come in blocks of kKeys, two to four
// of each in shared memory. A warpgroup issues the scores of the next block, then the product of
// the present probabilities with their values, and does the softmax of the next block while the
// latter runs. The warpgroups take turns in issuing (named barriers), so that one multiplies while
// another does its softmax. Scores, probabilities and output stay in registers: the accumulators of
// the first product, rounded, are the left operand of the second.
//
// Blocks are persistent: they take tiles of queries from a list (sm90/schedule.cuh). Queries
// are in shared memory twice where they fit; a tile's output leaves through the place of its
// queries. Between two tiles the tensor cores wait for what a warpgroup does there, so that is kept
// short: what only depends on the tile is found ahead of time by the warp that finds the tile.
#pragma once

#include <type_traits>

#include "cuda/dependent_launch.cuh"
#include "cuda/parameter.cuh"
#include "cuda/wgmma.cuh"
#include "ops/attention/sm90/forward_tiles.cuh"
#include "ops/attention/sm90/softmax.cuh"

namespace fk::cuda_sm90 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// One warpgroup, which owns 64 queries of every tile.
template <class Tile>
struct Consumer {
  using T = typename Tile::T;
  static constexpr int kScores = Tile::kKeys / 2;
  static constexpr int kSteps = Tile::kKeys / 16;

  const ForwardArguments& a;
  char* const shared;
  ForwardBarriers* const barriers;
  const TileOfQueries* const tiles;
  const int warpgroup;
  const int thread = threadIdx.x % 128;
  const int warp = thread / 32, lane = thread % 32;

  // Blocks of keys since the start whose scores were taken, or that were skipped.
  int block = 0;
  int values = 0;  // the block of values to multiply next, modulo 2 kValueStages
  // Of the present tile: what BlocksOfKeys says.
  int first_block, end_block, inner_first, inner_end;
  int out_round = -1;  // the tile whose output is still leaving shared memory, or -1

  __device__ __forceinline__ int q_stage(int round) const {
    return stage_of<Tile::kQueryStages>(round);
  }
  __device__ __forceinline__ const TileOfQueries& tile(int round) const {
    return tiles[stage_of<kTilePlaces>(round)];
  }
  __device__ __forceinline__ char* queries(int round) const {
    return shared + q_stage(round) * Tile::kTileBytes + warpgroup * Tile::kQueryBytes;
  }

  __device__ __forceinline__ int k_stage() const { return stage_of<Tile::kKeyStages>(block); }
  __device__ __forceinline__ void wait_for_keys() const {
    cuda::barrier_wait(&barriers->k_full[k_stage()], phase_of<Tile::kKeyStages>(block));
  }
  __device__ __forceinline__ void release_keys() const {
    if (lane == 0) cuda::barrier_arrive(&barriers->k_empty[k_stage()]);
  }

  __device__ __forceinline__ int v_stage() const {
    return values < Tile::kValueStages ? values : values - Tile::kValueStages;
  }
  __device__ __forceinline__ char* v_block() const {
    return shared + Tile::kVOffset + v_stage() * Tile::kValueBytes;
  }
  __device__ __forceinline__ void wait_for_values() const {
    cuda::barrier_wait(&barriers->v_full[v_stage()], values >= Tile::kValueStages);
  }
  __device__ __forceinline__ void next_values() {
    values = values == 2 * Tile::kValueStages - 1 ? 0 : values + 1;
  }
  // Of the block before.
  __device__ __forceinline__ void release_values() const {
    const int stage = v_stage();
    if (lane == 0) {
      cuda::barrier_arrive(&barriers->v_empty[(stage == 0 ? Tile::kValueStages : stage) - 1]);
    }
  }

  // Named barriers: 1 + w for when it is warpgroup w's turn to issue, 4 + w for w alone.
  __device__ __forceinline__ void wait_for_turn() const {
    cuda::named_barrier_sync(1 + warpgroup, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    cuda::named_barrier_arrive(1 + (warpgroup + 1) % Tile::kWarpgroups, 256);
  }
  __device__ __forceinline__ void sync() const { cuda::named_barrier_sync(4 + warpgroup, 128); }

  // Gives the queries' place back once the output has left it.
  __device__ __forceinline__ void finish_out() {
    if (out_round < 0) return;
    if (thread == 0) {
      cuda::bulk_wait_read<0>();
      cuda::barrier_arrive(&barriers->q_empty[q_stage(out_round)]);
    }
    out_round = -1;
  }

  // False if there is no further tile.
  __device__ __forceinline__ bool begin_tile(int round) {
    const int phase = phase_of<Tile::kQueryStages>(round);
    cuda::barrier_wait(&barriers->q_full[q_stage(round)], phase);
    if (tile(round).batch < 0) return false;
    const BlocksOfKeys blocks = tile(round).blocks[warpgroup];
    first_block = blocks.first;
    end_block = (blocks.end_halves + 1) / 2;
    inner_first = blocks.inner_first;
    inner_end = blocks.inner_end;
    return true;
  }

  // Takes part in blocks that only others need without doing anything.
  __device__ __forceinline__ void skip(int blocks) {
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

  template <int N>
  __device__ __forceinline__ void issue_scores(float (&s)[N], int round) const {
    const uint64_t q = cuda::k_major(queries(round));
    const uint64_t k = cuda::k_major(shared + Tile::kKOffset + k_stage() * Tile::kKeyBytes);
    cuda::warpgroup_fence();
#pragma unroll
    for (int i = 0; i < Tile::kWidth / 16; ++i) {
      cuda::multiply<T>(s, cuda::advance(q, i / 4 * Tile::kQueryColumnBytes + i % 4 * 32),
                        cuda::advance(k, i / 4 * Tile::kKeyColumnBytes + i % 4 * 32), i > 0);
    }
    cuda::warpgroup_commit();
  }

  template <int kSteps>
  __device__ __forceinline__ void issue_values(float (&o)[Tile::kValueWidth / 2],
                                               const uint32_t (&p)[Tile::kKeys / 16][4]) {
    const uint64_t v = cuda::outer_major(v_block(), Tile::kKeyColumnBytes);
    cuda::warpgroup_fence();
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      cuda::multiply<T, cuda::Major::kOuter>(o, p[j], cuda::advance(v, j * 2048), true);
    }
    cuda::warpgroup_commit();
    next_values();
  }

  // Scores of block n as the softmax wants them: changed by softcap and ALiBi (then in units of log
  // 2), and -inf where a query does not see a key.
  template <int N>
  __device__ __forceinline__ void finish_scores(float (&s)[N], int n, int round) const {
    const int first_key = n * Tile::kKeys + 2 * (lane % 4);
    const TileOfQueries& t = tile(round);
    if constexpr (Tile::kScoreChange) {
      const float slope = a.slopes.data == nullptr
                              ? 0.f
                              : cuda::load_as(a.slope_type, a.slopes.data,
                                              t.batch * a.slopes.batch + t.head * a.slopes.head);
      const float inner = a.softcap > 0.f ? a.scale / a.softcap : a.scale;
#pragma unroll
      for (float& x : s) x *= inner;
      if (a.softcap > 0.f) {
#pragma unroll
        for (float& x : s) x = a.softcap * tanh_fast(x);
      }
      const int place = t.query + 64 * warpgroup + 16 * warp + lane / 4 + t.k_len - t.q_len;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int distance = place + 8 * row_of(i) - (first_key + 8 * (i / 4) + i % 2);
        s[i] = cuda::kLog2E * (s[i] - slope * static_cast<float>(abs(distance)));
      }
    }
    if (n < inner_end && n >= inner_first) return;
    const int place =
        t.query + 64 * warpgroup + 16 * warp + lane / 4 + t.k_len - t.q_len - first_key;
    if (n >= inner_end) {
      const int limit = t.k_len - first_key, end = place + a.right + 1;
      mask_from(s, {min(limit, end), min(limit, end + 8)});
    }
    if (n < inner_first) mask_before(s, {place - a.left, place + 8 - a.left});
  }

  // The rows behind a packed sequence are another one's, and 0 times what is there may be NaN.
  __device__ __forceinline__ void clear_values_behind(int round) const {
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

  // What a row of the output is to be multiplied by, when its tile is done; stores lse.
  __device__ __forceinline__ void finish_rows(const Softmax& softmax, float scale_log2, int round,
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

  // Sends the rows out, through the place of their queries.
  __device__ __forceinline__ void store(const float (&o)[Tile::kValueWidth / 2],
                                        const float (&factor)[2], int round) {
    const TileOfQueries& t = tile(round);
    const int first_row = t.query + 64 * warpgroup;
    char* const out = queries(round);
    {
      const int r = 16 * warp + lane % 16;
#pragma unroll
      for (int i = 0; i < Tile::kValueWidth / 16; ++i) {
        const int piece = 2 * (i % 4) + lane / 16;
        char* const to = out + i / 4 * Tile::kQueryColumnBytes + r * 128 + (piece ^ (r % 8)) * 16;
        const float* x = o + 8 * i;
        cuda::store_matrices(to, pack_pair<T>(x[0] * factor[0], x[1] * factor[0]),
                             pack_pair<T>(x[2] * factor[1], x[3] * factor[1]),
                             pack_pair<T>(x[4] * factor[0], x[5] * factor[0]),
                             pack_pair<T>(x[6] * factor[1], x[7] * factor[1]));
      }
    }
    const int rows = min(64, t.q_len - first_row);
    cuda::fence_async_shared();
    sync();
    if (a.out_view.data != nullptr && rows > 0) {
      if (!a.packed || rows == 64) {
        if (thread == 0) {
#pragma unroll
          for (int c = 0; c < Tile::kValueColumns; ++c) {
            cuda::tensor_store(&a.out, out + c * Tile::kQueryColumnBytes, 64 * c,
                               t.q_begin + first_row, t.head, a.packed ? 0 : t.batch);
          }
          cuda::bulk_commit();
        }
      } else {
        // The rows behind are another sequence's.
        for (int i = thread; i < rows * a.value_pieces; i += 128) {
          const int r = i / a.value_pieces, piece = i % a.value_pieces;
          const uint4 x = *reinterpret_cast<const uint4*>(
              out + piece / 8 * Tile::kQueryColumnBytes + r * 128 + ((piece % 8) ^ (r % 8)) * 16);
          const int64_t at =
              (t.q_begin + first_row + r) * a.out_view.row + t.head * a.out_view.head + piece * 8;
          *reinterpret_cast<uint4*>(static_cast<T*>(a.out_view.data) + at) = x;
        }
        sync();
      }
    }
    if (thread == 0) cuda::barrier_arrive(&barriers->tile_empty[stage_of<kTilePlaces>(round)]);
    out_round = round;
  }

  // Waits for the product with the values of the block before (if there is one), which takes as
  // long as the softmax of this one, and puts this block's probabilities in its place. Called after
  // a branch only: the compiler would move the wait to before the softmax.
  __device__ __forceinline__ void next_probabilities(float (&o)[Tile::kValueWidth / 2],
                                                     const float (&s)[kScores],
                                                     uint32_t (&p)[Tile::kKeys / 16][4],
                                                     const Softmax& softmax, bool before) const {
    cuda::warpgroup_wait<0>();
    cuda::keep_registers(o);
    if (before) release_values();
    if (softmax.grown) {
#pragma unroll
      for (int i = 0; i < Tile::kValueWidth / 2; ++i) o[i] *= softmax.correction[row_of(i)];
    }
    round_pairs<T>(s, p);
  }

  __device__ __forceinline__ void run() {
    const float scale_log2 = Tile::kScoreChange ? 1.f : a.scale * cuda::kLog2E;
    float o[Tile::kValueWidth / 2], s[kScores];
    uint32_t p[Tile::kKeys / 16][4];
    float factor[2];
    if (warpgroup == Tile::kWarpgroups - 1) pass_turn();
    for (int round = 0; begin_tile(round); ++round) {
      Softmax softmax;
      skip(first_block - tile(round).first_block);
#pragma unroll
      for (int i = 0; i < Tile::kValueWidth / 2; ++i) o[i] = 0.f;
      if (first_block < end_block) {
        wait_for_keys();
        wait_for_turn();
        issue_scores(s, round);
        pass_turn();
        cuda::warpgroup_wait<0>();
        cuda::keep_registers(s);
        release_keys();
        finish_scores(s, first_block, round);
        softmax.begin(s, scale_log2);
        finish_out();
        ++block;
        // Of the last block, half the keys may be all that these queries see.
        const bool half = Tile::kHalfBlocks && end_block - first_block > 1 &&
                          tile(round).blocks[warpgroup].end_halves % 2 != 0;
        const auto step = [&](auto& scores, int n) {
          const bool before = n > first_block + 1;
          wait_for_keys();
          next_probabilities(o, s, p, softmax, before);
          wait_for_turn();
          cuda::keep_registers(o);
          issue_scores(scores, round);
          wait_for_values();
          issue_values<kSteps>(o, p);
          pass_turn();
          cuda::warpgroup_wait<1>();
          cuda::keep_registers(scores);
          release_keys();
          finish_scores(scores, n, round);
          softmax.step(scores, scale_log2, a.slack);
          ++block;
        };
        const int full_end = end_block - (half ? 1 : 0);
#pragma unroll 1
        for (int n = first_block + 1; n < full_end; ++n) step(s, n);
        const auto last_product = [&](auto steps) {
          const bool before = end_block - first_block > 1;
          wait_for_values();
          next_probabilities(o, s, p, softmax, before);
          clear_values_behind(round);
          issue_values<decltype(steps)::value>(o, p);
          finish_rows(softmax, scale_log2, round, factor);
          cuda::warpgroup_wait<0>();
          cuda::keep_registers(o);
          release_values();
        };
        // Products under way must not meet where branches join.
        if constexpr (Tile::kHalfBlocks) {
          if (half) {
            step(reinterpret_cast<float(&)[kScores / 2]>(s), end_block - 1);
            last_product(std::integral_constant<int, kSteps / 2>());
          } else {
            last_product(std::integral_constant<int, kSteps>());
          }
        } else {
          last_product(std::integral_constant<int, kSteps>());
        }
      } else {  // no query here sees a key
        finish_rows(softmax, scale_log2, round, factor);
      }
      skip(tile(round).end_block - end_block);
      finish_out();
      store(o, factor, round);
      if constexpr (Tile::kQueryStages == 1) finish_out();
    }
    finish_out();
  }
};

#endif

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    attention_forward(const __grid_constant__ ForwardArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char shared[];
  auto* barriers = reinterpret_cast<ForwardBarriers*>(shared + Tile::kEnd);
  auto* tiles = reinterpret_cast<TileOfQueries*>(shared + Tile::kEnd + 384);
  static_assert(sizeof(ForwardBarriers) <= 384 &&
                384 + kTilePlaces * sizeof(TileOfQueries) <= Tile::kSharedBytes - Tile::kEnd);
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4 * Tile::kWarpgroups;
    for (int i = 0; i < kTilePlaces; ++i) {
      cuda::barrier_init_for_warps(&barriers->tile_full[i], 1);
      cuda::barrier_init(&barriers->tile_empty[i], Tile::kWarpgroups + 3);
    }
    cuda::barrier_init(&barriers->next_due, 1);
    for (int i = 0; i < Tile::kQueryStages; ++i) {
      cuda::barrier_init(&barriers->q_full[i], 1);
      cuda::barrier_init(&barriers->q_empty[i], Tile::kWarpgroups);
    }
    for (int i = 0; i < Tile::kKeyStages; ++i) {
      cuda::barrier_init(&barriers->k_full[i], 1);
      cuda::barrier_init(&barriers->k_empty[i], kWarps);
    }
    for (int i = 0; i < Tile::kValueStages; ++i) {
      cuda::barrier_init(&barriers->v_full[i], 1);
      cuda::barrier_init(&barriers->v_empty[i], kWarps);
    }
    cuda::fence_barrier_init();
    cuda::prefetch_tensor_map(&a.q);
    cuda::prefetch_tensor_map(&a.k);
    cuda::prefetch_tensor_map(&a.v);
    cuda::prefetch_tensor_map(&a.out);
  }
  __syncthreads();
  cuda::wait_for_earlier_kernels();
  // By a shuffle, for the compiler to see that it is the same in all threads of a warp.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    cuda::give_registers<Tile::kProducerRegisters>();
    if (threadIdx.x < 32) find_tiles<Tile>(a, barriers, tiles);
    if (threadIdx.x == 32) load_queries<Tile>(a, shared, barriers, tiles);
    if (threadIdx.x == 64) {
      load_blocks<Tile, Tile::kKeyStages, true>(a, &a.k, shared + Tile::kKOffset, barriers->k_full,
                                                barriers->k_empty, barriers, tiles);
    }
    if (threadIdx.x == 96) {
      load_blocks<Tile, Tile::kValueStages, false>(
          a, &a.v, shared + Tile::kVOffset, barriers->v_full, barriers->v_empty, barriers, tiles);
    }
  } else {
    cuda::take_registers<Tile::kRegisters>();
    Consumer<Tile>{a, shared, barriers, tiles, warpgroup - 1}.run();
  }
#endif
}

}  // namespace fk::cuda_sm90
