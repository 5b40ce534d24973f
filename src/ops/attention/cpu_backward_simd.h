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

// lse, and delta: what a change of all scores of a query at once would do to the loss. A query that
// saw nothing, and the lanes after the last query, get lse = inf, which makes every p zero.
void load_rows(const BackwardJob& job, const BackwardScratch& scratch, const QueryGroup& q) {
  const F32 d;
  const CpuCall& call = job.call;
  const int64_t width = call.v_width(), row = q.s.q_begin + q.first, lanes = whole_vectors(q.n);
  pack_rows(call.rows(job.dout, q.b, q.h, row), q.n, call.p.value_dim, scratch.douts, width);
  pack_rows(call.rows(job.out, q.b, q.h, row), q.n, call.p.value_dim, scratch.outs, width);
  const MatrixView lse = CpuCall::rows(job.lse, DType::kFloat32, q.b, q.h, row);
  const MatrixView dlse = CpuCall::rows(job.dlse, DType::kFloat32, q.b, q.h, row);
  for (int64_t i = 0; i < q.n; ++i) {
    V sum = hn::Zero(d);
    for (int64_t e = i * width; e < (i + 1) * width; e += hn::Lanes(d)) {
      sum = hn::MulAdd(hn::LoadU(d, scratch.douts + e), hn::LoadU(d, scratch.outs + e), sum);
    }
    scratch.delta[i] = ReduceSum(d, sum);
    if (job.dlse.data != nullptr) {
      scratch.delta[i] -= static_cast<const float*>(dlse.data)[i * dlse.row];
    }
    const float value = static_cast<const float*>(lse.data)[i * lse.row];
    scratch.lse[i] = value == -kInfinity ? kInfinity : value;
  }
  std::fill(scratch.lse + q.n, scratch.lse + lanes, kInfinity);
  std::fill(scratch.delta + q.n, scratch.delta + lanes, 0.0f);
}

// All that a block needs before it meets keys.
void load_queries(const BackwardJob& job, const BackwardScratch& scratch, const QueryGroup& q) {
  const CpuCall& call = job.call;
  const int64_t q_width = call.q_width(), v_width = call.v_width(), lanes = whole_vectors(q.n);
  pack_queries(call, q, lanes, scratch.queries);
  transpose(scratch.queries, q_width, lanes, q_width, scratch.queries_t, kQueryBlock);
  load_rows(job, scratch, q);
  std::fill(scratch.douts + q.n * v_width, scratch.douts + lanes * v_width, 0.0f);
  transpose(scratch.douts, v_width, lanes, v_width, scratch.douts_t, kQueryBlock);
}

// p = exp(s - lse) and ds = p (dp - delta) where s and dp stand, for one vector of lanes. `slope`:
// what ds is multiplied with; NULL: nothing.
HWY_INLINE void gradient_column(float* s, float* dp, const float* slope, int64_t keys,
                                const float* lse, const float* delta) {
  const F32 d;
  const V shift = hn::LoadU(d, lse), less = hn::LoadU(d, delta);
  for (int64_t j = 0; j < keys; ++j, s += kQueryBlock, dp += kQueryBlock) {
    const V p = Exp(d, hn::Sub(hn::LoadU(d, s), shift));
    V ds = hn::Mul(p, hn::Sub(hn::LoadU(d, dp), less));
    if (slope != nullptr) ds = hn::Mul(ds, hn::LoadU(d, slope + j * kQueryBlock));
    hn::StoreU(p, d, s);
    hn::StoreU(ds, d, dp);
  }
}

// A panel of a block of queries and the keys [from, to) it sees, rows `row` on of p and ds.
struct PanelTile {
  int64_t begin, end;  // lanes
  int64_t from, to;
  int64_t row;
};

// p and, if `wants_ds`, ds of a tile. k and v are the rows of its first key.
void panel_gradient(const BackwardJob& job, const BackwardScratch& scratch, const ScoreRules& rules,
                    const PanelTile& t, const float* k, const float* v, bool wants_ds,
                    bool before_cap) {
  const CpuCall& call = job.call;
  const int64_t keys = t.to - t.from, lanes = t.end - t.begin;
  const int64_t offset = t.row * kQueryBlock + t.begin;
  float *p = scratch.p + offset, *ds = scratch.ds + offset;
  multiply(keys, lanes, call.p.head_dim, {k, call.q_width(), 1},
           {scratch.queries_t + t.begin, kQueryBlock}, {p, kQueryBlock}, Keep::kNothing);
  if (wants_ds) {
    multiply(keys, lanes, call.p.value_dim, {v, call.v_width(), 1},
             {scratch.douts_t + t.begin, kQueryBlock}, {ds, kQueryBlock}, Keep::kNothing);
  }
  float* slope = call.p.softcap > 0 ? scratch.slope + offset : nullptr;
  rules.apply({t.begin, lanes, t.from, keys, p, kQueryBlock}, slope);
  for (int64_t i = 0; i < lanes; i += hn::Lanes(F32())) {
    gradient_column(p + i, ds + i, slope == nullptr || before_cap ? nullptr : slope + i, keys,
                    scratch.lse + t.begin + i, scratch.delta + t.begin + i);
  }
}

// The same for all panels of a block and the keys [from, to), some of which each sees, from row 0
// on; zeros where a panel does not look.
void block_gradient(const BackwardJob& job, const BackwardScratch& scratch, const QueryGroup& q,
                    const ScoreRules& rules, int64_t from, int64_t to, const float* k,
                    const float* v, bool wants_ds, bool before_cap, PanelTile* panels) {
  const CpuCall& call = job.call;
  const auto clear = [&](const PanelTile& t, int64_t begin, int64_t end) HWY_ATTR {
    for (int64_t j = begin; j < end; ++j) {
      const int64_t row = (j - from) * kQueryBlock;
      std::fill(scratch.p + row + t.begin, scratch.p + row + t.end, 0.0f);
      std::fill(scratch.ds + row + t.begin, scratch.ds + row + t.end, 0.0f);
    }
  };
  for (int64_t i = 0, end; i < q.n; i = end) {
    end = q.panel_end(call.p.mask, i, from, to);
    const KeyRange seen = q.keys_seen(call.p.mask, i, std::min(end, q.n));
    PanelTile& t = *panels++;
    t = {i, end, std::clamp(seen.begin, from, to), std::clamp(seen.end, from, to), 0};
    t.to = std::max(t.from, t.to);
    t.row = t.from - from;
    clear(t, from, t.from);
    if (t.from < t.to) {
      panel_gradient(job, scratch, rules, t, k + t.row * call.q_width(), v + t.row * call.v_width(),
                     wants_ds, before_cap);
    }
    clear(t, t.to, to);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_ATTENTION_CPU_BACKWARD_SIMD_PER_TARGET
