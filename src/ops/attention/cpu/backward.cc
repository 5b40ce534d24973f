// This file computes attention's gradients dq, dk and dv on the CPU.
//
// Floor: 3 D + 2 E multiply-adds per query and key it sees, five products where the forward has
// two: scores again, dp = v dout^T, dv = p dout, dk = ds q and dq^T = k^T ds.
//
// An item is all blocks of 64 queries of the heads that share a key head, or, where there are few
// such heads, every n-th of them. It goes through its blocks of queries one after another,
// and for each through the keys, 64 at a time. p and ds of such a tile stand by key and query,
// which is how dv and dk take them as left and dq^T as right operand, so that nothing but q and
// dout is ever turned. dk and dv of an item are added up in float, in memory of its own; where a
// key head has several items, their sums are then added in order. So nothing depends on the number
// of threads or on which of them was faster.

#include "core/integers.h"
#include "ops/attention/attention.h"

#ifndef FK_OPS_ATTENTION_CPU_BACKWARD_ONCE_
#define FK_OPS_ATTENTION_CPU_BACKWARD_ONCE_

#include "cpu/cache.h"
#include "cpu/gemm/bfloat16.h"
#include "ops/attention/cpu/backward_plan.h"

namespace fk::attention {
namespace {

// Items of one key head have at least this many blocks of queries: each costs a pass over its dk
// and dv.
constexpr int64_t kFewestBlocks = 4;
// From this size on gradients go past the caches, see should_stream.
constexpr int64_t kStreamFromMib = 8;

struct GradientJob {
  const BackwardJob& job;
  int64_t splits;   // items per key head
  KeyMemory items;  // all items' memory, or all workers'
  bool in_pairs;    // by products of bfloat16

  const Problem& problem() const { return job.call.p; }

  // Returns how many rows lie between one worker's keys and the next one's, with a gap (see
  // kWorkerGap).
  static int64_t worker_rows(const Problem& p) {
    return p.k_len + attention::kWorkerGap / (16 * static_cast<int64_t>(sizeof(float)));
  }
  int64_t summed_row(int64_t worker, int64_t b, int64_t g, int64_t split, int64_t begin) const {
    const Problem& p = problem();
    if (p.packed) return (split * p.kv_heads + g) * p.k_len + begin;
    if (splits == 1) return worker * worker_rows(p);
    return ((b * p.kv_heads + g) * splits + split) * p.k_len;
  }
  int64_t copied_row(int64_t worker, int64_t g, int64_t split, int64_t begin) const {
    const Problem& p = problem();
    return p.packed ? (split * p.kv_heads + g) * p.k_len + begin : worker * worker_rows(p);
  }
  // Returns how many rows the pairs of keys take. Each packed sequence begins with a row of its
  // own.
  static int64_t pair_rows(const Problem& p) {
    return ((p.packed ? p.k_len + p.batch : worker_rows(p)) + 1) / 2;
  }
  int64_t pair_row(int64_t worker, int64_t b, int64_t g, int64_t split, int64_t begin) const {
    const Problem& p = problem();
    return p.packed ? (split * p.kv_heads + g) * pair_rows(p) + (begin + b + 1) / 2
                    : worker * pair_rows(p);
  }
};

}  // namespace
}  // namespace fk::attention

#endif  // FK_OPS_ATTENTION_CPU_BACKWARD_ONCE_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/attention/cpu/backward.cc"
#include "cpu/foreach_target.h"
#include "ops/attention/cpu/backward_bfloat16.h"
#include "ops/attention/cpu/backward_simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

using attention::GradientJob;
using attention::KeyMemory;
using attention::KeyRows;
using attention::SumRows;

// Adds x[key, query] y[query, column] to the rows of a tile's keys, which begin with `from`.
template <Store kStore>
void add_keys(RowsAhead* ahead, const BlockTile& tile, int64_t from, const float* x, MatrixB y,
              int64_t width, const SumRows& sums, Keep keep) {
  tile.for_each_keys([&](int64_t key, int64_t end, int64_t first, int64_t last) HWY_ATTR {
    multiply<kStore>(end - key, width, last - first,
                     {x + (key - from) * kQueryBlock + first, kQueryBlock, 1}, y.from(first),
                     {sums.data + key * sums.stride, sums.stride}, keep, nullptr, ahead);
  });
}

// Adds ds[key, query] k[key, column] to the rows of a tile's queries.
template <Store kStore>
void add_queries(RowsAhead* ahead, const BlockTile& tile, int64_t from, const float* ds, MatrixB k,
                 int64_t width, const SumRows& sums, Keep keep) {
  tile.for_each_lanes([&](int64_t first, int64_t last, int64_t key, int64_t end) HWY_ATTR {
    multiply<kStore>(last - first, width, end - key,
                     {ds + (key - from) * kQueryBlock + first, 1, kQueryBlock}, k.from(key - from),
                     {sums.data + first * sums.stride, sums.stride}, keep, nullptr, ahead);
  });
}

// Computes dq of a block of queries, and what the block adds to dk and dv.
void backward_block(const BackwardJob& job, const BackwardScratch& scratch, const QueryGroup& q,
                    const KeyRows& memory) {
  const CpuCall& call = job.call;
  const int64_t q_width = call.q_width(), v_width = call.v_width();
  const bool wants_ds = job.has_dq || job.has_dk;
  const KeyRange seen = q.keys_seen(call.p.mask, 0, q.n);
  const bool once = seen.end - seen.begin <= kBackwardKeys;
  const QueryRows rows = load_queries(job, scratch, q, once);
  const MatrixView dq_rows = call.rows(job.dq, q.b, q.h, q.s.q_begin + q.first);
  const bool in_place = once && !call.rotary_cos && call.has_kernel_layout(job.dq, call.p.head_dim);
  const SumRows dq = in_place ? SumRows{static_cast<float*>(dq_rows.data), dq_rows.row}
                              : SumRows{scratch.dqueries, q_width};
  // Without a limit to the left all queries that see anything see the first key.
  const bool dq_is_empty = call.p.mask.left >= Mask::kUnlimited && seen.begin < seen.end;
  if (job.has_dq && !dq_is_empty) dq.clear(q.n, q_width);
  const ScoreRules rules(call, q, scratch.bias);
  const Keep keep = memory.are_empty ? Keep::kNothing : Keep::kSum;
  const auto add_to_keys =
      job.streams && memory.are_empty ? add_keys<Store::kStream> : add_keys<Store::kCached>;
  const auto add_to_queries =
      job.streams && dq_is_empty ? add_queries<Store::kStream> : add_queries<Store::kCached>;
  for (int64_t from = seen.begin; from < seen.end; from += kBackwardKeys) {
    const BlockTile tile(q, call.p.mask, from, std::min(from + kBackwardKeys, seen.end));
    const MatrixB k{memory.keys + from * memory.key_stride, memory.key_stride};
    const MatrixB v{memory.values + from * memory.value_stride, memory.value_stride};
    tile_gradient(job, scratch, rules, tile, from, k, v, wants_ds, false);
    if (job.has_dv) {
      add_to_keys(scratch.ahead, tile, from, scratch.p, rows.douts, v_width, memory.dvalues, keep);
    }
    if (job.has_dk) {
      add_to_keys(scratch.ahead, tile, from, scratch.ds, rows.queries, q_width, memory.dkeys, keep);
    }
    if (!job.has_dq) continue;
    const Keep keep_dq = dq_is_empty && from == seen.begin ? Keep::kNothing : Keep::kSum;
    add_to_queries(scratch.ahead, tile, from, scratch.ds, k, q_width, dq, keep_dq);
  }
  if (!job.has_dq || in_place) return;
  if (call.rotary_cos) {
    rotate_rows(call, scratch.dqueries, q_width, q.n, q.first + q.s.k_len - q.s.q_len, -1.0f);
  }
  unpack_rows(scratch.dqueries, q_width, q.n, call.p.head_dim, nullptr, dq_rows);
}

// Loads all keys and values of an item. Rows that only one block will use can stay where they are.
void load_keys(const CpuCall& call, const Sequence& s, int64_t b, int64_t g,
               const KeyMemory& memory, KeyRows& rows) {
  if (call.p.group() * s.q_len <= kQueryBlock) {
    const MatrixB k = keys_of(call, s, b, g, 0, s.k_len, memory.keys);
    const MatrixB v = values_of(call, s, b, g, 0, s.k_len, memory.values);
    rows.keys = k.data;
    rows.values = v.data;
    rows.key_stride = k.stride;
    rows.value_stride = v.stride;
  } else {
    pack_keys(call, s, b, g, 0, s.k_len, memory.keys);
    pack_values(call, s, b, g, 0, s.k_len, memory.values);
  }
}

// Stores rows [first, first + n) of dk and dv, whose sums begin at `dkeys` and `dvalues`.
void store_keys(const BackwardJob& job, const Sequence& s, int64_t b, int64_t g, int64_t first,
                int64_t n, float* dkeys, float* dvalues) {
  const CpuCall& call = job.call;
  if (job.has_dk) {
    if (call.rotary_cos) rotate_rows(call, dkeys, call.q_width(), n, first, -1.0f);
    unpack_rows(dkeys, call.q_width(), n, call.p.head_dim, nullptr,
                call.rows(job.dk, b, g, s.k_begin + first));
  }
  if (job.has_dv) {
    unpack_rows(dvalues, call.v_width(), n, call.p.value_dim, nullptr,
                call.rows(job.dv, b, g, s.k_begin + first));
  }
}

// Returns the rows that `item` will read and write first.
RowsAhead rows_of_item(const GradientJob& gradient, int64_t item) {
  RowsAhead rows;
  const BackwardJob& job = gradient.job;
  const CpuCall& call = job.call;
  const int64_t pair = item / gradient.splits;
  const int64_t b = pair / call.p.kv_heads, g = pair - b * call.p.kv_heads;
  const Sequence s = call.p.sequence(b);
  const int64_t keys = std::min(s.k_len, kQueryBlock), queries = std::min(s.q_len, kQueryBlock);
  const int64_t h = g * call.p.group();
  if (!job.streams) {
    rows.add(call.rows(job.dq, b, h, s.q_begin), queries, call.p.head_dim);
    rows.add(call.rows(job.dk, b, g, s.k_begin), keys, call.p.head_dim);
    rows.add(call.rows(job.dv, b, g, s.k_begin), keys, call.p.value_dim);
  }
  rows.add(call.rows(job.dout, b, h, s.q_begin), queries, call.p.value_dim);
  rows.add(call.rows(job.out, b, h, s.q_begin), queries, call.p.value_dim);
  rows.add(call.rows(call.q, b, h, s.q_begin), queries, call.p.head_dim);
  rows.add(call.rows(call.v, b, g, s.k_begin), keys, call.p.value_dim);
  rows.add(call.rows(call.k, b, g, s.k_begin), keys, call.p.head_dim);
  return rows;
}

// Returns whether each key of each sequence is seen by some query.
bool every_key_is_seen(const CpuCall& call, const Sequence& s) {
  const Mask& mask = call.p.mask;
  return s.k_len > 0 && mask.left + mask.right >= 0 && mask.end_query(0, s.q_len, s.k_len) > 0 &&
         mask.first_query(s.k_len - 1, s.q_len, s.k_len) < s.q_len;
}

void backward_item(const GradientJob& gradient, void* memory, int64_t worker, int64_t item,
                   int64_t next) {
  const BackwardJob& job = gradient.job;
  const CpuCall& call = job.call;
  const int64_t q_width = call.q_width(), v_width = call.v_width();
  WorkspaceParts parts(memory);
  BackwardScratch scratch(job, parts);
  RowsAhead ahead;
  scratch.ahead = &ahead;
  const int64_t pair = item / gradient.splits, split = item - pair * gradient.splits;
  const int64_t b = pair / call.p.kv_heads, g = pair - b * call.p.kv_heads;
  const Sequence s = call.p.sequence(b);
  const int64_t copied = gradient.copied_row(worker, g, split, s.k_begin);
  const int64_t summed = gradient.summed_row(worker, b, g, split, s.k_begin);
  const int64_t paired = gradient.pair_row(worker, b, g, split, s.k_begin);
  const KeyMemory& all = gradient.items;
  const KeyMemory mine{all.keys + copied * q_width, all.values + copied * v_width,
                       all.key_pairs + paired * q_width, all.dkeys + summed * q_width,
                       all.dvalues + summed * v_width};
#if FK_CPU_BFLOAT16_TARGET
  const auto load = gradient.in_pairs ? load_key_pairs : load_keys;
  const auto block = gradient.in_pairs ? backward_pairs : backward_block;
#else
  const auto load = load_keys;
  const auto block = backward_block;
#endif

  const int64_t blocks = attention::blocks_of(s.q_len), group = call.p.group();
  const bool in_place = gradient.splits == 1 && group * blocks <= 1 && !call.rotary_cos &&
                        call.has_kernel_layout(job.dk, call.p.head_dim) &&
                        call.has_kernel_layout(job.dv, call.p.value_dim);
  const auto sums_of = [&](const View& view, float* own, int64_t width) {
    const MatrixView rows = call.rows(view, b, g, s.k_begin);
    return in_place ? SumRows{static_cast<float*>(rows.data), rows.row} : SumRows{own, width};
  };
  KeyRows rows{mine.keys,
               mine.values,
               q_width,
               v_width,
               mine.key_pairs,
               sums_of(job.dk, mine.dkeys, q_width),
               sums_of(job.dv, mine.dvalues, v_width),
               call.p.mask.unlimited() || (group * blocks == 1 && every_key_is_seen(call, s))};
  load(call, s, b, g, mine, rows);
  if (!rows.are_empty || split >= group * blocks) {
    if (job.has_dk) rows.dkeys.clear(s.k_len, q_width);
    if (job.has_dv) rows.dvalues.clear(s.k_len, v_width);
  }
  for (int64_t i = split; i < group * blocks; i += gradient.splits) {
    const int64_t head = i / blocks, first = (i - head * blocks) * kQueryBlock;
    const QueryGroup q{s, b, g * group + head, 1, first, std::min(kQueryBlock, s.q_len - first)};
    if (next >= 0 && i + gradient.splits >= group * blocks) ahead = rows_of_item(gradient, next);
    block(job, scratch, q, rows);
    rows.are_empty = false;
  }
  if (gradient.splits == 1 && !in_place) {
    store_keys(job, s, b, g, 0, s.k_len, mine.dkeys, mine.dvalues);
  }
  if (job.streams) hwy::FlushStream();
}

// Adds the sums of a key head's items up, in order.
void add_items(const GradientJob& gradient, int64_t pair, int64_t first, int64_t n) {
  const F32 d;
  const BackwardJob& job = gradient.job;
  const CpuCall& call = job.call;
  const int64_t b = pair / call.p.kv_heads, g = pair - b * call.p.kv_heads;
  const Sequence s = call.p.sequence(b);
  const auto total = [&](float* sums, int64_t width) HWY_ATTR {
    const auto rows_of = [&](int64_t split) {
      return sums + (gradient.summed_row(0, b, g, split, s.k_begin) + first) * width;
    };
    float* out = rows_of(0);
    for (int64_t split = 1; split < gradient.splits; ++split) {
      const float* more = rows_of(split);
      for (int64_t i = 0; i < n * width; i += hn::Lanes(d)) {
        hn::StoreU(hn::Add(hn::LoadU(d, out + i), hn::LoadU(d, more + i)), d, out + i);
      }
    }
    return out;
  };
  float* dkeys = job.has_dk ? total(gradient.items.dkeys, call.q_width()) : nullptr;
  float* dvalues = job.has_dv ? total(gradient.items.dvalues, call.v_width()) : nullptr;
  store_keys(job, s, b, g, first, n, dkeys, dvalues);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fk::cpu {

using attention::BackwardJob;
using attention::BackwardScratch;
using attention::GradientJob;
using attention::Problem;

namespace {

FK_CPU_EXPORT(backward_item);
FK_CPU_EXPORT(add_items);

// Returns whether gradients should go past the caches: they do where products write each row once
// and where it belongs, and a mask leaves so little to compute that the lines which an ordinary
// store first fetches are waited for.
bool should_stream(const BackwardJob& job) {
  const Problem& p = job.call.p;
  if (p.packed || p.mask.unlimited() || p.group() > 1 || p.q_len > attention::kQueryBlock ||
      p.k_len > attention::kBackwardKeys || job.call.rotary_cos) {
    return false;
  }
  const auto suits = [&](const attention::View& x, int64_t width) {
    const int64_t strides = x.batch | x.row | x.head;
    return x.data != nullptr && job.call.has_kernel_layout(x, width) &&
           streamable(x.data, strides * static_cast<int64_t>(sizeof(float)));
  };
  const int64_t rows = p.batch * p.heads * (p.q_len + p.k_len);
  const int64_t bytes = rows * 2 * (p.head_dim + p.value_dim) * size_of(p.dtype);
  return pays_to_stream(bytes, attention::kStreamFromMib) && suits(job.dq, p.head_dim) &&
         suits(job.dk, p.head_dim) && suits(job.dv, p.value_dim);
}

BackwardJob job_of(const AttentionBwd& a) {
  BackwardJob job{attention::cpu_call_of(a),
                  attention::view(a.dout),
                  attention::view(a.out),
                  attention::row_view(a.lse),
                  attention::row_view(a.dlse),
                  attention::view(a.dq),
                  attention::view(a.dk),
                  attention::view(a.dv),
                  attention::bias_view(a.dbias),
                  static_cast<bool>(a.dq),
                  static_cast<bool>(a.dk),
                  static_cast<bool>(a.dv),
                  static_cast<bool>(a.dbias),
                  a.dsinks,
                  {1, 1, 1, 1},
                  a.dbias.dtype};
  for (int i = 0; i < a.dbias.ndim; ++i) job.bias_size[4 - a.dbias.ndim + i] = a.dbias.shape[i];
  return job;
}

// Returns how many items a key head is cut into, each with sums of its own: so many that a thread
// has two to do, where there are that many blocks.
int64_t splits_of(const Problem& p) {
  const int64_t pairs = p.batch * p.kv_heads;
  if (pairs == 0) return 1;
  const int64_t wanted = 2 * attention::worker_limit();
  const int64_t length = p.packed ? p.q_len / p.batch : p.q_len;
  const int64_t blocks = p.group() * attention::blocks_of(length);
  return std::clamp<int64_t>(ceil_div(wanted, pairs), 1,
                             std::max<int64_t>(1, blocks / attention::kFewestBlocks));
}

// Returns whether cpu/backward_bfloat16.h can make a call's products. It copies rows as they are.
bool works_in_pairs(const BackwardJob& job) {
  const attention::CpuCall& call = job.call;
  return call.p.dtype == DType::kBFloat16 && multiplies_bfloat16() && !call.rotary_cos &&
         call.q.column == 1 && call.k.column == 1 && call.v.column == 1 && job.dout.column == 1;
}

struct BackwardMemory {
  int64_t splits, items, workers;
  attention::KeyMemory keys{};
  attention::WorkerMemory scratch;

  BackwardMemory(const BackwardJob& job, WorkspaceParts& parts) {
    const attention::CpuCall& call = job.call;
    const Problem& p = call.p;
    splits = splits_of(p);
    items = job.has_scores() ? p.batch * p.kv_heads * splits : 0;
    workers =
        attention::workers_for(p, std::max({items, job.has_dbias ? bias_items(job) : 0, p.heads}));
    if (items > 0) {
      const int64_t packed = splits * p.kv_heads * p.k_len;
      const int64_t copied = p.packed ? packed : workers * GradientJob::worker_rows(p);
      const int64_t summed = p.packed ? packed : splits == 1 ? copied : items * p.k_len;
      keys.keys = parts.take(copied * call.q_width());
      keys.values = parts.take(copied * call.v_width());
      const int64_t pairs = GradientJob::pair_rows(p) * (p.packed ? splits * p.kv_heads : workers);
      keys.key_pairs =
          parts.take<uint32_t>(p.dtype == DType::kBFloat16 ? pairs * call.q_width() : 0);
      keys.dkeys = parts.take(job.has_dk ? summed * call.q_width() : 0);
      keys.dvalues = parts.take(job.has_dv ? summed * call.v_width() : 0);
    }
    WorkspaceParts one(nullptr);
    BackwardScratch(job, one);
    scratch.bytes = static_cast<int64_t>(one.bytes()) + attention::kWorkerGap;
    scratch.data = parts.take<char>(workers * scratch.bytes);
  }
};

void add_up_items(const GradientJob& gradient, const Exec& exec) {
  const Problem& p = gradient.problem();
  constexpr int64_t kRows = 128;
  const int64_t chunks = ceil_div(p.k_len, kRows);
  const auto kernel = FK_CPU_DISPATCH(add_items);
  exec.parallel_for(p.batch * p.kv_heads * chunks, 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t pair = i / chunks, first = (i - pair * chunks) * kRows;
      const int64_t length = p.sequence(pair / p.kv_heads).k_len;
      if (first < length) kernel(gradient, pair, first, std::min(kRows, length - first));
    }
  });
}

}  // namespace

size_t workspace(const AttentionBwd& a) {
  const BackwardJob job = job_of(a);
  WorkspaceParts parts(nullptr);
  BackwardMemory(job, parts);
  return parts.bytes();
}

Status run(const AttentionBwd& a, const Exec& exec) {
  BackwardJob job = job_of(a);
  job.streams = should_stream(job);
  WorkspaceParts parts(exec.workspace());
  const BackwardMemory memory(job, parts);
  if (memory.items > 0) {
    const GradientJob gradient{job, memory.splits, memory.keys, works_in_pairs(job)};
    const auto kernel = FK_CPU_DISPATCH(backward_item);
    attention::run_neighbours_on_workers(
        exec, memory.workers, memory.items, [&](int64_t worker, int64_t item, int64_t next) {
          kernel(gradient, memory.scratch.of(worker), worker, item, next);
        });
    if (memory.splits > 1) add_up_items(gradient, exec);
  }
  if (job.has_dbias) run_bias_gradient(job, memory.scratch, memory.workers, exec);
  if (job.dsinks) run_sink_gradient(job, memory.scratch, memory.workers, exec);
  return {};
}

}  // namespace fk::cpu
#endif
