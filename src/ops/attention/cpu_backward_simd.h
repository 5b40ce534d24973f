// Vector code that the gradients of attention on the CPU share: a block of queries made ready, and
// p and ds of a tile.

#include "ops/attention/cpu_backward_plan.h"

// Once per target.
#if defined(FK_ATTENTION_CPU_BACKWARD_SIMD_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_ATTENTION_CPU_BACKWARD_SIMD_PER_TARGET
#undef FK_ATTENTION_CPU_BACKWARD_SIMD_PER_TARGET
#else
#define FK_ATTENTION_CPU_BACKWARD_SIMD_PER_TARGET
#endif

#include "ops/attention/cpu_simd.h"

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
  const T *a = static_cast<const T*>(x.data), *b = static_cast<const T*>(y.data);
  for (int64_t i = 0; i < rows; ++i, a += x.row, b += y.row) {
    V sum = hn::Zero(d);
    for (int64_t c = 0; c < columns; c += lanes) {
      const size_t n = static_cast<size_t>(std::min(lanes, columns - c));
      if (x.column != 1 || y.column != 1) {
        sum = hn::MulAdd(LoadStridedF32(d, a + c * x.column, x.column, n),
                         LoadStridedF32(d, b + c * y.column, y.column, n), sum);
      } else if (c + lanes <= columns) {
        sum = hn::MulAdd(LoadF32(d, a + c), LoadF32(d, b + c), sum);
      } else {
        sum = hn::MulAdd(LoadNF32(d, a + c, n), LoadNF32(d, b + c, n), sum);
      }
    }
    sums[i] = ReduceSum(d, sum);
  }
}

// sums[i] = x[i] . y[i] for rows of the same type.
HWY_INLINE void dot_rows(const MatrixView& x, const MatrixView& y, int64_t rows, int64_t columns,
                         float* sums) {
  switch (x.dtype) {
    case DType::kFloat16:
      return dot_rows<float16_t>(x, y, rows, columns, sums);
    case DType::kBFloat16:
      return dot_rows<bfloat16_t>(x, y, rows, columns, sums);
    default:
      return dot_rows<float>(x, y, rows, columns, sums);
  }
}

// lse, and delta: what a change of all scores of a query at once would do to the loss. A query that
// saw nothing, and the lanes after the last query, get lse = inf, which makes every p zero.
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

void scale_rows(float* x, int64_t stride, int64_t rows, int64_t columns, float scale) {
  const F32 d;
  for (int64_t r = 0; r < rows; ++r, x += stride) {
    for (int64_t c = 0; c < columns; c += hn::Lanes(d)) {
      hn::StoreU(hn::Mul(hn::LoadU(d, x + c), hn::Set(d, scale)), d, x + c);
    }
  }
}

// All that a block needs before it meets keys.
void load_queries(const BackwardJob& job, const BackwardScratch& scratch, const QueryGroup& q) {
  const CpuCall& call = job.call;
  const int64_t q_width = call.q_width(), v_width = call.v_width(), lanes = whole_vectors(q.n);
  pack_rows(call.rows(call.q, q.b, q.h, q.s.q_begin + q.first), q.n, call.p.head_dim,
            scratch.queries, q_width);
  if (call.rotary_cos) {
    rotate_rows(call, scratch.queries, q_width, q.n, q.first + q.s.k_len - q.s.q_len, 1.0f);
  }
  std::fill(scratch.queries + q.n * q_width, scratch.queries + lanes * q_width, 0.0f);
  transpose(scratch.queries, q_width, lanes, q_width, scratch.queries_t, kQueryBlock);
  // As the forward did it: p of a query that sees one key is 1.
  scale_rows(scratch.queries_t, kQueryBlock, q_width, lanes, static_cast<float>(call.p.scale));
  load_sums(job, scratch, q);
  pack_rows(call.rows(job.dout, q.b, q.h, q.s.q_begin + q.first), q.n, call.p.value_dim,
            scratch.douts, v_width);
  std::fill(scratch.douts + q.n * v_width, scratch.douts + lanes * v_width, 0.0f);
  transpose(scratch.douts, v_width, lanes, v_width, scratch.douts_t, kQueryBlock);
}

// p = exp(s - lse) and ds = p (dp - delta) `scale` where s and dp stand, for one vector of lanes.
// `slope`: what ds is multiplied with besides; NULL: nothing.
HWY_INLINE void gradient_column(float* s, float* dp, const float* slope, int64_t keys,
                                const float* lse, const float* delta, float scale) {
  const F32 d;
  const V shift = hn::LoadU(d, lse), less = hn::LoadU(d, delta), factor = hn::Set(d, scale);
  for (int64_t j = 0; j < keys; ++j, s += kQueryBlock, dp += kQueryBlock) {
    const V p = Exp(d, hn::Sub(hn::LoadU(d, s), shift));
    V ds = hn::Mul(hn::Mul(p, factor), hn::Sub(hn::LoadU(d, dp), less));
    if (slope != nullptr) ds = hn::Mul(ds, hn::LoadU(d, slope + j * kQueryBlock));
    hn::StoreU(p, d, s);
    hn::StoreU(ds, d, dp);
  }
}

// The end of the panel from lane `begin` on: all that are left where they see the same keys.
int64_t panel_end(const QueryGroup& q, const Mask& mask, int64_t begin, int64_t from, int64_t to) {
  return q.sees_all(mask, begin, q.n, from, to) ? whole_vectors(q.n)
                                                : q.panel_end(mask, begin, from, to);
}

// A panel of a block of queries and the keys [from, to) it sees, rows `row` on of p and ds.
struct PanelTile {
  int64_t begin, end;  // lanes
  int64_t from, to;
  int64_t row;
};

// body(key, end, first, last) for the runs of the keys [from, to) that the same panels see, and the
// lanes from the first of these panels to the last.
template <class Body>
HWY_INLINE void for_each_run(const PanelTile* panels, int64_t n, int64_t from, int64_t to,
                             const Body& body) {
  for (int64_t key = from, end; key < to; key = end) {
    end = to;
    int64_t first = n, last = 0;
    for (const PanelTile* t = panels;; ++t) {
      if (t->from <= key && key < t->to) {
        first = std::min(first, t->begin);
        last = std::min(n, t->end);
        end = std::min(end, t->to);
      } else if (key < t->from) {
        end = std::min(end, t->from);
      }
      if (t->end >= n) break;
    }
    if (first < last) body(key, end, first, last);
  }
}

// p and, if `wants_ds`, ds of a tile. k and v are the rows of its first key. `before_cap`: ds with
// respect to the scores that softcap gives, not to q.k.
void panel_gradient(const BackwardJob& job, const BackwardScratch& scratch, const ScoreRules& rules,
                    const PanelTile& t, MatrixB k, MatrixB v, bool wants_ds, bool before_cap) {
  const CpuCall& call = job.call;
  const int64_t keys = t.to - t.from, lanes = t.end - t.begin;
  const int64_t offset = t.row * kQueryBlock + t.begin;
  float *p = scratch.p + offset, *ds = scratch.ds + offset;
  multiply(keys, lanes, call.p.head_dim, {k.data, k.stride, 1},
           {scratch.queries_t + t.begin, kQueryBlock}, {p, kQueryBlock}, Keep::kNothing, nullptr,
           scratch.ahead);
  if (wants_ds) {
    multiply(keys, lanes, call.p.value_dim, {v.data, v.stride, 1},
             {scratch.douts_t + t.begin, kQueryBlock}, {ds, kQueryBlock}, Keep::kNothing, nullptr,
             scratch.ahead);
  }
  const auto scale = static_cast<float>(call.p.scale);
  float* slope = call.p.softcap > 0 ? scratch.slope + offset : nullptr;
  rules.apply({t.begin, lanes, t.from, keys, p, kQueryBlock}, slope);
  for (int64_t i = 0; i < lanes; i += hn::Lanes(F32())) {
    gradient_column(p + i, ds + i, slope == nullptr || before_cap ? nullptr : slope + i, keys,
                    scratch.lse + t.begin + i, scratch.delta + t.begin + i,
                    before_cap ? 1.0f : scale);
  }
}

// The same for all panels of a block and the keys [from, to), some of which each sees, from row 0
// on; zeros where a panel does not look.
void block_gradient(const BackwardJob& job, const BackwardScratch& scratch, const QueryGroup& q,
                    const ScoreRules& rules, int64_t from, int64_t to, MatrixB k, MatrixB v,
                    bool wants_ds, bool before_cap, PanelTile* panels) {
  const CpuCall& call = job.call;
  const auto clear = [&](const PanelTile& t, int64_t begin, int64_t end) HWY_ATTR {
    for (int64_t j = begin; j < end; ++j) {
      const int64_t row = (j - from) * kQueryBlock;
      std::fill(scratch.p + row + t.begin, scratch.p + row + t.end, 0.0f);
      std::fill(scratch.ds + row + t.begin, scratch.ds + row + t.end, 0.0f);
    }
  };
  for (int64_t i = 0, end; i < q.n; i = end) {
    end = panel_end(q, call.p.mask, i, from, to);
    const KeyRange seen = q.keys_seen(call.p.mask, i, std::min(end, q.n));
    PanelTile& t = *panels++;
    t = {i, end, std::clamp(seen.begin, from, to), std::clamp(seen.end, from, to), 0};
    t.to = std::max(t.from, t.to);
    t.row = t.from - from;
    clear(t, from, t.from);
    if (t.from < t.to) {
      panel_gradient(job, scratch, rules, t, k.from(t.row), v.from(t.row), wants_ds, before_cap);
    }
    clear(t, t.to, to);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_ATTENTION_CPU_BACKWARD_SIMD_PER_TARGET
