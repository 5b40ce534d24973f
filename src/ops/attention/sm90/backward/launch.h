// This file is the host's side of attention's backward on Hopper: it says which kernel takes a
// call, and its plan.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/integers.h"
#include "core/workspace.h"
#include "cuda/launch.h"
#include "ops/attention/sm90/backward/arguments.h"
#include "ops/attention/sm90/backward/order.cuh"

namespace fk::cuda_sm90::backward {

inline bool has_features(const AttentionBwd& a) { return a.alibi_slopes || a.softcap != 0; }

// Returns the head size of the kernel that takes the call. Softcap and slopes have kernels of 64,
// 128 and 256 only.
inline int head_size(const AttentionBwd& a) {
  const int64_t d = std::max(a.q.size(-1), a.v.size(-1));
  if (d <= 64) return 64;
  if (d <= 96 && !has_features(a)) return 96;
  if (d <= 128) return 128;
  return d <= 192 && !has_features(a) ? 192 : 256;
}

// Returns whether two blocks share the sums of dQ of their keys (sm90/backward/pair.cuh).
inline bool in_pairs(const AttentionBwd& a) { return head_size(a) == 192 && a.v.size(-1) <= 128; }

// Returns the queries of a block, as many as the registers hold. At D 128 they are 80, but only
// without masks, in any order, and where not much of the last block is left empty.
inline int queries(const AttentionBwd& a, const attention::Problem& problem, bool deterministic) {
  const int d = head_size(a);
  if (has_features(a) || d > 128) return 64;
  if (d < 128) return d == 64 ? 128 : 80;
  if (deterministic || !problem.mask.unlimited()) return 64;
  // Only the average length of packed sequences is known here.
  if (problem.packed) return problem.q_len >= 768 * problem.batch ? 80 : 64;
  return problem.k_len % 128 == 0 && (problem.q_len + 79) / 80 * 80 * 32 <= problem.q_len * 33 ? 80
                                                                                               : 64;
}

struct Plan {
  attention::Problem problem;
  int d, m, n;  // head size of the kernel, queries and keys a tile
  bool pair;    // tiles are of two blocks
  int64_t m_blocks, n_blocks, slots, blocks, tiles;
  int64_t together, last_tiles, most_together, ring, segment;  // Params
  int64_t beside;  // Params: all, none, or some; the rest after the main kernel
  int parts;       // Params
  // The parts of the workspace begin here, the counters at 0. All before `stats` is 0 at the start.
  int64_t done, converted, turns, sum, stats, list, bytes;

  Plan(const AttentionBwd& a, bool deterministic) : problem(attention::problem_of(a)) {
    d = head_size(a);
    m = queries(a, problem, deterministic);
    pair = in_pairs(a);
    n = pair ? kPairKeys : keys_a_block(d);
    m_blocks = ceil_div(problem.q_len, m);
    n_blocks = ceil_div(problem.k_len, n);
    slots = problem.packed ? problem.q_len / m + problem.batch : problem.batch * m_blocks;
    blocks = slots * problem.heads;
    tiles = (problem.packed ? problem.k_len / n + problem.batch : problem.batch * n_blocks) *
            problem.kv_heads;
    order_tiles(deterministic, a.q.device_id);
    // The last pair of sequence and head may go on behind the ring's end.
    const int64_t sums = ring + (problem.packed && ring < blocks ? slots * problem.group() : 0);
    const int64_t heads = problem.batch * problem.kv_heads;
    done = 256;
    converted = done + WorkspaceParts::rounded(heads * 4);
    turns = converted + WorkspaceParts::rounded((blocks / segment + 1) * 4);
    sum = turns + (deterministic ? WorkspaceParts::rounded(sums * dq_parts(d) * 4) : 0);
    stats = sum + (a.dq ? sums * m * d * 4 : 0);
    list = stats + WorkspaceParts::rounded(blocks * m * 2 * 4);
    bytes = list + (problem.packed ? WorkspaceParts::rounded((tiles + 1) * sizeof(ListedTile)) : 0);
  }

 private:
  // Chooses the order of tiles. Where all key blocks take as long, one head follows another, and
  // what is in use stays in the L2 cache. Under a causal mask the first take the longest, and
  // beginning a long one last would leave most of the chip idle: so some heads go together, and at
  // the end as many as make two tiles a multiprocessor.
  void order_tiles(bool deterministic, int device) {
    const int64_t block_bytes = int64_t{m} * d * 4;
    // These are bytes of sums. Up to kInCache they stay in the L2 cache.
    constexpr int64_t kTogether = 4 << 20, kRing = 24 << 20, kInCache = 36 << 20;
    const int64_t processors = cuda::device_properties(device).multiprocessors / (pair ? 2 : 1);
    const bool causal = problem.mask.right < kFar && problem.mask.left >= kFar && !deterministic;
    together = causal ? kTogether / block_bytes : 0;
    last_tiles = causal ? 2 * processors : 0;
    if (problem.packed) {
      // Any sequence may be as long as all are together.
      const bool small = problem.mask.unlimited() && problem.q_len <= 2048 * problem.batch;
      const int64_t bytes = small ? kRing : kInCache;
      ring = std::max(bytes / block_bytes, 3 * slots * problem.group());
      segment = std::max<int64_t>(1, ring / 16);
      most_together = ring * 10 / 16;
    } else {
      // The ring is never less than what is taken together, or heads would wait for each other. It
      // is long enough that tiles hardly ever wait for the conversion of the head that had their
      // place before.
      const int64_t row = std::max<int64_t>(n_blocks, 1), heads = tiles / row;
      segment = std::max<int64_t>(1, m_blocks * problem.group());
      const int64_t heads_together = std::max<int64_t>(1, together / segment);
      const int64_t last_heads = std::min(heads, ceil_div(last_tiles, row));
      ring = std::max(heads_together, last_heads) + heads_together + 2 * ceil_div(processors, row);
      ring = std::max(ring, kRing / (segment * block_bytes)) * segment;
      most_together = blocks;
    }
    ring = std::min(std::max<int64_t>(ring, 1), blocks);
    // Conversion runs beside the main kernel if there is enough to multiply meanwhile: key blocks
    // that a query sees. Wide heads have no other way.
    const int64_t seen = problem.mask.unlimited() ? n_blocks : n_blocks / 2;
    beside = d > 128 || seen > 4 * (problem.packed ? problem.batch : 1) ? blocks : 0;
    // After the main kernel it is faster as long as all sums stay in the L2 cache; nor is there
    // anything beside the heads that end with the last tiles.
    if (d <= 128 && blocks * block_bytes <= kInCache) beside = 0;
    if (beside > 0 && d <= 128 && !problem.packed) {
      const int64_t row = std::max<int64_t>(n_blocks, 1);
      const int64_t last_heads = ceil_div(std::max(last_tiles, processors), row) + 1;
      beside = blocks - std::min(ring, last_heads * segment);
    }
    if (deterministic || beside == 0) ring = most_together = blocks;
    // Two blocks of threads share a tile where tiles would leave half of the chip idle, or where
    // under a causal mask the longest of them takes twice its share of the whole.
    const bool idle = 2 * tiles <= processors && m_blocks >= (4 * tiles <= processors ? 2 : 5);
    const bool uneven = causal && 2 * tiles > processors && tiles <= processors && n_blocks >= 8;
    const bool apart = d <= 128 && !problem.packed && !deterministic && beside == 0;
    parts = apart && (idle || uneven) ? 2 : 1;
  }
};

// Launches the main kernel, and what runs around it.
Status launch(const AttentionBwd& a, const Exec& exec, void (*kernel)(Params), int shared,
              int threads = kThreads);

// Launches the kernels for head sizes above 128.
Status launch_wide(const AttentionBwd& a, const Exec& exec);

}  // namespace fk::cuda_sm90::backward
