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

// Query blocks have places ("slots") in the workspace: sequence b of a batch from b * m_blocks on,
// of packed ones from q_begin / kM + b on.
struct Params {
  CUtensorMap q, dout, k, v;
  attention::Problem problem;
  attention::View dk, dv, slopes;
  float* dq;       // [heads][slots][block of kM * D, in the order of the registers]; may be null
  float* stats;    // [heads][slots][2][kM]: -lse * log2(e), delta
  int* next_tile;  // 0 at the start
  int* turns;      // [heads][slots][warp]: key blocks added to dq so far, from 0; null: any order
  int slots, tiles, m_blocks, n_blocks, kv_heads, group;
  // Order of the tiles: `heads_together` heads at a time the key blocks before `late`, which most
  // queries see; then the others of all heads.
  int heads_together, late;
  bool descending;  // key blocks from the last to the first
  int left, right;
  float scale, scale_log2, softcap;
};

}  // namespace fk::cuda_sm90::backward
