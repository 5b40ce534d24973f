// This file holds what the CPU kernels of attention share: the call, how it is cut into blocks of
// queries, and the memory they work in.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>

#include "core/exec.h"
#include "core/integers.h"
#include "core/workspace.h"
#include "cpu/gemm/view.h"
#include "cpu/workers.h"
#include "ops/attention/problem.h"

namespace fk::attention {

using cpu::kMostWorkers;
using cpu::MatrixView;
using cpu::padded_columns;
using cpu::worker_limit;

// This many queries are worked on together: a multiple of every instruction set's panel_width().
constexpr int64_t kQueryBlock = 64;

// Calls of fewer multiply-adds are over before a second thread has woken.
constexpr double kInlineProducts = 1 << 18;

// The memory of two workers is so many bytes apart. If they shared a page, what a processor fetches
// ahead of one worker's reads would often be the other's.
constexpr int64_t kWorkerGap = 4096;

constexpr int64_t blocks_of(int64_t queries) { return ceil_div(queries, kQueryBlock); }

// Sums are added to these rows, which are memory of the kernel's own or the tensor they are meant
// for.
struct SumRows {
  float* data;
  int64_t stride;

  void clear(int64_t rows, int64_t width) const {
    for (int64_t r = 0; r < rows; ++r) std::fill_n(data + r * stride, width, 0.0f);
  }
};

// Holds the inputs of either op. 8-bit ones have become bfloat16.
struct CpuCall {
  Problem p;
  View q, k, v, bias, slopes;
  DType bias_dtype, slopes_dtype;
  Tensor sinks, rotary_cos, rotary_sin;
  bool rotary_interleaved, has_bias;
  Scales scales;

  int64_t q_width() const { return padded_columns(p.head_dim); }
  int64_t v_width() const { return padded_columns(p.value_dim); }

  // Returns whether rows of `width` columns lie as kernels work with them. If so, those that are
  // used or written once need no copy; the others should still lie side by side.
  bool has_kernel_layout(const View& view, int64_t width) const {
    return p.dtype == DType::kFloat32 && view.column == 1 && width == padded_columns(width);
  }

  // Returns the rows of head `head` of sequence `b`, which begins at row `begin`.
  MatrixView rows(const View& view, int64_t b, int64_t head, int64_t begin) const {
    return rows(view, p.dtype, b, head, begin);
  }
  static MatrixView rows(const View& view, DType dtype, int64_t b, int64_t head, int64_t begin) {
    const int64_t offset = b * view.batch + head * view.head + begin * view.row;
    return {static_cast<char*>(view.data) + offset * size_of(dtype), dtype, view.row, view.column};
  }
};

template <class Args>
CpuCall cpu_call_of(const Args& a) {
  return {problem_of(a),
          view(a.q),
          view(a.k),
          view(a.v),
          bias_view(a.bias),
          slope_view(a.alibi_slopes),
          a.bias.dtype,
          a.alibi_slopes.dtype,
          a.sinks,
          a.rotary_cos,
          a.rotary_sin,
          a.rotary_interleaved,
          static_cast<bool>(a.bias),
          scales_of(a)};
}

// Returns where the rows of keys of a sequence's head begin in a copy of k or v that has each
// head's keys of a batch's sequence, or of the whole pack, together.
inline int64_t copied_row(const Problem& p, const Sequence& s, int64_t b, int64_t g) {
  return p.packed ? g * p.k_len + s.k_begin : (b * p.kv_heads + g) * p.k_len;
}
inline int64_t copied_rows(const Problem& p) {
  return (p.packed ? 1 : p.batch) * p.kv_heads * p.k_len;
}

// Returns which of the packed sequences a row of k belongs to.
inline int64_t sequence_of_key(const Problem& p, int64_t row) {
  int64_t low = 0, high = p.batch - 1;  // the last sequence that begins at or before the row
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (p.cu_k[middle * p.cu_k_stride] <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Returns the multiply-adds of a forward that sees all keys.
inline int64_t products_of(const Problem& p) {
  const int64_t pairs =
      p.packed ? p.q_len * p.k_len / std::max<int64_t>(1, p.batch) : p.batch * p.q_len * p.k_len;
  return pairs * p.heads * (p.head_dim + p.value_dim);
}

// A range of keys holds all that any of the queries [first, first + n) sees.
struct KeyRange {
  int64_t begin, end;
};
inline KeyRange keys_seen(const Mask& mask, const Sequence& s, int64_t first, int64_t n) {
  const int64_t begin = mask.first_key(first, s.q_len, s.k_len);
  const int64_t end = mask.end_key(first + n - 1, s.q_len, s.k_len);
  return {begin, std::max(begin, end)};
}

// Returns how many heads' queries share a block. Where a few queries meet many keys (decoding),
// these are all of the heads that share those keys, so that the keys are read once.
inline int64_t heads_at_once(const Problem& p) {
  return p.q_len * p.group() <= kQueryBlock ? p.group() : 1;
}

// Lists all blocks of queries: those of a sequence's head one after another, the last first, since
// it is the longest where the mask is causal. Threads take one at a time, so that they end
// together.
struct QueryBlocks {
  int64_t heads_at_once = 1;  // neighbours whose queries make one block
  int64_t heads = 0;          // groups of so many
  int64_t per_sequence = 0, count = 0;
  int64_t batch = 0;
  const int64_t* begins = nullptr;  // packed: where each sequence's blocks begin, and their number

  struct Block {
    int64_t b, h, first;  // first query
  };
  Block operator[](int64_t i) const {
    int64_t b, blocks;
    if (begins == nullptr) {
      b = i / (heads * per_sequence);
      blocks = per_sequence;
      i -= b * heads * per_sequence;
    } else {
      b = std::upper_bound(begins, begins + batch + 1, i / heads) - begins - 1;
      blocks = begins[b + 1] - begins[b];
      i -= begins[b] * heads;
    }
    const int64_t h = i / blocks;
    return {b, h * heads_at_once, (blocks - 1 - (i - h * blocks)) * kQueryBlock};
  }
};

// `begins` has room for batch + 1 numbers where sequences are packed.
inline QueryBlocks query_blocks_of(const Problem& p, int64_t* begins) {
  QueryBlocks blocks;
  blocks.heads_at_once = heads_at_once(p);
  blocks.heads = p.heads / blocks.heads_at_once;
  blocks.batch = p.batch;
  if (!p.packed) {
    blocks.per_sequence = blocks_of(p.q_len);
    blocks.count = p.batch * blocks.heads * blocks.per_sequence;
    return blocks;
  }
  int64_t total = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    begins[b] = total;
    total += blocks_of(p.sequence(b).q_len);
  }
  begins[p.batch] = total;
  blocks.begins = begins;
  blocks.count = total * blocks.heads;
  return blocks;
}

// Returns at least as many blocks as query_blocks_of will find, without a look at where sequences
// begin.
inline int64_t most_query_blocks(const Problem& p) {
  return p.heads / heads_at_once(p) *
         (p.packed ? p.q_len / kQueryBlock + std::min(p.batch, p.q_len)
                   : p.batch * blocks_of(p.q_len));
}

inline int64_t workers_for(const Problem& p, int64_t items) {
  if (products_of(p) <= kInlineProducts) return 1;
  return std::clamp<int64_t>(items, 1, worker_limit());
}

// Calls body(worker, item, next) for all items, where `next` is the item the worker will do after
// this one, or -1. Each worker has a run of neighbours to itself, so that call after call it finds
// what it touches in the caches near it, and helps others with theirs when it is done. Which worker
// gets an item is up to chance; what it does must not depend on it.
template <class Body>
void run_neighbours_on_workers(const Exec& exec, int64_t workers, int64_t items, const Body& body) {
  struct alignas(64) Counter {
    std::atomic<int64_t> value;
  };
  Counter taken[kMostWorkers];
  for (int64_t i = 0; i < workers; ++i) taken[i].value = items * i / workers;
  exec.parallel_for(workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      int64_t run = worker;
      const auto take = [&]() -> int64_t {
        for (int64_t tried = 0; tried < workers; ++tried, run = (run + 1) % workers) {
          const int64_t item = taken[run].value.fetch_add(1, std::memory_order_relaxed);
          if (item < items * (run + 1) / workers) return item;
        }
        return -1;
      };
      for (int64_t item = take(), next; item >= 0; item = next) {
        next = take();
        body(worker, item, next);
      }
    }
  });
}

}  // namespace fk::attention
