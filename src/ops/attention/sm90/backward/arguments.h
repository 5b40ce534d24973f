// This file holds what the host and the kernels of attention's backward on Hopper share.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ops/attention/problem.h"

namespace fk::cuda_sm90::backward {

namespace attention = fk::attention;  // and not cuda::attention, whose names are in use too

constexpr int kThreads = 384;      // a warpgroup that loads, two that compute
constexpr int kConsumerWarps = 8;  // of those two
constexpr int kFar = 1 << 29;      // a mask's distance without limit; lengths are shorter

// Kernels are made for head sizes of 64, 96, 128, 192 and 256; smaller ones are padded with zeros
// by the copy engine. A block owns so many keys: dK and dV have to fit into the registers.
FK_HOST_DEVICE constexpr int keys_a_block(int64_t head_size) { return head_size > 128 ? 64 : 128; }
constexpr int kPairKeys = 128;  // of two blocks (sm90/backward/pair.cuh)
// A block of the sum of dQ is added up in so many parts, each by one warp: of 16 columns and all
// queries, at a head size of 64 of half the queries.
FK_HOST_DEVICE constexpr int dq_parts(int64_t head_size) {
  return head_size == 64 ? 8 : static_cast<int>(head_size / 16);
}

// Says what a kernel is made for: batches (at D 128 with 80 queries a block: no masks, and keys
// that fill their blocks); packed sequences (the same, but for the keys); both; both with softcap
// and slopes.
enum class Kind { kBatch, kPacked, kEither, kFeatures };

struct TileSize {
  int queries, keys;
};

enum MapOf { kMapQ, kMapDout, kMapK, kMapV };

// Both are 0 at the start.
struct Counters {
  int tile;   // the next to take
  int block;  // of dQ: the next to bring into its final form
};

// Query blocks have places ("slots") in the workspace: sequence b of a batch has those from b *
// m_blocks on, packed sequence b those from q_begin / kM + b on. That is always enough, and is
// found without a sum over the sequences before. Sequences are taken one after another, and of each
// the key heads. The sums of dQ of such a pair stand one after another, [slots of the
// sequence][group]; counted through all pairs, block i of sums has place i % ring, but a pair goes
// on behind the ring's end.

// The tiles, and the order in which blocks take them, follow from these.
struct TileParams {
  int slots, tiles, m_blocks, n_blocks, kv_heads, group;
  int ring, segment;
  // The tiles are ordered key block by key block, for so many heads of a sequence at a time as have
  // `together` blocks of sums. The heads with the last `last_tiles` tiles go all together, but no
  // more than have `most_together` blocks.
  int together, last_tiles, most_together;
  bool descending;  // key blocks from the last to the first
  int m_step;       // 1: query blocks from the first to the last; -1: from the last to the first
  int left, right;
};

// Says how many heads of a packed sequence, or of a batch, have their tiles taken together, and how
// many at the end.
struct HeadOrder {
  int together, last_heads;
};

struct ListedTile;

struct Params : TileParams {
  CUtensorMap maps[4];  // of q, dout, k and v (map_rows)
  attention::Problem problem;
  attention::View dq, dk, dv, slopes;
  float* sum;    // of dQ: blocks of kM * D, in the order of the registers; null if there is no dq
  float* stats;  // [heads][slots][2][kM]: -lse * log2(e), delta
  const ListedTile* list;  // of packed sequences (list_tiles)
  HeadOrder heads;         // of a batch
  Counters* counters;
  // These are [batch][key heads]: the warps of key blocks whose part of dQ is added. If null,
  // nobody waits for it, and the sums stay what they are.
  int* done;
  int beside;  // so many of the first blocks of sums the main kernel brings into their final form
  int* converted;  // by `segment` blocks of sums: those in their final form, their place 0 again
  int* turns;      // [block of sums][part]: key blocks added so far, from 0; null: any order
  int parts;  // 2: the blocks of a cluster, counted along z, share the queries of its only tile
  int columns, value_columns;  // the head sizes of q and k, of v
  float scale, scale_log2, softcap;
};

}  // namespace fk::cuda_sm90::backward
