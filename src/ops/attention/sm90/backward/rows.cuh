// This file is a part of attention's backward on Hopper: it says which rows the passes around the
// main kernel work on, where these have their places in the workspace.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/attention/sm90/backward/arguments.h"
#include "ops/attention/sm90/backward/order.cuh"

namespace fk::cuda_sm90::backward {

struct RowParams : TileParams {
  int head_size;  // of the kernel
  int keys;       // a tile
  bool half;      // dout, out and dq are float16, not bfloat16
  attention::Problem problem;
  attention::View dout, out, lse, dlse, dq;
  float4* zero;  // counters, and sums in a ring
  int64_t zeroes;
  float* sum;
  bool zero_sums;  // there is one for each block
  float* stats;
  ListedTile* list;  // of packed sequences
  int row_blocks;    // blocks of threads for rows; those behind them write the list
  int heads;
  int beside, columns, value_columns;  // Params
  float scale;
};

// Says which rows a slot of the workspace holds.
struct Rows {
  int64_t batch;
  int begin;
  int count;          // may be negative: none
  int first, blocks;  // slots of the sequence: the first of them, how many
};

constexpr int kRowThreads = 256;

// Returns where packed sequence b begins, inside the tensor whatever the offset says.
__device__ __forceinline__ int begin_of(const RowParams& p, int b) {
  return min(max(query_begin(p.problem, b), 0), static_cast<int>(p.problem.q_len));
}

// Returns the last packed sequence b with before(b), which holds for all up to that one. All
// threads of a block call it.
template <class Before>
__device__ __forceinline__ int last_sequence(const RowParams& p, Before before) {
  const int batch = static_cast<int>(p.problem.batch);
  int last = 0;
  for (int first = 1; first < batch; first += kRowThreads) {
    const int b = first + threadIdx.x;
    const int begun = __syncthreads_count(b < batch && before(b));
    last += begun;
    if (begun < kRowThreads) break;
  }
  return last;
}

// All threads of a block call this.
template <int kM>
__device__ __forceinline__ Rows rows_of(const RowParams& p, int slot) {
  if (!p.problem.packed) {
    const int batch = slot / p.m_blocks, row = (slot - batch * p.m_blocks) * kM;
    return {batch, row, min(static_cast<int>(p.problem.q_len) - row, kM), batch * p.m_blocks,
            p.m_blocks};
  }
  const auto first_slot = [&](int b) { return begin_of(p, b) / kM + b; };
  const int b = last_sequence(p, [&](int b) { return first_slot(b) <= slot; });
  const int begin = begin_of(p, b), end = begin_of(p, b + 1), first = begin / kM + b;
  const int row = (slot - first) * kM;
  return {0, begin + row, min(end - begin - row, kM), first, end / kM + 1 - begin / kM};
}

// Returns the place of a block among the sums (Params), if each has one.
__device__ __forceinline__ int place_of_sum(const RowParams& p, const Rows& rows, int slot,
                                            int head) {
  const int kv_head = head / p.group, m = slot - rows.first;
  return rows.first * p.heads + (kv_head * rows.blocks + m) * p.group + head - kv_head * p.group;
}

// Zeroes the sums of the slots that begin among the kM rows from `row` on. Packed sequences have
// slots of their own, whose rows are not those of the blocks of threads. What is behind the last
// row of a sequence, if that is one of these, is filled. `first` is the sequence of the first of
// them.
template <int kM>
__device__ __forceinline__ void begin_slots(const RowParams& p, int row, int head, int first) {
  const int batch = static_cast<int>(p.problem.batch), end = row + kM;
  // Rows beyond the last get lse = inf.
  const auto fill = [&](int slot, int from, int64_t to) {
    float* stats = p.stats + (static_cast<int64_t>(head) * p.slots + slot) * (2 * kM);
    for (int64_t i = from + threadIdx.x; i < to; i += kRowThreads) {
      float* at = stats + i / kM * (2 * kM) + i % kM;
      at[0] = -INFINITY;
      at[kM] = 0.f;
    }
  };
  for (int b = first; b < batch; ++b) {
    const int begin = begin_of(p, b), behind = begin_of(p, b + 1);
    if (begin >= end) break;
    const int slot = begin / kM + b, m = max(row - begin + kM - 1, 0) / kM;
    if (p.zero_sums && begin + m * kM < min(behind, end)) {
      const Rows rows = {0, 0, 0, slot, behind / kM + 1 - begin / kM};
      const int64_t place = place_of_sum(p, rows, slot + m, head);
      const int values = kM * p.head_size;
      float4* sum = reinterpret_cast<float4*>(p.sum + place * values);
      for (int i = threadIdx.x; i < values / 4; i += kRowThreads) {
        sum[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      }
    }
    if (behind > max(begin, row) && behind <= end) {
      int next = b + 1;
      while (next < batch && begin_of(p, next + 1) <= behind) ++next;
      const int next_slot = next < batch ? behind / kM + next : p.slots;
      fill(slot, behind - begin, int64_t{kM} * (next_slot - slot));
    }
    // This fills for the sequences before the first row, which are all of them if there is none.
    if (row == 0 && b == first) fill(0, 0, int64_t{kM} * (behind > 0 ? first : p.slots));
  }
}

}  // namespace fk::cuda_sm90::backward
