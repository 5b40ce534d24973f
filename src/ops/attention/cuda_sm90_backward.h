// What the host and the kernels of attention's backward on Hopper share.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ops/attention/problem.h"

namespace fk::cuda_sm90::backward {

constexpr int kN = 128;            // keys a block owns
constexpr int kThreads = 384;      // a warpgroup that loads, two that compute
constexpr int kConsumerWarps = 8;  // of those two
constexpr int kFar = 1 << 29;      // a mask's distance without limit; lengths are shorter

// What a kernel is made for: nothing special (and 80 queries a block: no mask either); packed
// sequences; softcap and slopes, packed or not.
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
  int* turns;      // [block of sums][warp]: key blocks added so far, from 0; null: any order
  int slots, tiles, m_blocks, n_blocks, kv_heads, group;
  int ring, sum_stride;  // the latter: blocks from one head of a group to the next
  // Order of the tiles: key block by key block, `heads_together` heads at a time, those from
  // `last_heads` on all together.
  int heads_together, last_heads;
  bool descending;  // key blocks from the last to the first
  int left, right;
  float scale, scale_log2, softcap;
};

}  // namespace fk::cuda_sm90::backward
