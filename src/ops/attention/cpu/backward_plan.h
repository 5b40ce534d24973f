// This file holds what the CPU kernels of attention's backward share: the job and the memory a
// worker works in.
#pragma once

#include "ops/attention/cpu/plan.h"

namespace fk::attention {

// A block of queries meets this many keys at a time: p and ds of both fill the first-level cache.
constexpr int64_t kBackwardKeys = 64;

struct BackwardJob {
  CpuCall call;
  View dout, out, lse, dlse, dq, dk, dv, dbias;
  bool has_dq, has_dk, has_dv, has_dbias;
  Tensor dsinks;
  int64_t bias_size[4];  // dbias as (B, heads, Lq, Lk), 1 where it is repeated
  DType dbias_dtype;
  bool streams = false;  // gradients go past the caches: one product writes each of their rows

  bool has_scores() const { return has_dq || has_dk || has_dv; }
};

// An item's rows of keys lie here.
struct KeyMemory {
  float *keys, *values;  // copies of k and v
  uint32_t* key_pairs;   // see cpu/backward_bfloat16.h
  float *dkeys, *dvalues;
};

// Names what a block of queries reads of its keys and adds to their gradients.
struct KeyRows {
  const float *keys, *values;
  int64_t key_stride, value_stride;  // where not in pairs
  const uint32_t* key_pairs;
  SumRows dkeys, dvalues;
  bool are_empty;  // dkeys and dvalues hold nothing yet, and all rows are going to be written
};

// Holds one worker's memory, for a block of queries at a time.
struct BackwardScratch {
  float *queries, *queries_t, *douts, *douts_t, *dqueries;
  float *p, *ds, *slope, *bias;  // [kBackwardKeys, kQueryBlock] each
  uint32_t* tile_pairs;          // for bfloat16: p once and ds twice, half the size
  float *keys, *values, *sum;    // for dbias
  float *lse, *delta;
  cpu::RowsAhead* ahead = nullptr;  // for what comes next

  BackwardScratch(const BackwardJob& job, WorkspaceParts& parts) {
    const CpuCall& call = job.call;
    const int64_t q_width = call.q_width(), v_width = call.v_width();
    constexpr int64_t kTile = kBackwardKeys * kQueryBlock;
    queries = parts.take(kQueryBlock * q_width);
    queries_t = parts.take(kQueryBlock * q_width);
    douts = parts.take(kQueryBlock * v_width);
    douts_t = parts.take(kQueryBlock * v_width);
    dqueries = parts.take(kQueryBlock * q_width);
    p = parts.take(kTile);
    ds = parts.take(kTile);
    slope = parts.take(call.p.softcap > 0 ? kTile : 0);
    bias = parts.take(call.has_bias ? 2 * kTile : 0);
    tile_pairs = parts.take<uint32_t>(call.p.dtype == DType::kBFloat16 ? 3 * (kTile / 2) : 0);
    keys = parts.take(job.has_dbias ? kBackwardKeys * q_width : 0);
    values = parts.take(job.has_dbias ? kBackwardKeys * v_width : 0);
    sum = parts.take(job.has_dbias ? kTile : 0);
    lse = parts.take(kQueryBlock);
    delta = parts.take(kQueryBlock);
  }
};

struct WorkerMemory {
  char* data;
  int64_t bytes;  // of one worker

  void* of(int64_t worker) const { return data + worker * bytes; }
};

}  // namespace fk::attention

namespace fk::cpu {

// Returns the items of the gradient of bias, each of which owns a piece of it.
int64_t bias_items(const attention::BackwardJob& job);

void run_bias_gradient(const attention::BackwardJob& job, const attention::WorkerMemory& memory,
                       int64_t workers, const Exec& exec);
void run_sink_gradient(const attention::BackwardJob& job, const attention::WorkerMemory& memory,
                       int64_t workers, const Exec& exec);

}  // namespace fk::cpu
