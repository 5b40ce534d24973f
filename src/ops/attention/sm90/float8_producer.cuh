// This file holds a part of attention of 8-bit floats on Hopper (sm90/float8.cuh): what the kernel
// is told, how shared memory is cut, and the warp that fills it.
#pragma once

#include "cuda/async_copy.cuh"
#include "cuda/math.cuh"
#include "cuda/pipeline.cuh"
#include "ops/attention/sm90/float8_softmax.cuh"
#include "ops/attention/sm90/schedule.cuh"

namespace fk::cuda_sm90 {

struct Float8Arguments {
  ForwardArguments forward;
  const char* values;       // packed
  int blocks_per_sequence;  // of packed values; 0 where sequences are packed
  int value_blocks;         // in all
  attention::Scales scales;
};

// Describes a tile as the producer found it, with what depends on its head.
struct alignas(16) Float8Head {
  TileOfQueries tile;
  // The softmax wants a positive scale, so the queries change their signs where it is negative. 0
  // becomes small enough to make no difference.
  float scale_log2, v_scale;
  float slack;  // what a score may exceed the maximum by before that follows
  bool negative;
  int next_tile;  // for the producer
};

struct Float8Barriers {
  uint64_t q_full[2], q_empty[2], k_full[4], k_empty[4], v_full[4], v_empty[4];
};

// Says how a head size is cut. A row of the table of tiles (float8.cu) says:
//   kWidth       the head size, rounded up
//   kKeys        keys of a block
//   kWarpgroups  warpgroups that multiply, 64 queries each
//   kStages      blocks of keys, and of values, in shared memory
// and this what follows from it, and the map of shared memory.
template <class Row>
struct Float8Tile : Row {
  static constexpr int kQueries = 64 * Row::kWarpgroups;
  // Says whether probabilities are rounded when the product before is done, not one by one beside
  // the exponentials, where they wait for its registers. This is as measured.
  static constexpr bool kRoundLate = Row::kWidth == 128;
  // Says whether the warpgroups take turns at exponentials, not at the issue of products. For long
  // rows they do, as measured.
  static constexpr bool kTurnsAtExponentials = Row::kKeys == 224;
  static constexpr int kThreads = 128 * (Row::kWarpgroups + 1);
  // A thread that loads and one that multiplies have so many registers: together no more than the
  // block starts with.
  static constexpr int kProducerRegisters = 40;
  static constexpr int kRegisters = Row::kWarpgroups == 2 ? 232 : 152;
  // Shared memory holds two tiles of queries, a place of each warpgroup's output, blocks of keys,
  // blocks of values, the barriers and two Float8Heads. Rows of q and k take 128 bytes, or several
  // columns of these; what of them is behind the head size is 0.
  static constexpr int kColumns = (Row::kWidth + 127) / 128;
  static constexpr int kKeyColumnBytes = Row::kKeys * 128;
  static constexpr int kKBytes = kColumns * kKeyColumnBytes;
  static constexpr int kVBytes = Row::kKeys * Row::kWidth;
  static constexpr int kQueryColumnBytes = 64 * 128;  // of one warpgroup
  static constexpr int kQueryBytes = kColumns * kQueryColumnBytes;
  static constexpr int kTileBytes = Row::kWarpgroups * kQueryBytes;
  static constexpr int kOutBytes = 64 * Row::kWidth * 2;
  static constexpr int kOutOffset = 2 * kTileBytes;
  static constexpr int kKOffset = kOutOffset + Row::kWarpgroups * kOutBytes;
  static constexpr int kVOffset = kKOffset + Row::kStages * kKBytes;
  static constexpr int kEnd = kVOffset + Row::kStages * kVBytes;
  static constexpr int kSharedBytes = kEnd + 512;
  static_assert(sizeof(Float8Barriers) + 2 * sizeof(Float8Head) <= 512);
  static_assert(Row::kKeys % 32 == 0 && Row::kWidth % 32 == 0 && kSharedBytes <= 227 * 1024);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

template <class Tile>
struct Float8Producer {
  const Float8Arguments& a;
  char* const shared;
  Float8Barriers* const barriers;
  Float8Head* const shared_heads;
  int block = 0;  // of keys, since the start

  __device__ __forceinline__ void load_tile(const TileOfQueries& tile, int q_stage) {
    const ForwardArguments& f = a.forward;
    const int batch = f.packed ? 0 : tile.batch;
    cuda::barrier_arrive_expect(&barriers->q_full[q_stage], Tile::kTileBytes);
#pragma unroll
    for (int i = 0; i < Tile::kWarpgroups * Tile::kColumns; ++i) {
      const int w = i / Tile::kColumns, c = i % Tile::kColumns;
      cuda::tensor_load(shared + q_stage * Tile::kTileBytes + i * Tile::kQueryColumnBytes, &f.q,
                        &barriers->q_full[q_stage], 128 * c, tile.q_begin + tile.query + 64 * w,
                        tile.head, batch);
    }
    const int kv_head = tile.head / f.group, kv_heads = f.heads / f.group;
    const int first =
        f.packed ? tile.k_begin / Tile::kKeys + tile.batch : tile.batch * a.blocks_per_sequence;
    for (int n = tile.first_block; n < tile.end_block; ++n, ++block) {
      const int s = cuda::stage_of<Tile::kStages>(block);
      const uint32_t parity = cuda::phase_of<Tile::kStages>(block) ^ 1;
      cuda::barrier_wait(&barriers->k_empty[s], parity);
      cuda::barrier_arrive_expect(&barriers->k_full[s], Tile::kKBytes);
#pragma unroll
      for (int c = 0; c < Tile::kColumns; ++c) {
        cuda::tensor_load(shared + Tile::kKOffset + s * Tile::kKBytes + c * Tile::kKeyColumnBytes,
                          &f.k, &barriers->k_full[s], 128 * c, tile.k_begin + n * Tile::kKeys,
                          kv_head, batch);
      }
      cuda::barrier_wait(&barriers->v_empty[s], parity);
      cuda::barrier_arrive_expect(&barriers->v_full[s], Tile::kVBytes);
      const int64_t from =
          static_cast<int64_t>(min(first + n, a.value_blocks - 1)) * kv_heads + kv_head;
      cuda::bulk_copy_to_shared(shared + Tile::kVOffset + s * Tile::kVBytes,
                                a.values + from * Tile::kVBytes, Tile::kVBytes,
                                &barriers->v_full[s]);
    }
  }

  __device__ __forceinline__ void run() {
    const ForwardArguments& f = a.forward;
    PackedCursor cursor;
    int index = blockIdx.x;
    for (int round = 0;; ++round) {
      Float8Head& head = shared_heads[round % 2];
      cuda::barrier_wait(&barriers->q_empty[round % 2], ((round / 2) & 1) ^ 1);
      find_tile<Tile>(f, index, cursor, &head.tile);
      __syncwarp();
      if (cuda::kEveryLaneArrives && threadIdx.x > 0) {
        cuda::barrier_arrive(&barriers->q_full[round % 2]);
      }
      if (threadIdx.x == 0) {
        if (head.tile.batch >= 0) {
          head.next_tile = (f.next_tile == nullptr ? index : atomicAdd(f.next_tile, 1)) + gridDim.x;
          find_scales(head);
          load_tile(head.tile, round % 2);
        } else {
          cuda::barrier_arrive(&barriers->q_full[round % 2]);
        }
      }
      __syncwarp();
      if (head.tile.batch < 0) return;
      index = head.next_tile;
    }
  }

 private:
  __device__ __forceinline__ void find_scales(Float8Head& head) const {
    const ForwardArguments& f = a.forward;
    const int batch = head.tile.batch, query_head = head.tile.head;
    const float scale = cuda::kLog2E * f.scale * a.scales.scores(batch, query_head, f.group);
    head.negative = scale < 0.f;
    head.scale_log2 = scale == 0.f ? 1e-30f : fabsf(scale);
    head.slack = Float8Softmax::kLag * reciprocal_fast(head.scale_log2);
    head.v_scale = a.scales.values(batch, query_head, f.group);
  }
};

#endif

}  // namespace fk::cuda_sm90
