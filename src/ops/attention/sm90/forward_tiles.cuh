// How a Hopper forward cuts its work, what it keeps in shared memory, and the warpgroup that loads
// it. The warpgroups that multiply are in sm90/forward.cuh.
#pragma once

#include "cuda/dependent_launch.cuh"
#include "cuda/tma.cuh"
#include "ops/attention/sm90/schedule.cuh"

namespace fk::cuda_sm90 {

// How a head size is cut. kWidth is the head size rounded up to what is multiplied, kValueWidth
// that of the values.
template <class T_, int kWidth_, int kKeys_, int kWarpgroups_, bool kScoreChange_,
          int kKeyStages_ = 2, int kValueStages_ = 2, int kValueWidth_ = kWidth_>
struct ForwardTile {
  using T = T_;
  static constexpr int kWidth = kWidth_, kValueWidth = kValueWidth_;
  static constexpr int kKeys = kKeys_;              // of a block
  static constexpr int kWarpgroups = kWarpgroups_;  // that multiply
  static constexpr int kQueries = 64 * kWarpgroups;
  static constexpr bool kScoreChange = kScoreChange_;  // softcap or ALiBi
  // Blocks in shared memory. Those of keys are free again half a step earlier than those of values.
  static constexpr int kKeyStages = kKeyStages_, kValueStages = kValueStages_;
  // Whether the last block may be cut in half. Elsewhere the compiler runs out of registers and
  // makes every multiplication wait for the one before.
  static constexpr bool kHalfBlocks = kWidth == 128 && kKeys == 128 && !kScoreChange;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  // Together what the block starts with.
  static constexpr int kProducerRegisters = kWarpgroups == 2 ? 24 : 32;
  static constexpr int kRegisters = kWarpgroups == 2 ? 240 : 160;
  // Shared memory: columns of 64 elements (128 bytes, the swizzle's row).
  static constexpr int kColumns = (kWidth + 63) / 64, kValueColumns = (kValueWidth + 63) / 64;
  static constexpr int kKeyColumnBytes = kKeys * 128;
  static constexpr int kKeyBytes = kColumns * kKeyColumnBytes;
  static constexpr int kValueBytes = kValueColumns * kKeyColumnBytes;
  static constexpr int kStageBytes = kKeyStages * kKeyBytes + kValueStages * kValueBytes;
  static constexpr int kQueryColumnBytes = 64 * 128;  // of one warpgroup
  static constexpr int kQueryBytes = kColumns * kQueryColumnBytes;
  static constexpr int kTileBytes = kWarpgroups * kQueryBytes;
  static constexpr int kQueryStages = 2 * kTileBytes + kStageBytes <= 226 * 1024 ? 2 : 1;
  static constexpr int kKOffset = kQueryStages * kTileBytes;
  static constexpr int kVOffset = kKOffset + kKeyStages * kKeyBytes;
  static constexpr int kEnd = kKOffset + kStageBytes;
  static constexpr int kSharedBytes = kEnd + 1024;
  static_assert(kKeys % 16 == 0 && kWidth % 16 == 0 && kSharedBytes <= 227 * 1024);
  static_assert(kValueWidth % 16 == 0 && kValueWidth <= kWidth);  // out leaves by q's place
};

constexpr int kTilePlaces = 4;  // tiles that are known at a time

struct ForwardBarriers {
  uint64_t tile_full[kTilePlaces], tile_empty[kTilePlaces], next_due;
  uint64_t q_full[2], q_empty[2], k_full[4], k_empty[4], v_full[4], v_empty[4];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// The stage of the i-th block or tile since the start, and the phase of its barriers.
template <int kStages>
__device__ __forceinline__ int stage_of(int i) {
  return static_cast<unsigned>(i) % kStages;
}
template <int kStages>
__device__ __forceinline__ uint32_t phase_of(int i) {
  return (static_cast<unsigned>(i) / kStages) & 1;
}

// The warp that finds the tiles: the next one when the last loads of the one before are due.
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

// The next tile, for a thread that loads.
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

// Keys or values, into kStages places from `to` on. Who loads the keys says when the next tile is
// due: late, for all multiprocessors to end at the same time.
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

#endif

}  // namespace fk::cuda_sm90
