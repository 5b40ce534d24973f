// This file holds the vector code that the gradients of attention on the CPU share: it makes a
// block of queries ready, and computes p and ds of a tile.

#include "ops/attention/cpu/backward_plan.h"

// Highway includes this file once for each target.
#if defined(FK_ATTENTION_CPU_BACKWARD_SIMD_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_ATTENTION_CPU_BACKWARD_SIMD_PER_TARGET
#undef FK_ATTENTION_CPU_BACKWARD_SIMD_PER_TARGET
#else
#define FK_ATTENTION_CPU_BACKWARD_SIMD_PER_TARGET
#endif

#include "ops/attention/cpu/forward_simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

using attention::BackwardJob;
using attention::BackwardScratch;
using attention::kBackwardKeys;

template <class T>
void dot_rows(const MatrixView& x, const MatrixView& y, int64_t rows, int64_t columns,
              float* sums) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  const int64_t whole = x.column == 1 && y.column == 1 ? columns / lanes * lanes : 0;
  const T *a = static_cast<const T*>(x.data), *b = static_cast<const T*>(y.data);
  for (int64_t i = 0; i < rows; ++i, a += x.row, b += y.row) {
    V sum = hn::Zero(d);
    int64_t c = 0;
    for (; c < whole; c += lanes) sum = hn::MulAdd(LoadF32(d, a + c), LoadF32(d, b + c), sum);
    for (; c < columns; c += lanes) {
      const size_t n = static_cast<size_t>(std::min(lanes, columns - c));
      sum = hn::MulAdd(LoadStridedF32(d, a + c * x.column, x.column, n),
                       LoadStridedF32(d, b + c * y.column, y.column, n), sum);
    }
    sums[i] = ReduceSum(d, sum);
  }
}

// Sets sums[i] = x[i] . y[i] for rows of the same type.
HWY_INLINE void dot_rows(const MatrixView& x, const MatrixView& y, int64_t rows, int64_t columns,
                         float* sums) {
  ByDType(x.dtype,
          [&](auto t) FK_MATRIX_BODY { dot_rows<decltype(t)>(x, y, rows, columns, sums); });
}

// Loads lse and computes delta, which is what a change of all scores of a query at once would do to
// the loss. A query that saw nothing, and the lanes after the last query, get lse = inf, which
// makes every p zero.
void load_sums(const BackwardJob& job, const BackwardScratch& scratch, const QueryGroup& q) {
  const CpuCall& call = job.call;
  const int64_t row = q.s.q_begin + q.first, lanes = whole_vectors(q.n);
  dot_rows(call.rows(job.dout, q.b, q.h, row), call.rows(job.out, q.b, q.h, row), q.n,
           call.p.value_dim, scratch.delta);
  const MatrixView lse = CpuCall::rows(job.lse, DType::kFloat32, q.b, q.h, row);
  const MatrixView dlse = CpuCall::rows(job.dlse, DType::kFloat32, q.b, q.h, row);
  for (int64_t i = 0; i < q.n; ++i) {
    if (job.dlse.data != nullptr) {
      scratch.delta[i] -= static_cast<const float*>(dlse.data)[i * dlse.row];
    }
    const float value = static_cast<const float*>(lse.data)[i * lse.row];
    scratch.lse[i] = value == -kInfinity ? kInfinity : value;
  }
  std::fill(scratch.lse + q.n, scratch.lse + lanes, kInfinity);
  std::fill(scratch.delta + q.n, scratch.delta + lanes, 0.0f);
}

// These are a block's rows of q and dout, as right operands of products.
struct QueryRows {
  MatrixB queries, douts;
};

// Loads all that a block needs before it meets keys. `once` says that the rows will be used a
// single time, so they stay where they are if they can.
QueryRows load_queries(const BackwardJob& job, const BackwardScratch& scratch, const QueryGroup& q,
                       bool once) {
  const CpuCall& call = job.call;
  const int64_t row = q.s.q_begin + q.first, lanes = (q.n + 3) / 4 * 4;
  const auto load = [&](const View& view, int64_t columns, float* room, bool rotated) HWY_ATTR {
    const MatrixView rows = call.rows(view, q.b, q.h, row);
    if (once && call.has_kernel_layout(view, columns) && !rotated && lanes == q.n) {
      return MatrixB{static_cast<const float*>(rows.data), rows.row};
    }
    const int64_t width = padded_columns(columns);
    pack_rows(rows, q.n, columns, room, width);
    if (rotated) rotate_rows(call, room, width, q.n, q.first + q.s.k_len - q.s.q_len, 1.0f);
    std::fill(room + q.n * width, room + lanes * width, 0.0f);
    return MatrixB{room, width};
  };
  const QueryRows rows{
      load(call.q, call.p.head_dim, scratch.queries, static_cast<bool>(call.rotary_cos)),
      load(job.dout, call.p.value_dim, scratch.douts, false)};
  // q is scaled as the forward scaled it, so that p of a query that sees one key is 1.
  transpose_scaled(rows.queries.data, rows.queries.stride, lanes, call.q_width(), scratch.queries_t,
                   kQueryBlock, static_cast<float>(call.p.scale));
  transpose(rows.douts.data, rows.douts.stride, lanes, call.v_width(), scratch.douts_t,
            kQueryBlock);
  load_sums(job, scratch, q);
  return rows;
}

// Replaces s and dp by p = exp(s - lse) and ds = p (dp - delta) `scale`, for one vector of lanes.
// ds is multiplied with `slope` besides, unless that is NULL.
HWY_INLINE void gradient_column(float* s, float* dp, const float* slope, int64_t keys,
                                const float* lse, const float* delta, float scale) {
  const F32 d;
  const V shift = hn::LoadU(d, lse), less = hn::LoadU(d, delta), factor = hn::Set(d, scale);
  for_each_few(keys, [&](int64_t j, auto count) HWY_ATTR {
    V p[count];
    detail::repeat<count>([&](auto i) FK_MATRIX_BODY {
      p[i] = hn::Sub(hn::LoadU(d, s + (j + i) * kQueryBlock), shift);
    });
    Exp(d, p);
    detail::repeat<count>([&](auto i) FK_MATRIX_BODY {
      const int64_t at = (j + i) * kQueryBlock;
      const V above = hn::Sub(hn::LoadU(d, dp + at), less);
      hn::StoreU(p[i], d, s + at);
      hn::StoreU(hn::Mul(hn::Mul(p[i], factor), above), d, dp + at);
    });
  });
  for (int64_t j = 0; slope != nullptr && j < keys; ++j) {
    float* ds = dp + j * kQueryBlock;
    hn::StoreU(hn::Mul(hn::LoadU(d, ds), hn::LoadU(d, slope + j * kQueryBlock)), d, ds);
  }
}

// The keys of a run are seen by the same vectors of lanes of a tile.
struct KeyRun {
  int64_t from, to;
  int64_t begin, end;  // lanes
};

// A tile is a block of queries and the keys [from, to), four of which are worked on together. Only
// the parts of its p and ds that belong to a run are ever made or used. Products that sum over keys
// or over lanes take few rows at a time where a mask cuts the tile, and leave out what none of
// these rows sees.
class BlockTile {
 public:
  BlockTile(const QueryGroup& q, const Mask& mask, int64_t from, int64_t to)
      : q_(q), mask_(mask), from_(from), to_(to) {
    whole_ = q.sees_all(mask, 0, q.n, from, to);
    if (whole_) {
      runs_[count_++] = {from, to, 0, whole_vectors(q.n)};
      return;
    }
    for (int64_t key = from, end; key < to; key = end) {
      end = std::min(key + 4, to);
      KeyRange lanes = lanes_seeing(key, end);
      if (lanes.begin >= lanes.end) continue;
      lanes.begin = run_begin(lanes.begin);
      lanes.end = lanes.begin + whole_vectors(std::min(run_end(lanes.end), q.n) - lanes.begin);
      KeyRun* last = runs_ + count_ - 1;
      if (count_ > 0 && last->to == key && last->begin == lanes.begin && last->end == lanes.end) {
        last->to = end;
      } else {
        runs_[count_++] = {key, end, lanes.begin, lanes.end};
      }
    }
  }

  const KeyRun* begin() const { return runs_; }
  const KeyRun* end() const { return runs_ + count_; }

  // Calls body(key, end, first, last) with keys and the lanes that see one of them.
  template <class Body>
  HWY_INLINE void for_each_keys(const Body& body) const {
    for (const KeyRun& run : *this) {
      for (int64_t key = run.from, end; key < run.to; key = end) {
        end = whole_ ? run.to : std::min(key + kTileRows, run.to);
        const KeyRange lanes = lanes_seeing(key, end);
        body(key, end, lanes.begin, lanes.end);
      }
    }
  }

  // Calls body(first, last, key, end) with lanes and the keys that one of them sees. There may be
  // none.
  template <class Body>
  HWY_INLINE void for_each_lanes(const Body& body) const {
    for (int64_t lane = 0, end; lane < q_.n; lane = end) {
      end = std::min({q_.n, lane + kTileRows, run_end(lane + 1)});
      if (whole_) end = q_.n;
      const KeyRange seen = q_.keys_seen(mask_, lane, end);
      const int64_t key = std::clamp(seen.begin, from_, to_);
      body(lane, end, key, std::clamp(seen.end, key, to_));
    }
  }

 private:
  static constexpr int64_t kRunLanes = 16;  // whole vectors

  // Runs begin with multiples of kRunLanes, counted from the block's end: where that is the
  // diagonal, fewer vectors are cut by it.
  int64_t run_end(int64_t lane) const {
    const int64_t last = (q_.n + 3) / 4 * 4;
    return last - (last - lane) / kRunLanes * kRunLanes;
  }
  int64_t run_begin(int64_t lane) const {
    return std::max<int64_t>(0, run_end(lane + 1) - kRunLanes);
  }

  KeyRange lanes_seeing(int64_t from, int64_t to) const {
    const int64_t first = mask_.first_query(from, q_.s.q_len, q_.s.k_len) - q_.first;
    const int64_t end = mask_.end_query(to - 1, q_.s.q_len, q_.s.k_len) - q_.first;
    return {std::max<int64_t>(first, 0), std::min(end, q_.n)};
  }

  const QueryGroup& q_;
  const Mask& mask_;
  int64_t from_, to_;
  bool whole_;  // every lane sees every key
  KeyRun runs_[kBackwardKeys];
  int count_ = 0;
};

// Makes p and, if `wants_ds`, ds of a tile, from row 0 on. k and v are the rows of its first key,
// `from`. With `before_cap`, ds is the gradient of the scores that softcap gives, not of q.k.
void tile_gradient(const BackwardJob& job, const BackwardScratch& scratch, const ScoreRules& rules,
                   const BlockTile& tile, int64_t from, MatrixB k, MatrixB v, bool wants_ds,
                   bool before_cap) {
  const CpuCall& call = job.call;
  for (const KeyRun& run : tile) {
    const int64_t keys = run.to - run.from, lanes = run.end - run.begin, row = run.from - from;
    const int64_t offset = row * kQueryBlock + run.begin;
    float *p = scratch.p + offset, *ds = scratch.ds + offset;
    multiply(keys, lanes, call.p.head_dim, {k.from(row).data, k.stride, 1},
             {scratch.queries_t + run.begin, kQueryBlock}, {p, kQueryBlock}, Keep::kNothing,
             nullptr, scratch.ahead);
    if (wants_ds) {
      multiply(keys, lanes, call.p.value_dim, {v.from(row).data, v.stride, 1},
               {scratch.douts_t + run.begin, kQueryBlock}, {ds, kQueryBlock}, Keep::kNothing,
               nullptr, scratch.ahead);
    }
    const auto scale = static_cast<float>(call.p.scale);
    float* slope = call.p.softcap > 0 ? scratch.slope + offset : nullptr;
    rules.apply({run.begin, lanes, run.from, keys, p, kQueryBlock}, slope);
    for (int64_t i = 0; i < lanes; i += hn::Lanes(F32())) {
      gradient_column(p + i, ds + i, slope == nullptr || before_cap ? nullptr : slope + i, keys,
                      scratch.lse + run.begin + i, scratch.delta + run.begin + i,
                      before_cap ? 1.0f : scale);
    }
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_ATTENTION_CPU_BACKWARD_SIMD_PER_TARGET
