// This file computes attention's forward on the CPU.
//
// Floor: D + E multiply-adds per query and key it sees; an exponential adds about an eighth to that
// at D = E = 64. Memory traffic is small beside it.
//
// An item is a block of up to 64 queries of one head, or, where few queries meet many keys, of all
// the heads that share those keys. It works on a panel of queries (one or two vectors, see
// cpu/gemm/tiles.h) and 128 keys at a time, or, if there are no more than 64 keys, on all queries
// that see them: s = k q^T by key and query, the online softmax down its columns, then o = s^T v.
// So k and v are used as they stand, as rows, and only q is ever turned. A panel's scores stay in
// the first-level cache; k and v come from the second. Each panel takes exactly the keys that one
// of its queries sees.
//
// k and v are copied to rows of floats without gaps: once for all the blocks that share them, or,
// where those are few, block by block by whoever needs them, unless they are such rows already.

#include "core/integers.h"
#include "ops/attention/attention.h"

#ifndef FK_OPS_ATTENTION_CPU_ONCE_
#define FK_OPS_ATTENTION_CPU_ONCE_

#include <cmath>

#include "ops/attention/cpu/plan.h"

namespace fk::attention {
namespace {

constexpr int64_t kForwardKeys = 128;
// Copying k and v ahead pays from this many users on: it costs a pass over memory and a barrier.
constexpr int64_t kManyUsers = 4;

struct ForwardScratch {
  float *queries, *queries_t, *scores, *sums, *keys, *values, *bias;

  ForwardScratch(const CpuCall& call, bool shared, WorkspaceParts& parts) {
    const int64_t q_width = call.q_width(), v_width = call.v_width();
    queries = parts.take(kQueryBlock * q_width);
    queries_t = parts.take(kQueryBlock * q_width);
    scores = parts.take(kQueryBlock * kForwardKeys);
    sums = parts.take(kQueryBlock * v_width);
    keys = parts.take(shared ? 0 : kForwardKeys * q_width);
    values = parts.take(shared ? 0 : kForwardKeys * v_width);
    bias = parts.take(call.has_bias ? 2 * kQueryBlock * kForwardKeys : 0);
  }
};

struct ForwardJob {
  CpuCall call;
  View out, lse;
  QueryBlocks blocks;
  bool shared;  // k and v were copied to `keys` and `values`; rows by copied_row
  float *keys, *values;
};

}  // namespace
}  // namespace fk::attention

#endif  // FK_OPS_ATTENTION_CPU_ONCE_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/attention/cpu/forward.cc"
#include "cpu/foreach_target.h"
#include "ops/attention/cpu/forward_simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

using attention::ForwardJob;
using attention::ForwardScratch;
using attention::kForwardKeys;
using attention::SumRows;

// Holds the softmax of a block's queries so far.
struct Softmax {
  alignas(64) float max[kQueryBlock];
  alignas(64) float sum[kQueryBlock];
  alignas(64) float change[kQueryBlock];  // what the new maximum makes of the sums so far
};

// Computes exp(s - max) down the columns of one vector of lanes.
HWY_INLINE void softmax_column(float* s, int64_t keys, int64_t stride, float* max, float* sum,
                               float* change) {
  const F32 d;
  const V before = hn::LoadU(d, max);
  V m0 = before, m1 = before, m2 = before, m3 = before;
  int64_t j = 0;
  for (; j + 4 <= keys; j += 4) {
    const float* p = s + j * stride;
    m0 = hn::Max(m0, hn::LoadU(d, p));
    m1 = hn::Max(m1, hn::LoadU(d, p + stride));
    m2 = hn::Max(m2, hn::LoadU(d, p + 2 * stride));
    m3 = hn::Max(m3, hn::LoadU(d, p + 3 * stride));
  }
  for (; j < keys; ++j) m0 = hn::Max(m0, hn::LoadU(d, s + j * stride));
  const V after = hn::Max(hn::Max(m0, m1), hn::Max(m2, m3));
  // If all scores are -inf so far, their differences would be NaN.
  const V shift = hn::IfThenElse(hn::Eq(after, hn::Set(d, -kInfinity)), hn::Zero(d), after);
  const V factor = Exp(d, hn::Sub(before, shift));

  V sums[2] = {hn::Zero(d), hn::Zero(d)};
  for_each_few(keys, [&](int64_t row, auto count) HWY_ATTR {
    V e[count];
    float* p = s + row * stride;
    detail::repeat<count>(
        [&](auto i) FK_MATRIX_BODY { e[i] = hn::Sub(hn::LoadU(d, p + i * stride), shift); });
    Exp(d, e);
    detail::repeat<count>([&](auto i) FK_MATRIX_BODY {
      hn::StoreU(e[i], d, p + i * stride);
      sums[i % 2] = hn::Add(sums[i % 2], e[i]);
    });
  });
  hn::StoreU(after, d, max);
  hn::StoreU(factor, d, change);
  hn::StoreU(hn::MulAdd(hn::LoadU(d, sum), factor, hn::Add(sums[0], sums[1])), d, sum);
}

// Finishes lanes [begin, end) once they have met all keys: writes their lse, and to `change` what
// their sums are multiplied with.
void finish_lanes(const ForwardJob& job, const QueryGroup& group, int64_t begin, int64_t end,
                  Softmax& state) {
  const CpuCall& call = job.call;
  group.for_each_head(begin, end, [&](int64_t h, int64_t query, int64_t lane, int64_t n) HWY_ATTR {
    const bool has_sink = static_cast<bool>(call.sinks);
    const float sink =
        has_sink ? read_one(call.sinks.data, call.sinks.dtype, h * call.sinks.stride(0)) : 0.0f;
    const float factor = call.scales.values(group.b, h, call.p.group());
    const MatrixView lse =
        CpuCall::rows(job.lse, DType::kFloat32, group.b, h, group.s.q_begin + query);
    for (int64_t i = 0; i < n; ++i) {
      float sum = state.sum[lane + i], max = state.max[lane + i];
      float& inverse = state.change[lane + i];
      float result = -kInfinity;
      if (sum == 0) {  // it saw nothing
        inverse = 0;
      } else {
        inverse = factor;
        if (has_sink) {
          const float larger = sink > max ? sink : max;
          inverse *= std::exp(max - larger);
          sum = sum * std::exp(max - larger) + std::exp(sink - larger);
          max = larger;
        }
        inverse /= sum;
        result = max + std::log(sum);
      }
      if (job.lse.data != nullptr) static_cast<float*>(lse.data)[i * lse.row] = result;
    }
  });
}

// Makes the scores, the softmax and the weighted values of a tile. k and v are the rows of its
// first key. With `at_once` it is the only tile of its lanes, and `sums` is what they get.
void forward_tile(const ForwardJob& job, const ForwardScratch& scratch, const QueryGroup& group,
                  const ScoreRules& rules, const ScoreTile& tile, MatrixB k, MatrixB v,
                  Softmax& state, const SumRows& sums, bool at_once, RowsAhead& ahead) {
  const CpuCall& call = job.call;
  const int64_t begin = tile.begin, end = std::min(begin + tile.lanes, group.lanes());
  multiply(tile.keys, tile.lanes, call.p.head_dim, {k.data, k.stride, 1},
           {scratch.queries_t + begin, kQueryBlock}, {tile.s, tile.stride}, Keep::kNothing, nullptr,
           &ahead);
  rules.apply(tile, nullptr);
  for (int64_t i = 0; i < tile.lanes; i += hn::Lanes(F32())) {
    softmax_column(tile.s + i, tile.keys, tile.stride, state.max + begin + i, state.sum + begin + i,
                   state.change + begin + i);
  }
  if (at_once) finish_lanes(job, group, begin, end, state);
  multiply(end - begin, call.v_width(), tile.keys, {tile.s, 1, tile.stride}, v,
           {sums.data + begin * sums.stride, sums.stride}, at_once ? Keep::kNothing : Keep::kScaled,
           state.change + begin, &ahead);
}

// Returns the rows that block `item` will read and write.
RowsAhead rows_of_block(const ForwardJob& job, int64_t item) {
  RowsAhead rows;
  const CpuCall& call = job.call;
  const auto [b, h, first] = job.blocks[item];
  const Sequence s = call.p.sequence(b);
  const int64_t n = std::min(kQueryBlock, s.q_len - first), g = h / call.p.group();
  const KeyRange seen = attention::keys_seen(call.p.mask, s, first, n);
  const int64_t keys = std::min(seen.end - seen.begin, kForwardKeys);
  rows.add(call.rows(job.out, b, h, s.q_begin + first), n, call.p.value_dim);
  rows.add(call.rows(call.v, b, g, s.k_begin + seen.begin), keys, call.p.value_dim);
  rows.add(call.rows(call.k, b, g, s.k_begin + seen.begin), keys, call.p.head_dim);
  rows.add(call.rows(call.q, b, h, s.q_begin + first), n, call.p.head_dim);
  return rows;
}

void forward_block(const ForwardJob& job, void* memory, int64_t item, int64_t next) {
  const CpuCall& call = job.call;
  WorkspaceParts parts(memory);
  const ForwardScratch scratch(call, job.shared, parts);
  const auto [b, h, first] = job.blocks[item];
  const Sequence s = call.p.sequence(b);
  const QueryGroup group{
      s, b, h, job.blocks.heads_at_once, first, std::min(kQueryBlock, s.q_len - first)};
  const int64_t n = group.lanes(), lanes = whole_vectors(n), g = h / call.p.group();
  const int64_t q_width = call.q_width(), v_width = call.v_width();

  turn_queries(call, group, scratch.queries, scratch.queries_t);
  Softmax state;
  std::fill(state.max, state.max + lanes, -kInfinity);
  std::fill(state.sum, state.sum + lanes, 0.0f);
  const ScoreRules rules(call, group, scratch.bias);

  const KeyRange seen = group.keys_seen(call.p.mask, 0, n);
  const MatrixView out = call.rows(job.out, b, h, s.q_begin + first);
  const bool at_once = seen.begin < seen.end && seen.end - seen.begin <= kForwardKeys &&
                       group.heads == 1 && job.out.data != nullptr &&
                       call.has_kernel_layout(job.out, call.p.value_dim);
  const SumRows sums =
      at_once ? SumRows{static_cast<float*>(out.data), out.row} : SumRows{scratch.sums, v_width};
  if (!at_once) sums.clear(n, v_width);
  RowsAhead ahead = job.shared || next < 0 ? RowsAhead() : rows_of_block(job, next);
  for (int64_t key = seen.begin; key < seen.end; key += kForwardKeys) {
    const int64_t key_end = std::min(key + kForwardKeys, seen.end);
    MatrixB k, v;
    if (job.shared) {
      const int64_t row = attention::copied_row(call.p, s, b, g) + key;
      k = {job.keys + row * q_width, q_width};
      v = {job.values + row * v_width, v_width};
    } else {
      k = keys_of(call, s, b, g, key, key_end - key, scratch.keys);
      v = values_of(call, s, b, g, key, key_end - key, scratch.values);
    }
    for (int64_t i = 0, end; i < n; i = end) {
      // All lanes go together where that many scores fit the cache.
      const bool fits = 2 * (key_end - key) <= kForwardKeys;
      end = fits && group.sees_all(call.p.mask, i, n, key, key_end)
                ? lanes
                : group.panel_end(call.p.mask, i, key, key_end);
      const KeyRange mine = group.keys_seen(call.p.mask, i, std::min(end, n));
      const int64_t from = std::max(mine.begin, key), to = std::min(mine.end, key_end);
      if (from >= to && at_once) {
        SumRows{sums.data + i * sums.stride, sums.stride}.clear(std::min(end, n) - i, v_width);
        finish_lanes(job, group, i, std::min(end, n), state);
      }
      if (from >= to) continue;
      forward_tile(job, scratch, group, rules,
                   {i, end - i, from, to - from, scratch.scores, end - i}, k.from(from - key),
                   v.from(from - key), state, sums, at_once, ahead);
    }
  }
  if (at_once) return;
  finish_lanes(job, group, 0, n, state);
  if (job.out.data == nullptr) return;
  group.for_each_head(0, n, [&](int64_t head, int64_t query, int64_t lane, int64_t count) HWY_ATTR {
    unpack_rows(scratch.sums + lane * v_width, v_width, count, call.p.value_dim,
                state.change + lane, call.rows(job.out, group.b, head, s.q_begin + query));
  });
}

// Makes rows [begin, end) of the copies of k and v.
void copy_keys_and_values(const ForwardJob& job, int64_t begin, int64_t end) {
  const CpuCall& call = job.call;
  const attention::Problem& p = call.p;
  while (begin < end) {
    const int64_t index = begin / p.k_len, row = begin - index * p.k_len;
    const int64_t b = p.packed ? attention::sequence_of_key(p, row) : index / p.kv_heads;
    const int64_t g = p.packed ? index : index - b * p.kv_heads;
    const Sequence s = p.sequence(b);
    const int64_t first = row - s.k_begin, n = std::min(end - begin, s.k_len - first);
    pack_keys(call, s, b, g, first, n, job.keys + begin * call.q_width());
    pack_values(call, s, b, g, first, n, job.values + begin * call.v_width());
    begin += n;
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "ops/attention/cpu/float8.h"

namespace fk::cpu {

using attention::CpuCall;
using attention::ForwardJob;
using attention::ForwardScratch;

namespace {

FK_CPU_EXPORT(forward_block);
FK_CPU_EXPORT(copy_keys_and_values);

struct ForwardMemory {
  int64_t* begins;
  float *keys, *values;
  char* scratch;
  int64_t workers;
  size_t scratch_bytes;

  ForwardMemory(const CpuCall& call, bool shared, WorkspaceParts& parts) {
    const attention::Problem& p = call.p;
    begins = parts.take<int64_t>(p.packed ? p.batch + 1 : 0);
    const int64_t rows = shared ? attention::copied_rows(p) : 0;
    keys = parts.take(rows * call.q_width());
    values = parts.take(rows * call.v_width());
    workers = attention::workers_for(p, attention::most_query_blocks(p));
    WorkspaceParts one(nullptr);
    ForwardScratch(call, shared, one);
    scratch_bytes = one.bytes();
    scratch = parts.take<char>(workers * static_cast<int64_t>(scratch_bytes));
  }
};

bool shares_keys(const attention::Problem& p) {
  const int64_t sequences = std::max<int64_t>(1, p.batch);
  const int64_t length = p.packed ? ceil_div(p.q_len, sequences) : p.q_len;
  const int64_t users = p.group() / attention::heads_at_once(p) * attention::blocks_of(length);
  return users >= attention::kManyUsers;
}

}  // namespace

size_t workspace(const AttentionFwd& a) {
  WorkspaceParts parts(nullptr);
  const CpuCall call = attention::cpu_call_of(attention::widened(a, parts));
  if (call.p.heads == 0) return 0;
  ForwardMemory(call, shares_keys(call.p), parts);
  return parts.bytes();
}

Status run(const AttentionFwd& a, const Exec& exec) {
  WorkspaceParts parts(exec.workspace());
  const AttentionFwd wide = attention::widened(a, parts);
  const CpuCall call = attention::cpu_call_of(wide);
  if (call.p.heads == 0) return {};
  if (a.q.dtype == DType::kFloat8E4M3) {
    attention::widen(a.q, wide.q, exec);
    attention::widen(a.k, wide.k, exec);
    attention::widen(a.v, wide.v, exec);
  }
  const bool shared = shares_keys(call.p);
  const ForwardMemory memory(call, shared, parts);
  const ForwardJob job{call,
                       attention::view(a.out),
                       attention::row_view(a.lse),
                       attention::query_blocks_of(call.p, memory.begins),
                       shared,
                       memory.keys,
                       memory.values};
  if (shared) {
    const auto copy = FK_CPU_DISPATCH(copy_keys_and_values);
    exec.parallel_for(attention::copied_rows(call.p), memory.workers == 1 ? INT64_MAX : 64,
                      [&](int64_t begin, int64_t end) { copy(job, begin, end); });
  }
  const auto kernel = FK_CPU_DISPATCH(forward_block);
  attention::run_neighbours_on_workers(
      exec, memory.workers, job.blocks.count, [&](int64_t worker, int64_t item, int64_t next) {
        kernel(job, memory.scratch + worker * static_cast<int64_t>(memory.scratch_bytes), item,
               next);
      });
  return {};
}

}  // namespace fk::cpu
#endif
