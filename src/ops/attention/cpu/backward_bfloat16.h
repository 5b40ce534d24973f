// This file computes the gradients of attention on the CPU for bfloat16, where there are
// instructions that multiply such numbers in pairs: p and ds are rounded to bfloat16, sums are
// float.
//
// Five products as in cpu/backward.cc, but each with pairs along what it sums over (see
// cpu/gemm/tiles_bfloat16.h). So p stands by key, in pairs of queries; ds as well, for dk, and once
// more by query, in pairs of keys, for dq. Keys are paired from the sequence's first on, and tiles
// begin with an even one.

// Highway includes this file once for each target.
#if defined(FK_ATTENTION_CPU_BACKWARD_BFLOAT16_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_ATTENTION_CPU_BACKWARD_BFLOAT16_PER_TARGET
#undef FK_ATTENTION_CPU_BACKWARD_BFLOAT16_PER_TARGET
#else
#define FK_ATTENTION_CPU_BACKWARD_BFLOAT16_PER_TARGET
#endif

#include "cpu/gemm/tiles_bfloat16.h"
#include "ops/attention/cpu/backward_simd.h"

#if FK_CPU_BFLOAT16_TARGET

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

using attention::KeyMemory;
using attention::KeyRows;
using attention::SumRows;

constexpr int64_t kBlockPairs = kQueryBlock / 2;

// Returns memory that cpu/backward_plan.h calls float as the pairs that it holds here.
uint32_t* pairs_of(float* memory) { return reinterpret_cast<uint32_t*>(memory); }
const uint32_t* as_pairs(const float* memory) { return reinterpret_cast<const uint32_t*>(memory); }

struct PairScratch {
  uint32_t *query_pairs, *queries_t, *dout_pairs, *douts_t;
  uint32_t *p, *ds;    // [kBackwardKeys, kBlockPairs]
  uint32_t* ds_pairs;  // [kBackwardKeys / 2, kQueryBlock]

  explicit PairScratch(const BackwardScratch& s)
      : query_pairs(pairs_of(s.queries)),
        queries_t(pairs_of(s.queries_t)),
        dout_pairs(pairs_of(s.douts)),
        douts_t(pairs_of(s.douts_t)),
        p(s.tile_pairs),
        ds(p + kBackwardKeys * kBlockPairs),
        ds_pairs(ds + kBackwardKeys * kBlockPairs) {}
};

void copy_rows(const MatrixView& x, int64_t rows, int64_t columns, uint32_t* out, int64_t width) {
  copy_pairs(static_cast<const uint16_t*>(x.data), x.row, rows, columns, out, width);
}

// Loads a block's rows in both forms, [width / 2, kQueryBlock] and [kBlockPairs, width]. The latter
// has as much room again behind it.
void load_pairs(const MatrixView& x, int64_t n, int64_t columns, int64_t width, uint32_t* turned,
                uint32_t* pairs) {
  uint32_t* rows = pairs + kBlockPairs * width;
  const int64_t lanes = whole_vectors(n);
  copy_rows(x, n, columns, rows, width);
  std::fill(rows + n * width / 2, rows + lanes * width / 2, 0u);
  pair_rows(rows, lanes, width, pairs);
  transpose(reinterpret_cast<const float*>(rows), width / 2, lanes, width / 2,
            reinterpret_cast<float*>(turned), kQueryBlock);
}

void load_queries(const BackwardJob& job, const BackwardScratch& scratch, const PairScratch& pairs,
                  const QueryGroup& q) {
  const CpuCall& call = job.call;
  const int64_t row = q.s.q_begin + q.first;
  load_pairs(call.rows(call.q, q.b, q.h, row), q.n, call.p.head_dim, call.q_width(),
             pairs.queries_t, pairs.query_pairs);
  load_pairs(call.rows(job.dout, q.b, q.h, row), q.n, call.p.value_dim, call.v_width(),
             pairs.douts_t, pairs.dout_pairs);
  load_sums(job, scratch, q);
}

// A tile's scores and its ds are multiplied with these.
struct Factors {
  float before, after;
};

// Scales scores fresh from q.k, of which a tile has `keys` rows of `lanes`. Where nothing but the
// mask comes between them and lse, the multiplication is left to what follows.
Factors scale_scores(const CpuCall& call, float* s, int64_t keys, int64_t lanes) {
  const auto scale = static_cast<float>(call.p.scale);
  if (call.p.softcap <= 0 && !call.has_bias && call.slopes.data == nullptr && scale > 0) {
    return {scale, scale};
  }
  const F32 d;
  for (int64_t j = 0; j < keys; ++j, s += kQueryBlock) {
    for (int64_t i = 0; i < lanes; i += hn::Lanes(d)) {
      hn::StoreU(hn::Mul(hn::LoadU(d, s + i), hn::Set(d, scale)), d, s + i);
    }
  }
  return {1.0f, scale};
}

// Returns 2^x to 2^-13, which is more than a result that is rounded to bfloat16 can show. 2^0 is
// exactly 1.
FK_BFLOAT16_ATTR HWY_INLINE V rough_exp2(V x) {
  const F32 d;
  x = hn::Max(hn::Set(d, -200.0f), x);  // the second operand comes through if it is NaN
  const V f = hn::Sub(x, hn::Floor(x));
  V y = hn::MulAdd(hn::Set(d, 0x1.3baaa8p-4f), f, hn::Set(d, 0x1.d23788p-3f));
  y = hn::MulAdd(y, f, hn::Set(d, 0x1.63e65ap-1f));
  return V{_mm512_scalef_ps(hn::MulAdd(y, f, hn::Set(d, 1.0f)).raw, x.raw)};  // rounds x down
}

// Makes p and ds of one vector of lanes, rounded, of which `queries` are in use. The row after an
// odd last key is set to 0.
FK_BFLOAT16_ATTR HWY_NOINLINE void gradient_pairs(const float* s, const float* dp,
                                                  const float* slope, int64_t keys,
                                                  const float* lse, const float* delta,
                                                  const Factors& factors, int64_t queries,
                                                  uint32_t* p, uint32_t* ds, uint32_t* ds_pairs) {
  constexpr float kLog2E = 1.44269504f;
  const F32 d;
  const V shift = hn::Mul(hn::LoadU(d, lse), hn::Set(d, kLog2E)), less = hn::LoadU(d, delta);
  const V before = hn::Set(d, factors.before * kLog2E), after = hn::Set(d, factors.after);
  const uint32_t lanes = queries >= 16 ? 0xffffu : (1u << queries) - 1;
  const __mmask32 mask = lanes << 16 | lanes;
  alignas(64) static constexpr uint16_t kPairs[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                      21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                      11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i order = _mm512_load_si512(kPairs);
  for (int64_t j = 0; j < keys; j += 2) {
    V p0, p1 = hn::Zero(d), ds0, ds1 = p1;
    const int64_t at = j * kQueryBlock;
    p0 = rough_exp2(hn::MulSub(hn::LoadU(d, s + at), before, shift));
    ds0 = hn::Mul(hn::Mul(p0, after), hn::Sub(hn::LoadU(d, dp + at), less));
    if (j + 1 < keys) {
      const int64_t next = at + kQueryBlock;
      p1 = rough_exp2(hn::MulSub(hn::LoadU(d, s + next), before, shift));
      ds1 = hn::Mul(hn::Mul(p1, after), hn::Sub(hn::LoadU(d, dp + next), less));
    }
    if (slope != nullptr) {
      ds0 = hn::Mul(ds0, hn::LoadU(d, slope + at));
      if (j + 1 < keys) ds1 = hn::Mul(ds1, hn::LoadU(d, slope + at + kQueryBlock));
    }
    const auto both = [&](V low, V high) FK_BFLOAT16_ATTR {
      return reinterpret_cast<__m512i>(_mm512_maskz_cvtne2ps_pbh(mask, high.raw, low.raw));
    };
    const __m512i p_both = both(p0, p1), ds_both = both(ds0, ds1);
    const int64_t row = j * kBlockPairs;
    const auto store = [&](uint32_t* to, __m512i x) FK_BFLOAT16_ATTR {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + row), _mm512_castsi512_si256(x));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + row + kBlockPairs),
                          _mm512_extracti64x4_epi64(x, 1));
    };
    store(p, p_both);
    store(ds, ds_both);
    _mm512_storeu_si512(ds_pairs + j / 2 * kQueryBlock, _mm512_permutexvar_epi16(order, ds_both));
  }
}

void tile_gradient(const BackwardJob& job, const BackwardScratch& scratch, const PairScratch& pairs,
                   const ScoreRules& rules, const BlockTile& tile, int64_t from, int64_t queries,
                   const KeyRows& memory) {
  const CpuCall& call = job.call;
  const int64_t q_width = call.q_width() / 2, v_width = call.v_width() / 2;
  for (const KeyRun& run : tile) {
    const int64_t keys = run.to - run.from, lanes = run.end - run.begin, row = run.from - from;
    const int64_t offset = row * kQueryBlock + run.begin;
    float *s = scratch.p + offset, *dp = scratch.ds + offset;
    multiply_pairs(keys, lanes, (call.p.head_dim + 1) / 2,
                   {as_pairs(memory.keys) + run.from * q_width, q_width, 1},
                   {pairs.queries_t + run.begin, kQueryBlock}, {s, kQueryBlock}, false,
                   scratch.ahead);
    multiply_pairs(keys, lanes, (call.p.value_dim + 1) / 2,
                   {as_pairs(memory.values) + run.from * v_width, v_width, 1},
                   {pairs.douts_t + run.begin, kQueryBlock}, {dp, kQueryBlock}, false,
                   scratch.ahead);
    const Factors factors = scale_scores(call, s, keys, lanes);
    float* slope = call.p.softcap > 0 ? scratch.slope + offset : nullptr;
    rules.apply({run.begin, lanes, run.from, keys, s, kQueryBlock}, slope);
    for (int64_t i = 0; i < lanes; i += hn::Lanes(F32())) {
      const int64_t lane = run.begin + i, at = row * kBlockPairs + lane / 2;
      gradient_pairs(s + i, dp + i, slope == nullptr ? nullptr : slope + i, keys,
                     scratch.lse + lane, scratch.delta + lane, factors, queries - lane,
                     pairs.p + at, pairs.ds + at, pairs.ds_pairs + row / 2 * kQueryBlock + lane);
    }
  }
}

// Does what add_keys of cpu/backward.cc does.
void add_keys(RowsAhead* ahead, const BlockTile& tile, int64_t from, const uint32_t* x,
              const uint32_t* y, int64_t width, const SumRows& sums, bool add) {
  tile.for_each_keys([&](int64_t key, int64_t end, int64_t first, int64_t last) HWY_ATTR {
    multiply_pairs(end - key, width, (last + 1) / 2 - first / 2,
                   {x + (key - from) * kBlockPairs + first / 2, kBlockPairs, 1},
                   {y + first / 2 * width, width}, {sums.data + key * sums.stride, sums.stride},
                   add, ahead);
  });
}

// Computes dq of a block of queries, and what the block adds to dk and dv.
void backward_pairs(const BackwardJob& job, const BackwardScratch& scratch, const QueryGroup& q,
                    const KeyRows& memory) {
  const CpuCall& call = job.call;
  const int64_t q_width = call.q_width(), v_width = call.v_width();
  const PairScratch pairs(scratch);
  load_queries(job, scratch, pairs, q);
  if (job.has_dq) std::fill_n(scratch.dqueries, q_width * kQueryBlock, 0.0f);
  const KeyRange seen = q.keys_seen(call.p.mask, 0, q.n);
  const int64_t last = std::min((seen.end + 1) / 2 * 2, q.s.k_len);
  const ScoreRules rules(call, q, scratch.bias);
  for (int64_t from = seen.begin / 2 * 2; from < last; from += kBackwardKeys) {
    const BlockTile tile(q, call.p.mask, from, std::min(from + kBackwardKeys, last));
    tile_gradient(job, scratch, pairs, rules, tile, from, q.n, memory);
    if (job.has_dv) {
      add_keys(scratch.ahead, tile, from, pairs.p, pairs.dout_pairs, v_width, memory.dvalues,
               !memory.are_empty);
    }
    if (job.has_dk) {
      add_keys(scratch.ahead, tile, from, pairs.ds, pairs.query_pairs, q_width, memory.dkeys,
               !memory.are_empty);
    }
    if (!job.has_dq) continue;
    tile.for_each_lanes([&](int64_t first, int64_t end, int64_t key, int64_t end_key) HWY_ATTR {
      multiply_pairs(end - first, q_width, (end_key + 1) / 2 - key / 2,
                     {pairs.ds_pairs + (key - from) / 2 * kQueryBlock + first, 1, kQueryBlock},
                     {memory.key_pairs + key / 2 * q_width, q_width},
                     {scratch.dqueries + first * q_width, q_width}, true, scratch.ahead);
    });
  }
  if (!job.has_dq) return;
  unpack_rows(scratch.dqueries, q_width, q.n, call.p.head_dim, nullptr,
              call.rows(job.dq, q.b, q.h, q.s.q_begin + q.first));
}

// Loads all keys and values of an item.
void load_key_pairs(const CpuCall& call, const Sequence& s, int64_t b, int64_t g,
                    const KeyMemory& memory, KeyRows&) {
  copy_rows(call.rows(call.k, b, g, s.k_begin), s.k_len, call.p.head_dim, pairs_of(memory.keys),
            call.q_width());
  copy_rows(call.rows(call.v, b, g, s.k_begin), s.k_len, call.p.value_dim, pairs_of(memory.values),
            call.v_width());
  pair_rows(pairs_of(memory.keys), s.k_len, call.q_width(), memory.key_pairs);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_CPU_BFLOAT16_TARGET

#endif  // FK_ATTENTION_CPU_BACKWARD_BFLOAT16_PER_TARGET
