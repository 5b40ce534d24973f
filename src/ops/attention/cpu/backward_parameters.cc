// This file computes attention's gradients dbias and dsinks on the CPU.
//
// The gradient of bias is ds, before softcap, summed over whatever bias is repeated along. It is
// found apart from dq, dk and dv, by items that each own a piece of it: where bias has queries, 64
// of them, and where it has keys, 64 of those. An item goes through all it sums over in order, and
// adds tiles up before it adds lanes up. This costs the scores and dp once more, and keeps the
// result the same whichever thread did what.

#include "core/integers.h"
#include "ops/attention/attention.h"
#include "ops/attention/cpu/backward_plan.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/attention/cpu/backward_parameters.cc"
#include "cpu/foreach_target.h"
#include "ops/attention/cpu/backward_simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

// A run of indices is one of them, or all.
struct Run {
  int64_t begin, end;

  static Run of(bool repeated, int64_t index, int64_t count) {
    return repeated ? Run{0, count} : Run{index, index + 1};
  }
};

// Adds ds of a block of queries and the keys [from, to) to scratch.sum.
void add_tile(const BackwardJob& job, const BackwardScratch& scratch, const QueryGroup& q,
              int64_t from, int64_t to) {
  const F32 d;
  const CpuCall& call = job.call;
  const KeyRange seen = q.keys_seen(call.p.mask, 0, q.n);
  if (seen.begin >= to || seen.end <= from) return;
  const int64_t g = q.h / call.p.group();
  const MatrixB k = keys_of(call, q.s, q.b, g, from, to - from, scratch.keys);
  const MatrixB v = values_of(call, q.s, q.b, g, from, to - from, scratch.values);
  const BlockTile tile(q, call.p.mask, from, to);
  tile_gradient(job, scratch, ScoreRules(call, q, scratch.bias), tile, from, k, v, true, true);
  for (const KeyRun& run : tile) {
    for (int64_t j = run.from - from; j < run.to - from; ++j) {
      for (int64_t i = run.begin; i < run.end; i += hn::Lanes(d)) {
        float* p = scratch.sum + j * kQueryBlock + i;
        hn::StoreU(hn::Add(hn::LoadU(d, p), hn::LoadU(d, scratch.ds + j * kQueryBlock + i)), d, p);
      }
    }
  }
}

void bias_item(const BackwardJob& job, void* memory, int64_t item) {
  const CpuCall& call = job.call;
  const attention::Problem& p = call.p;
  WorkspaceParts parts(memory);
  const BackwardScratch scratch(job, parts);
  const bool all_b = job.bias_size[0] == 1, all_h = job.bias_size[1] == 1;
  const bool all_q = job.bias_size[2] == 1, all_k = job.bias_size[3] == 1;
  const int64_t q_blocks = attention::blocks_of(p.q_len);
  const int64_t k_blocks = ceil_div(p.k_len, kBackwardKeys);

  // Items count through (B, heads, blocks of queries, blocks of keys).
  const int64_t k_items = all_k ? 1 : k_blocks, q_items = all_q ? 1 : q_blocks;
  const int64_t k_index = item % k_items, q_index = item / k_items % q_items;
  const int64_t h_index = item / (k_items * q_items) % job.bias_size[1];
  const int64_t b_index = item / (k_items * q_items * job.bias_size[1]);
  const Run bs = Run::of(all_b, b_index, p.batch), hs = Run::of(all_h, h_index, p.heads);
  const Run qs = Run::of(all_q, q_index, q_blocks), ks = Run::of(all_k, k_index, k_blocks);

  std::fill_n(scratch.sum, kBackwardKeys * kQueryBlock, 0.0f);
  for (int64_t b = bs.begin; b < bs.end; ++b) {
    for (int64_t h = hs.begin; h < hs.end; ++h) {
      for (int64_t i = qs.begin; i < qs.end; ++i) {
        const int64_t first = i * kQueryBlock;
        const QueryGroup q{p.sequence(b), b, h, 1, first, std::min(kQueryBlock, p.q_len - first)};
        load_queries(job, scratch, q, true);
        for (int64_t j = ks.begin; j < ks.end; ++j) {
          add_tile(job, scratch, q, j * kBackwardKeys, std::min((j + 1) * kBackwardKeys, p.k_len));
        }
      }
    }
  }

  const int64_t first_q = all_q ? 0 : q_index * kQueryBlock;
  const int64_t first_k = all_k ? 0 : k_index * kBackwardKeys;
  const int64_t queries = all_q ? 1 : std::min(kQueryBlock, p.q_len - first_q);
  const int64_t keys = all_k ? 1 : std::min(kBackwardKeys, p.k_len - first_k);
  float* rows = scratch.p;
  for (int64_t i = 0; i < queries; ++i) {
    for (int64_t j = 0; j < keys; ++j) {
      const Run lanes = Run::of(all_q, i, kQueryBlock),
                tile_rows = Run::of(all_k, j, kBackwardKeys);
      double sum = 0;
      for (int64_t r = tile_rows.begin; r < tile_rows.end; ++r) {
        for (int64_t l = lanes.begin; l < lanes.end; ++l) sum += scratch.sum[r * kQueryBlock + l];
      }
      rows[i * kBackwardKeys + j] = static_cast<float>(sum);
    }
  }
  unpack_rows(
      rows, kBackwardKeys, queries, keys, nullptr,
      CpuCall::rows(job.dbias, job.dbias_dtype, b_index, h_index, 0).from(first_q, first_k));
}

void sink_item(const BackwardJob& job, void* memory, int64_t h) {
  const CpuCall& call = job.call;
  WorkspaceParts parts(memory);
  const BackwardScratch scratch(job, parts);
  const double sink = read_one(call.sinks.data, call.sinks.dtype, h * call.sinks.stride(0));
  double sum = 0;
  for (int64_t b = 0; b < call.p.batch; ++b) {
    const Sequence s = call.p.sequence(b);
    for (int64_t first = 0; first < s.q_len; first += kQueryBlock) {
      const QueryGroup q{s, b, h, 1, first, std::min(kQueryBlock, s.q_len - first)};
      load_sums(job, scratch, q);
      for (int64_t i = 0; i < q.n; ++i) {
        sum -= std::exp(sink - static_cast<double>(scratch.lse[i])) * scratch.delta[i];
      }
    }
  }
  const Tensor& out = job.dsinks;
  scratch.p[0] = static_cast<float>(sum);
  unpack_rows(scratch.p, kQueryBlock, 1, 1, nullptr,
              MatrixView{out.data, out.dtype, out.stride(0), 1}.from(h));
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fk::cpu {

using attention::BackwardJob;
using attention::WorkerMemory;

namespace {

FK_CPU_EXPORT(bias_item);
FK_CPU_EXPORT(sink_item);

}  // namespace

int64_t bias_items(const BackwardJob& job) {
  const attention::Problem& p = job.call.p;
  const int64_t* size = job.bias_size;
  const int64_t keys = ceil_div(p.k_len, attention::kBackwardKeys);
  return size[0] * size[1] * (size[2] == 1 ? 1 : attention::blocks_of(p.q_len)) *
         (size[3] == 1 ? 1 : keys);
}

void run_bias_gradient(const BackwardJob& job, const WorkerMemory& memory, int64_t workers,
                       const Exec& exec) {
  const auto kernel = FK_CPU_DISPATCH(bias_item);
  attention::run_neighbours_on_workers(
      exec, workers, bias_items(job),
      [&](int64_t worker, int64_t item, int64_t) { kernel(job, memory.of(worker), item); });
}

void run_sink_gradient(const BackwardJob& job, const WorkerMemory& memory, int64_t workers,
                       const Exec& exec) {
  const auto kernel = FK_CPU_DISPATCH(sink_item);
  attention::run_neighbours_on_workers(
      exec, workers, job.call.p.heads,
      [&](int64_t worker, int64_t item, int64_t) { kernel(job, memory.of(worker), item); });
}

}  // namespace fk::cpu
#endif
