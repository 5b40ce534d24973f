// What the host and the kernels of attention's backward on Hopper share.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ops/attention/problem.h"

namespace fk::cuda_sm90::backward {

constexpr int kThreads = 384;      // a warpgroup that loads, two that compute
constexpr int kConsumerWarps = 8;  // of those two
constexpr int kFar = 1 << 29;      // a mask's distance without limit; lengths are shorter

// Kernels are made for head sizes of 64, 96, 128, 192 and 256; smaller ones are padded with zeros
// by the copy engine. A block owns so many keys: dK and dV have to fit into the registers.
FK_HOST_DEVICE constexpr int keys_a_block(int64_t head_size) { return head_size > 128 ? 64 : 128; }
// A block of the sum of dQ is added up in so many parts, each by one warp: of 16 columns and all
// queries, at a head size of 64 of half the queries.
FK_HOST_DEVICE constexpr int dq_parts(int64_t head_size) {
  return head_size == 64 ? 8 : static_cast<int>(head_size / 16);
}

// What a kernel is made for: nothing special (at D 128 with 80 queries a block: no mask either);
// packed sequences, above D 128 batches too; softcap and slopes, packed or not.
enum class Kind { kDense, kPacked, kFeatures };

// All 0 at the start.
struct Counters {
  int tile;   // the next to take
  int block;  // of dQ: the next to bring into its final form
  int done;   // warps of key blocks of all heads
};

// Query blocks have places ("slots") in the workspace: sequence b of a batch from b * m_blocks on,
// of packed ones from q_begin / kM + b on.
struct Params {
  CUtensorMap q, dout, k, v;
  attention::Problem problem;
  attention::View dq, dk, dv, slopes;
  // Sums of dQ: blocks of kM * D, in the order of the registers; null if there is no dq. Packed:
  // [heads][slots]. Otherwise a ring of `ring` places of [group][m_blocks], which the key heads of
  // the batch take in turn.
  float* sum;
  float* stats;  // [heads][slots][2][kM]: -lse * log2(e), delta
  Counters* counters;
  // [batch][key heads]: warps of key blocks whose part of dQ is added. Null: nobody waits for it,
  // and the sums stay what they are.
  int* done;
  int* converted;  // [batch][key heads]: blocks of dQ in their final form, their sum 0 again
  int* turns;      // [block of sums][part]: key blocks added so far, from 0; null: any order
  int slots, tiles, m_blocks, n_blocks, kv_heads, group;
  int ring, sum_stride;  // the latter: blocks from one head of a group to the next
  // Order of the tiles: key block by key block, `heads_together` heads at a time, those from
  // `last_heads` on all together.
  int heads_together, last_heads;
  bool descending;  // key blocks from the last to the first
  int m_step;       // 1: query blocks from the first to the last; -1: from the last to the first
  int left, right;
  int columns, value_columns;  // the head sizes of q and k, of v
  float scale, scale_log2, softcap;
};

}  // namespace fk::cuda_sm90::backward
