// This file declares the arguments of a Hopper forward, of 16-bit elements or of 8-bit floats.
#pragma once

#include "core/integers.h"
#include "ops/attention/problem.h"
#include "ops/attention/sm90/tensors.h"

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
  float slack;       // what a score may exceed the maximum by before that follows
  int value_pieces;  // of 16 bytes in a row of out
  int left, right;   // the mask, limited to what lengths can reach
  int tiles;         // in all; of packed sequences at most
  int query_tiles;   // of one sequence, where they are not packed
  bool last_first;   // the order of tiles: see tile_at
  int end_tiles;     // how many at the end are sorted by length
  int* next_tile;    // 0 at the start; null: every gridDim.x-th tile
};

// Fills in all but the maps, and what only one of the kernels reads. A tile has `queries` queries.
inline void describe_call(const AttentionFwd& a, const attention::Problem& p, int queries,
                          int multiprocessors, ForwardArguments* f) {
  f->batch = static_cast<int>(p.batch);
  f->heads = static_cast<int>(p.heads);
  f->group = static_cast<int>(p.group());
  f->q_len = static_cast<int>(p.q_len);
  f->k_len = static_cast<int>(p.k_len);
  f->packed = p.packed;
  f->cu_q = p.cu_q;
  f->cu_k = p.cu_k;
  f->cu_q_stride = static_cast<int>(p.cu_q_stride);
  f->cu_k_stride = static_cast<int>(p.cu_k_stride);
  f->out_view = attention::view(a.out);
  f->lse = attention::row_view(a.lse);
  if (a.sinks) {
    f->sinks = a.sinks.data;
    f->sink_stride = a.sinks.stride(0);
    f->sink_type = a.sinks.dtype;
  }
  f->scale = static_cast<float>(p.scale);
  f->value_pieces = static_cast<int>(p.value_dim / 8);
  f->left = limit(p.mask.left);
  f->right = limit(p.mask.right);
  f->query_tiles = static_cast<int>(ceil_div(p.q_len, queries));
  f->tiles = f->heads * (p.packed ? f->query_tiles + f->batch : f->query_tiles * f->batch);
  // Some queries may see fewer keys than others.
  f->last_first = p.packed || !p.mask.unlimited();
  // Where lengths differ, three tiles for every multiprocessor are enough for all to end at once.
  f->end_tiles = p.mask.unlimited() ? 0 : 3 * multiprocessors;
}

}  // namespace fk::cuda_sm90
