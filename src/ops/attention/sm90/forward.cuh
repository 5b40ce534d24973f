// This is attention's forward on Hopper: out = softmax(scale q k^T) v, tile by tile.
//
// Floor: 4 Lq Lk D FLOPs per head on the tensor cores (half of it causal). With 16 exponentials a
// clock and multiprocessor against 4096 FLOPs, the exponentials take as long as the multiplications
// at D = 64 and half as long at D = 128, so both must run at once.
//
// A block has a warpgroup that feeds shared memory by the copy engine and two or three that each
// own 64 queries. Keys and values come in blocks of kKeys, two to four of each in shared memory. A
// warpgroup issues the scores of the next block, then the product of the present probabilities with
// their values, and does the softmax of the next block while the latter runs. The warpgroups take
// turns in issuing (named barriers), so that one multiplies while another does its softmax. Scores,
// probabilities and output stay in registers: the accumulators of the first product, rounded, are
// the left operand of the second.
//
// Blocks are persistent: they take tiles of queries from a list (sm90/schedule.cuh). Queries
// are in shared memory twice where they fit; a tile's output leaves through the place of its
// queries. Between two tiles the tensor cores wait for what a warpgroup does there, so that is kept
// short: what only depends on the tile is found ahead of time by the warp that finds the tile.
#pragma once

#include <type_traits>

#include "cuda/dependent_launch.cuh"
#include "cuda/parameter.cuh"
#include "cuda/pipeline.cuh"
#include "cuda/tma.cuh"
#include "cuda/wgmma.cuh"
#include "ops/attention/cuda/score_change.cuh"
#include "ops/attention/sm90/schedule.cuh"
#include "ops/attention/sm90/softmax.cuh"

namespace fk::cuda_sm90 {

using cuda::phase_of;
using cuda::stage_of;

// This is what every row of the table of tiles (forward.cu) says, and what most rows leave as it is
// here. A row adds how the work is cut:
//   kKeys          keys of a block
//   kWarpgroups    warpgroups that multiply, 64 queries each
//   kKeyStages     blocks of keys in shared memory
//   kValueStages   blocks of values there; they are free again half a step later than those of keys
template <class T_, int kWidth_, int kValueWidth_ = kWidth_>
struct ForwardRow {
  using T = T_;
  // These are the head size, and that of the values, rounded up to what is multiplied.
  static constexpr int kWidth = kWidth_, kValueWidth = kValueWidth_;
  static constexpr int kKeyStages = 2, kValueStages = 2;
  static constexpr bool kScoreChange = false;  // whether there may be softcap or ALiBi
};

// A tile is a row of the table with what follows from it, and the map of shared memory.
template <class Row>
struct ForwardTile : Row {
  static constexpr int kQueries = 64 * Row::kWarpgroups;
  // Says whether the last block may be cut in half. Elsewhere the compiler runs out of registers
  // and makes every multiplication wait for the one before.
  static constexpr bool kHalfBlocks = Row::kWidth == 128 && Row::kKeys == 128 && !Row::kScoreChange;
  static constexpr int kThreads = 128 * (Row::kWarpgroups + 1);
  // A thread that loads and one that multiplies have so many registers: together what the block
  // starts with.
  static constexpr int kProducerRegisters = Row::kWarpgroups == 2 ? 24 : 32;
  static constexpr int kRegisters = Row::kWarpgroups == 2 ? 240 : 160;

  // Shared memory holds tiles of queries, blocks of keys, blocks of values, the barriers, and what
  // is known of coming tiles. Rows are cut into columns of 64 elements (128 bytes, the swizzle's
  // row).
  static constexpr int kColumns = (Row::kWidth + 63) / 64;
  static constexpr int kValueColumns = (Row::kValueWidth + 63) / 64;
  static constexpr int kKeyColumnBytes = Row::kKeys * 128;
  static constexpr int kKeyBytes = kColumns * kKeyColumnBytes;
  static constexpr int kValueBytes = kValueColumns * kKeyColumnBytes;
  static constexpr int kStageBytes = Row::kKeyStages * kKeyBytes + Row::kValueStages * kValueBytes;
  static constexpr int kQueryColumnBytes = 64 * 128;  // of one warpgroup
  static constexpr int kQueryBytes = kColumns * kQueryColumnBytes;
  static constexpr int kTileBytes = Row::kWarpgroups * kQueryBytes;
  static constexpr int kQueryStages = 2 * kTileBytes + kStageBytes <= 226 * 1024 ? 2 : 1;
  static constexpr int kKOffset = kQueryStages * kTileBytes;
  static constexpr int kVOffset = kKOffset + Row::kKeyStages * kKeyBytes;
  static constexpr int kBarrierOffset = kKOffset + kStageBytes;
  static constexpr int kPlaceOffset = kBarrierOffset + 384;
  static constexpr int kSharedBytes = kBarrierOffset + 1024;
  static_assert(Row::kKeys % 16 == 0 && Row::kWidth % 16 == 0 && kSharedBytes <= 227 * 1024);
  // The output leaves through the place of its queries.
  static_assert(Row::kValueWidth % 16 == 0 && Row::kValueWidth <= Row::kWidth);
};

constexpr int kTilePlaces = 4;  // tiles that are known at a time

// Each place in shared memory has a pair of barriers: `full` is complete when what was loaded is
// there, `empty` when all have read it. `next_due` says when the next tile is to be found.
struct ForwardBarriers {
  uint64_t tile_full[kTilePlaces], tile_empty[kTilePlaces], next_due;
  uint64_t q_full[2], q_empty[2], k_full[4], k_empty[4], v_full[4], v_empty[4];
};

// The warps of a block do the following; the definitions are below the kernel.
template <class Tile>
__device__ __forceinline__ void find_tiles(const ForwardArguments& a, ForwardBarriers* barriers,
                                           TileOfQueries* tiles);
template <class Tile>
__device__ __forceinline__ void load_queries(const ForwardArguments& a, char* shared,
                                             ForwardBarriers* barriers, const TileOfQueries* tiles);
template <class Tile, int kStages, bool kKeys>
__device__ __forceinline__ void load_blocks(const ForwardArguments& a, const CUtensorMap* map,
                                            char* to, uint64_t* full, uint64_t* empty,
                                            ForwardBarriers* barriers, const TileOfQueries* tiles);
template <class Tile>
struct Consumer;

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    attention_forward(const __grid_constant__ ForwardArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char shared[];
  auto* barriers = reinterpret_cast<ForwardBarriers*>(shared + Tile::kBarrierOffset);
  auto* tiles = reinterpret_cast<TileOfQueries*>(shared + Tile::kPlaceOffset);
  static_assert(sizeof(ForwardBarriers) <= Tile::kPlaceOffset - Tile::kBarrierOffset);
  static_assert(kTilePlaces * sizeof(TileOfQueries) <= Tile::kSharedBytes - Tile::kPlaceOffset);
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
  // The number comes by a shuffle, for the compiler to see that it is the same in all threads of a
  // warp.
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

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// One warp finds the tiles: the next one when the last loads of the one before are due.
template <class Tile>
__device__ __forceinline__ void find_tiles(const ForwardArguments& a, ForwardBarriers* barriers,
                                           TileOfQueries* tiles) {
  PackedCursor cursor;
  int index = blockIdx.x;
  for (int round = 0;; ++round) {
    const int place = stage_of<kTilePlaces>(round);
    cuda::barrier_wait(&barriers->tile_empty[place], phase_of<kTilePlaces>(round) ^ 1);
    find_tile<Tile>(a, index, cursor, &tiles[place]);
    __syncwarp();
    index += gridDim.x;
    if (threadIdx.x == 0 || cuda::kEveryLaneArrives) {
      cuda::barrier_arrive(&barriers->tile_full[place]);
      if (threadIdx.x == 0 && a.next_tile != nullptr && tiles[place].batch >= 0) {
        cuda::barrier_wait(&barriers->next_due, round & 1);
        index = atomicAdd(a.next_tile, 1) + static_cast<int>(gridDim.x);
      }
    }
    if (tiles[place].batch < 0) return;
    index = __shfl_sync(0xffffffff, index, 0);
  }
}

// Waits for the next tile, for a thread that loads.
__device__ __forceinline__ const TileOfQueries& wait_for_tile(ForwardBarriers* barriers,
                                                              const TileOfQueries* tiles,
                                                              int round) {
  const int place = stage_of<kTilePlaces>(round);
  cuda::barrier_wait(&barriers->tile_full[place], phase_of<kTilePlaces>(round));
  return tiles[place];
}

// Queries, keys and values are loaded by a thread each, none of which waits for a place that only
// another needs: what the next tile begins with is there when this one ends.
template <class Tile>
__device__ __forceinline__ void load_queries(const ForwardArguments& a, char* shared,
                                             ForwardBarriers* barriers,
                                             const TileOfQueries* tiles) {
  for (int round = 0;; ++round) {
    const TileOfQueries& tile = wait_for_tile(barriers, tiles, round);
    const int stage = stage_of<Tile::kQueryStages>(round);
    uint64_t* const full = &barriers->q_full[stage];
    cuda::barrier_wait(&barriers->q_empty[stage], phase_of<Tile::kQueryStages>(round) ^ 1);
    if (tile.batch < 0) {
      cuda::barrier_arrive(full);
      return;
    }
    cuda::barrier_arrive_expect(full, Tile::kTileBytes);
#pragma unroll
    for (int i = 0; i < Tile::kWarpgroups * Tile::kColumns; ++i) {
      const int w = i / Tile::kColumns, c = i % Tile::kColumns;
      cuda::tensor_load(shared + stage * Tile::kTileBytes + i * Tile::kQueryColumnBytes, &a.q, full,
                        64 * c, tile.q_begin + tile.query + 64 * w, tile.head,
                        a.packed ? 0 : tile.batch);
    }
    cuda::barrier_arrive(&barriers->tile_empty[stage_of<kTilePlaces>(round)]);
  }
}

// Loads keys or values into kStages places from `to` on. The thread that loads keys says when the
// next tile is due: late, for all multiprocessors to end at the same time.
template <class Tile, int kStages, bool kKeys>
__device__ __forceinline__ void load_blocks(const ForwardArguments& a, const CUtensorMap* map,
                                            char* to, uint64_t* full, uint64_t* empty,
                                            ForwardBarriers* barriers, const TileOfQueries* tiles) {
  constexpr int kColumns = kKeys ? Tile::kColumns : Tile::kValueColumns;
  constexpr int kBytes = kKeys ? Tile::kKeyBytes : Tile::kValueBytes;
  int block = 0;  // since the start
  for (int round = 0;; ++round) {
    const TileOfQueries& tile = wait_for_tile(barriers, tiles, round);
    if (tile.batch < 0) return;
    const int batch = a.packed ? 0 : tile.batch, head = tile.head / a.group;
    const int end = tile.end_block, due = max(tile.first_block, end - 2);
    if (kKeys && due == end) cuda::barrier_arrive(&barriers->next_due);
    for (int n = tile.first_block; n < end; ++n, ++block) {
      if (kKeys && n == due) cuda::barrier_arrive(&barriers->next_due);
      const int s = stage_of<kStages>(block);
      cuda::barrier_wait(&empty[s], phase_of<kStages>(block) ^ 1);
      cuda::barrier_arrive_expect(&full[s], kBytes);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        cuda::tensor_load(to + s * kBytes + c * Tile::kKeyColumnBytes, map, &full[s], 64 * c,
                          tile.k_begin + n * Tile::kKeys, head, batch);
      }
    }
    cuda::barrier_arrive(&barriers->tile_empty[stage_of<kTilePlaces>(round)]);
  }
}

// A warpgroup that multiplies owns 64 queries of every tile.
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

  // Counts the blocks of keys since the start whose scores were taken, or that were skipped.
  int block = 0;
  int values = 0;  // the block of values to multiply next, modulo 2 kValueStages
  // These are what BlocksOfKeys says of the present tile.
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
  // Gives back the place of the values that were multiplied before the last ones.
  __device__ __forceinline__ void release_values() const {
    const int stage = v_stage();
    if (lane == 0) {
      cuda::barrier_arrive(&barriers->v_empty[(stage == 0 ? Tile::kValueStages : stage) - 1]);
    }
  }

  // Named barrier 1 + w is for when it is warpgroup w's turn to issue, and 4 + w for w alone.
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

  // Waits for a tile, and returns false if there is no further one.
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

  // Takes part in blocks that only others need without doing anything (sm90/forward_rows.cuh).
  __device__ __forceinline__ void skip(int blocks);

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

  // The following are defined in sm90/forward_rows.cuh.

  // Makes the scores of block n what the softmax wants: changed by softcap and ALiBi (then in units
  // of log 2), and -inf where a query does not see a key.
  template <int N>
  __device__ __forceinline__ void finish_scores(float (&s)[N], int n, int round) const;

  // Clears values behind the end. The rows behind a packed sequence are another one's, and 0 times
  // what is there may be NaN.
  __device__ __forceinline__ void clear_values_behind(int round) const;

  // Returns what a row of the output is to be multiplied by when its tile is done, and stores lse.
  __device__ __forceinline__ void finish_rows(const Softmax& softmax, float scale_log2, int round,
                                              float (&factor)[2]) const;

  // Sends the rows out, through the place of their queries.
  __device__ __forceinline__ void store(const float (&o)[Tile::kValueWidth / 2],
                                        const float (&factor)[2], int round);

  // Waits for the product with the values of the block before (if there is one), which takes as
  // long as the softmax of this one, and puts this block's probabilities in its place. Call this
  // after a branch only: the compiler would move the wait to before the softmax.
  __device__ __forceinline__ void next_probabilities(float (&o)[Tile::kValueWidth / 2],
                                                     const float (&s)[kScores],
                                                     uint32_t (&p)[Tile::kKeys / 16][4],
                                                     const Softmax& softmax, bool before) const;

  // Takes all tiles, one after another.
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
        // Half the keys of the last block may be all that these queries see.
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

}  // namespace fk::cuda_sm90

#include "ops/attention/sm90/forward_rows.cuh"
