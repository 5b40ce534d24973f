// This file finds the tiles of queries of a Hopper forward, and says which of them comes when.
#pragma once

#include "cuda/tma.cuh"
#include "ops/attention/sm90/forward_arguments.h"

namespace fk::cuda_sm90 {

// A warpgroup needs these blocks of keys: from `first` on, and `end_halves` says how many half
// blocks there are before the end. Blocks outside [inner_first, inner_end) need a mask.
struct BlocksOfKeys {
  int first, end_halves, inner_first, inner_end;
};

// Says where a tile of queries is and which blocks of keys it needs.
struct TileOfQueries {
  BlocksOfKeys blocks[3];      // of each warpgroup
  int first_block, end_block;  // of all together
  int batch, head;             // batch: -1 behind the last tile; 0 in the maps if packed
  int query, q_begin, q_len;   // the first query, counted within its sequence
  int k_begin, k_len;
  float* lse;  // of the first query; null if not wanted
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// Holds the 32 packed sequences among which the last tile was, and the tiles before them. Indices
// only grow.
struct PackedCursor {
  int batch = 0, tiles_before = 0;
};

// Tells which head (of `heads`) and which of its tiles comes at `index`. The last queries come
// first, which see the most keys if the mask is causal. Heads follow one another, for blocks that
// run side by side to share keys and values, but the `last` heads go together, the longest tiles of
// all first, for all blocks to finish at once.
__device__ __forceinline__ void order_tiles(int index, int heads, int query_tiles, int last,
                                            int* head, int* tile) {
  const int single = 2 * last >= heads ? 0 : heads - last;
  const int first = min(index / query_tiles, single);
  const int count = first < single ? 1 : heads - single;
  const int rest = index - first * query_tiles;
  *head = first + rest % count;
  *tile = query_tiles - 1 - rest / count;
}

// Finds the place of the tile of the given index; returns false past the last. A whole warp calls
// it, whose first lane writes the place down.
template <class Tile>
__device__ __forceinline__ bool place_tile(const ForwardArguments& a, int index,
                                           PackedCursor& cursor, TileOfQueries* tile) {
  if (index >= a.tiles) return false;
  const int lane = threadIdx.x % 32;
  int batch, head, place;
  if (a.packed) {
    // Sequences are looked up one after another. Whatever the offsets say, rows stay inside the
    // tensors.
    int begin, length, query_tiles;
    for (;;) {
      if (cursor.batch >= a.batch) return false;
      batch = cursor.batch + lane;
      begin = length = 0;
      if (batch < a.batch) {
        begin = min(max(a.cu_q[batch * a.cu_q_stride], 0), a.q_len);
        length = max(min(a.cu_q[(batch + 1) * a.cu_q_stride], a.q_len) - begin, 0);
      }
      query_tiles = ceil_div(length, Tile::kQueries);
      int end = query_tiles * a.heads;  // summed over the lanes up to this one
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int before = __shfl_up_sync(0xffffffff, end, d);
        if (lane >= d) end += before;
      }
      const unsigned behind = __ballot_sync(0xffffffff, index < cursor.tiles_before + end);
      if (behind != 0) {
        const int source = __ffs(behind) - 1;
        batch = cursor.batch + source;
        begin = __shfl_sync(0xffffffff, begin, source);
        length = __shfl_sync(0xffffffff, length, source);
        query_tiles = __shfl_sync(0xffffffff, query_tiles, source);
        index -= cursor.tiles_before + __shfl_sync(0xffffffff, end, source) - query_tiles * a.heads;
        break;
      }
      cursor.batch += 32;
      cursor.tiles_before += __shfl_sync(0xffffffff, end, 31);
    }
    if (lane == 0) {
      tile->q_begin = begin;
      tile->q_len = length;
      tile->k_begin = min(max(a.cu_k[batch * a.cu_k_stride], 0), a.k_len);
      tile->k_len = max(min(a.cu_k[(batch + 1) * a.cu_k_stride], a.k_len) - tile->k_begin, 0);
    }
    const int behind = (a.q_len - begin - length) / Tile::kQueries * a.heads;
    const int last = max(ceil_div(a.end_tiles - behind, query_tiles), 0);
    order_tiles(index, a.heads, query_tiles, last, &head, &place);
  } else {
    int row = index / a.query_tiles;
    if (a.last_first) {
      const int last = ceil_div(a.end_tiles, a.query_tiles);
      order_tiles(index, a.batch * a.heads, a.query_tiles, last, &row, &place);
    } else {
      place = index % a.query_tiles;
    }
    batch = row / a.heads;
    head = row % a.heads;
    if (lane == 0) {
      tile->q_begin = tile->k_begin = 0;
      tile->q_len = a.q_len;
      tile->k_len = a.k_len;
    }
  }
  if (lane == 0) {
    tile->batch = batch;
    tile->head = head;
    tile->query = place * Tile::kQueries;
  }
  return true;
}

// Finds the tile of the given index, with a negative batch past the last one. A whole warp calls
// it.
template <class Tile>
__device__ __forceinline__ void find_tile(const ForwardArguments& a, int index,
                                          PackedCursor& cursor, TileOfQueries* tile) {
  const int lane = threadIdx.x % 32;
  if (!place_tile<Tile>(a, index, cursor, tile)) {
    if (lane == 0) tile->batch = -1;
    return;
  }
  __syncwarp();
  if (lane < Tile::kWarpgroups) {
    const int q_len = tile->q_len, k_len = tile->k_len, query = tile->query;
    const int shift = k_len - q_len, last_query = min(query + Tile::kQueries, q_len) - 1;
    const int end_key = min(k_len, last_query + shift + a.right + 1);
    const int first_key = max(0, query + shift - a.left);
    const int tile_first = first_key / Tile::kKeys;
    const int tile_end = end_key > first_key ? ceil_div(end_key, Tile::kKeys) : tile_first;
    // These belong to the warpgroup with this lane's number.
    const int first = query + 64 * lane + shift, last = first + 63;
    const int end = min(k_len, last + a.right + 1);
    const int end_block = max(tile_first, min(tile_end, ceil_div(end, Tile::kKeys)));
    BlocksOfKeys b;
    b.first = min(end_block, max(tile_first, (first - a.left) / Tile::kKeys));
    b.end_halves = 2 * end_block - (2 * end <= (2 * end_block - 1) * Tile::kKeys ? 1 : 0);
    if (query + 64 * lane >= q_len) b.end_halves = 2 * b.first;  // no queries here
    b.inner_first = ceil_div(last - a.left, Tile::kKeys);
    b.inner_end = min(k_len, first + a.right + 1) / Tile::kKeys;
    tile->blocks[lane] = b;
    if (lane == 0) {
      tile->first_block = tile_first;
      tile->end_block = tile_end;
    }
  }
  __syncwarp();
  if (lane == 0) {
    tile->lse = a.lse.data == nullptr
                    ? nullptr
                    : static_cast<float*>(a.lse.data) + tile->batch * a.lse.batch +
                          tile->head * a.lse.head + (tile->q_begin + tile->query) * a.lse.row;
  }
}

#endif

}  // namespace fk::cuda_sm90
