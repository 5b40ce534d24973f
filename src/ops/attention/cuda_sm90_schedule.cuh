// The tiles of queries of a Hopper forward: what a kernel is told, and which tile comes when.
#pragma once

#include "cuda/tma.cuh"
#include "ops/attention/problem.h"

namespace fk::cuda_sm90 {

struct ForwardArguments {
  CUtensorMap q, k, v, out;  // (D, rows, heads, batch)
  int batch, heads, group;   // group: query heads that share a key head
  int q_len, k_len;          // of a sequence; of all together if they are packed
  bool packed;
  int cu_q_stride, cu_k_stride;
  const int32_t* cu_q;
  const int32_t* cu_k;
  attention::View out_view, lse, slopes;
  const void* sinks;
  int64_t sink_stride;
  DType slope_type, sink_type;
  float scale, softcap;
  int value_pieces;  // of 16 bytes in a row of out
  int left, right;   // the mask, limited to what lengths can reach
  int tiles;         // in all; of packed sequences at most
  int query_tiles;   // of one sequence, where they are not packed
  bool last_first;   // the order of tiles: see tile_at
  int last_heads;
  int* next_tile;  // 0 at the start; null: every gridDim.x-th tile
};

// Where a tile of queries is and which blocks of keys it needs.
struct TileOfQueries {
  int batch, head, query;  // the first query, counted within its sequence
  int q_begin, q_len, k_begin, k_len;
  int first_block, end_block;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// The 32 packed sequences among which the last tile was, and the tiles before them: indices only
// grow.
struct PackedCursor {
  int batch = 0, tiles_before = 0;
};

// The tile of the given index; false past the last. For a whole warp.
template <class Tile>
__device__ __forceinline__ bool tile_at(const ForwardArguments& a, int index, PackedCursor& cursor,
                                        TileOfQueries* tile) {
  const int heads = a.heads;
  if (index >= a.tiles) return false;
  int block;
  if (a.packed) {
    // Sequence by sequence. Whatever the offsets say, rows stay inside the tensors.
    const int lane = threadIdx.x % 32;
    int query_tiles = 0;
    for (;;) {
      if (cursor.batch >= a.batch) return false;
      const int b = cursor.batch + lane;
      int begin = 0, length = 0;
      if (b < a.batch) {
        begin = min(max(a.cu_q[b * a.cu_q_stride], 0), a.q_len);
        length = max(min(a.cu_q[(b + 1) * a.cu_q_stride], a.q_len) - begin, 0);
      }
      const int own = (length + Tile::kQueries - 1) / Tile::kQueries;
      int end = own * heads;  // summed over the lanes up to this one
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int before = __shfl_up_sync(0xffffffff, end, d);
        if (lane >= d) end += before;
      }
      const unsigned behind = __ballot_sync(0xffffffff, index < cursor.tiles_before + end);
      if (behind != 0) {
        const int source = __ffs(behind) - 1;
        query_tiles = __shfl_sync(0xffffffff, own, source);
        tile->batch = cursor.batch + source;
        tile->q_begin = __shfl_sync(0xffffffff, begin, source);
        tile->q_len = __shfl_sync(0xffffffff, length, source);
        index -= cursor.tiles_before + __shfl_sync(0xffffffff, end, source) - query_tiles * heads;
        break;
      }
      cursor.batch += 32;
      cursor.tiles_before += __shfl_sync(0xffffffff, end, 31);
    }
    tile->k_begin = min(max(a.cu_k[tile->batch * a.cu_k_stride], 0), a.k_len);
    const int end = min(a.cu_k[(tile->batch + 1) * a.cu_k_stride], a.k_len);
    tile->k_len = max(end - tile->k_begin, 0);
    tile->head = index / query_tiles;
    block = query_tiles - 1 - index % query_tiles;
  } else {
    tile->q_begin = tile->k_begin = 0;
    tile->q_len = a.q_len;
    tile->k_len = a.k_len;
    int row;
    if (!a.last_first) {
      row = index / a.query_tiles;
      block = index % a.query_tiles;
    } else {
      // The last queries first, which see the most keys if the mask is causal: head by head, for
      // blocks that run side by side to share keys and values, but at the end several heads
      // together, the longest tiles of all first, for all blocks to finish at once.
      const int rows = a.batch * heads, single = rows - a.last_heads;
      const int first = min(index / a.query_tiles, single);
      const int count = first < single ? 1 : a.last_heads;
      const int rest = index - first * a.query_tiles;
      row = first + rest % count;
      block = a.query_tiles - 1 - rest / count;
    }
    tile->batch = row / heads;
    tile->head = row % heads;
  }
  tile->query = block * Tile::kQueries;
  const int shift = tile->k_len - tile->q_len;
  const int last_query = min(tile->query + Tile::kQueries, tile->q_len) - 1;
  const int end_key = min(tile->k_len, last_query + shift + a.right + 1);
  const int first_key = max(0, tile->query + shift - a.left);
  tile->first_block = first_key / Tile::kKeys;
  tile->end_block =
      end_key > first_key ? (end_key + Tile::kKeys - 1) / Tile::kKeys : tile->first_block;
  return true;
}

#endif

}  // namespace fk::cuda_sm90
