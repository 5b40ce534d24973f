// This file holds the vector code that the forward and the backward of attention on the CPU share:
// rows of q and k as floats, rotated; and what happens to scores between q.k and the softmax.
//
// Scores stand as s[key, query]: a vector holds one key's scores with neighbouring queries, so that
// maxima and sums over keys need no shuffles.

#include "core/integers.h"
#include "ops/attention/cpu/plan.h"

// Highway includes this file once for each target.
#if defined(FK_ATTENTION_CPU_SIMD_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_ATTENTION_CPU_SIMD_PER_TARGET
#undef FK_ATTENTION_CPU_SIMD_PER_TARGET
#else
#define FK_ATTENTION_CPU_SIMD_PER_TARGET
#endif

#include "cpu/gemm/pack.h"
#include "cpu/gemm/tiles.h"
#include "cpu/simd.h"
#include "cpu/simd_activations.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

using attention::CpuCall;
using attention::KeyRange;
using attention::kQueryBlock;
using attention::Mask;
using attention::Sequence;
using attention::View;
using V = hn::Vec<F32>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

HWY_INLINE float read_one(const void* data, DType dtype, int64_t offset) {
  return ByDType(dtype, [&](auto t) FK_MATRIX_BODY {
    return ToF32(static_cast<const decltype(t)*>(data) + offset);
  });
}

// Turns the pairs of `rows` rows of floats by the angles of positions [position, position + rows),
// forwards or (direction -1) back.
void rotate_rows(const CpuCall& call, float* x, int64_t stride, int64_t rows, int64_t position,
                 float direction) {
  constexpr int64_t kMostPairs = 128;
  const Tensor &cos = call.rotary_cos, &sin = call.rotary_sin;
  const int64_t pairs = cos.size(1);
  alignas(64) float c[kMostPairs], s[kMostPairs];
  const auto row_of = [](const Tensor& t, int64_t row) {
    return MatrixView{t.data, t.dtype, t.stride(0), t.stride(1)}.from(row);
  };
  for (int64_t r = 0; r < rows; ++r, x += stride) {
    pack_rows(row_of(cos, position + r), 1, pairs, c, padded_columns(pairs));
    pack_rows(row_of(sin, position + r), 1, pairs, s, padded_columns(pairs));
    for (int64_t i = 0; i < pairs; ++i) {
      float& first = x[call.rotary_interleaved ? 2 * i : i];
      float& second = x[call.rotary_interleaved ? 2 * i + 1 : pairs + i];
      const float sine = direction * s[i], a = first, b = second;
      first = a * c[i] - b * sine;
      second = b * c[i] + a * sine;
    }
  }
}

// Writes the keys [first, first + n) of a sequence's head as floats, rotated.
HWY_INLINE void pack_keys(const CpuCall& call, const Sequence& s, int64_t b, int64_t g,
                          int64_t first, int64_t n, float* out) {
  const int64_t width = call.q_width();
  pack_rows(call.rows(call.k, b, g, s.k_begin + first), n, call.p.head_dim, out, width);
  if (call.rotary_cos) rotate_rows(call, out, width, n, first, 1.0f);
}

HWY_INLINE void pack_values(const CpuCall& call, const Sequence& s, int64_t b, int64_t g,
                            int64_t first, int64_t n, float* out) {
  pack_rows(call.rows(call.v, b, g, s.k_begin + first), n, call.p.value_dim, out, call.v_width());
}

// Returns the same rows where they stand if they can be used as they are, or else in `room`.
HWY_INLINE MatrixB keys_of(const CpuCall& call, const Sequence& s, int64_t b, int64_t g,
                           int64_t first, int64_t n, float* room) {
  if (call.has_kernel_layout(call.k, call.p.head_dim) && !call.rotary_cos) {
    const MatrixView rows = call.rows(call.k, b, g, s.k_begin + first);
    return {static_cast<const float*>(rows.data), rows.row};
  }
  pack_keys(call, s, b, g, first, n, room);
  return {room, call.q_width()};
}

HWY_INLINE MatrixB values_of(const CpuCall& call, const Sequence& s, int64_t b, int64_t g,
                             int64_t first, int64_t n, float* room) {
  if (call.has_kernel_layout(call.v, call.p.value_dim)) {
    const MatrixView rows = call.rows(call.v, b, g, s.k_begin + first);
    return {static_cast<const float*>(rows.data), rows.row};
  }
  pack_values(call, s, b, g, first, n, room);
  return {room, call.v_width()};
}

// Rounds n up to whole vectors.
HWY_INLINE int64_t whole_vectors(int64_t n) {
  const int64_t lanes = hn::Lanes(F32());
  return round_up(n, lanes);
}

// Calls body(j, count) for the rows [0, keys) of scores, a few at a time: as many vectors as Exp
// should get at once.
template <class Body>
HWY_INLINE void for_each_few(int64_t keys, const Body& body) {
  constexpr int kFew = 4;
  int64_t j = 0;
  for (; j + kFew <= keys; j += kFew) body(j, std::integral_constant<int, kFew>());
  for (; j < keys; ++j) body(j, std::integral_constant<int, 1>());
}

// Describes queries that are worked on together: the same n of one head, or of each of a few
// neighbouring heads that share their keys. Lane i holds query i % n of head i / n.
struct QueryGroup {
  Sequence s;
  int64_t b, h, heads;
  int64_t first, n;

  int64_t lanes() const { return heads * n; }
  // Returns the keys that one of the lanes [begin, end) sees.
  KeyRange keys_seen(const Mask& mask, int64_t begin, int64_t end) const {
    return heads == 1 ? attention::keys_seen(mask, s, first + begin, end - begin)
                      : attention::keys_seen(mask, s, first, n);
  }
  // Returns the keys that all of the lanes [begin, end) see. There may be none.
  KeyRange keys_all_see(const Mask& mask, int64_t begin, int64_t end) const {
    const int64_t low = first + (heads == 1 ? begin : 0);
    const int64_t high = first + (heads == 1 ? std::min(end, n) : n);
    return {mask.first_key(high - 1, s.q_len, s.k_len), mask.end_key(low, s.q_len, s.k_len)};
  }
  // Returns whether all of the lanes [begin, end) see all of the keys [from, to).
  bool sees_all(const Mask& mask, int64_t begin, int64_t end, int64_t from, int64_t to) const {
    if (mask.unlimited()) return true;
    const KeyRange seen = keys_all_see(mask, begin, end);
    return seen.begin <= from && seen.end >= to;
  }
  // Returns where the panel of lanes from `begin` on should end that meets the keys [from, to). A
  // panel has two vectors, or one if there are no more queries, or if the second would see other
  // keys than the first and there are registers enough to make a product of one vector fast.
  int64_t panel_end(const Mask& mask, int64_t begin, int64_t from, int64_t to) const {
    const int64_t narrow = begin + static_cast<int64_t>(hn::Lanes(F32()));
    const int64_t wide = begin + panel_width();
    if (lanes() <= narrow) return narrow;
    return HWY_TARGET != HWY_AVX3 || sees_all(mask, begin, wide, from, to) ? wide : narrow;
  }
  // Calls body(head, query, lane, count) for the runs of queries of one head among the lanes
  // [begin, end).
  template <class Body>
  HWY_INLINE void for_each_head(int64_t begin, int64_t end, const Body& body) const {
    for (int64_t lane = begin; lane < end;) {
      const int64_t head = lane / n, i = lane - head * n, count = std::min(n - i, end - lane);
      body(h + head, first + i, lane, count);
      lane += count;
    }
  }
};

// Writes the queries of a group as floats, rotated, scaled and transposed: a column for each lane,
// for whole vectors of lanes. `room` holds as many rows.
HWY_INLINE void turn_queries(const CpuCall& call, const QueryGroup& group, float* room,
                             float* out) {
  const F32 d;
  const int64_t width = call.q_width(), n = group.n;
  const Sequence& s = group.s;
  const int64_t lanes = group.lanes(), rows = (lanes + 3) / 4 * 4;
  const auto scale_of = [&](int64_t head) {
    return static_cast<float>(call.p.scale) *
           call.scales.scores(group.b, group.h + head, call.p.group());
  };
  const auto rows_of = [&](int64_t head) {
    return call.rows(call.q, group.b, group.h + head, s.q_begin + group.first);
  };
  if (group.heads == 1 && rows == lanes && call.has_kernel_layout(call.q, call.p.head_dim) &&
      !call.rotary_cos) {
    const MatrixView q = rows_of(0);
    transpose_scaled(static_cast<const float*>(q.data), q.row, rows, width, out, kQueryBlock,
                     scale_of(0));
    return;
  }
  for (int64_t head = 0; head < group.heads; ++head) {
    float* mine = room + head * n * width;
    pack_rows(rows_of(head), n, call.p.head_dim, mine, width);
    if (call.rotary_cos) {
      rotate_rows(call, mine, width, n, group.first + s.k_len - s.q_len, 1.0f);
    }
    const auto scale = hn::Set(d, scale_of(head));
    for (int64_t i = 0; i < n * width; i += hn::Lanes(d)) {
      hn::StoreU(hn::Mul(hn::LoadU(d, mine + i), scale), d, mine + i);
    }
  }
  std::fill(room + lanes * width, room + rows * width, 0.0f);
  transpose(room, width, rows, width, out, kQueryBlock);
}

// Holds the scores of some lanes of a group, from lane `begin` on, with some of the keys they see.
struct ScoreTile {
  int64_t begin, lanes;  // whole vectors
  int64_t key, keys;
  float* s;  // [keys, stride]
  int64_t stride;
};

// Applies what follows q.k: softcap, bias, slopes and the mask. Most tiles need none of it.
class ScoreRules {
 public:
  // If there is a bias, `room` has 2 * kQueryBlock * (most keys of a tile) floats.
  ScoreRules(const CpuCall& call, const QueryGroup& group, float* room)
      : call_(call), group_(group), room_(room) {
    if (call.slopes.data != nullptr) {
      const View& view = call.slopes;
      group.for_each_head(
          0, group.lanes(), [&](int64_t h, int64_t, int64_t lane, int64_t count) HWY_ATTR {
            const float slope =
                read_one(view.data, call.slopes_dtype, group.b * view.batch + h * view.head);
            std::fill_n(slopes_ + lane, count, slope);
          });
    }
    for (int64_t lane = 0; lane < kQueryBlock; ++lane) {
      queries_[lane] = static_cast<float>(group.heads == 1 ? lane : lane % group.n);
    }
  }

  // `slope` is [keys, stride] and gets the derivative of softcap, unless it is NULL.
  void apply(const ScoreTile& t, float* slope) const {
    if (call_.p.softcap > 0) cap(t, slope);
    if (call_.has_bias) add_bias(t);
    if (call_.slopes.data != nullptr) add_distance(t);
    if (!group_.sees_all(call_.p.mask, t.begin, t.begin + t.lanes, t.key, t.key + t.keys)) hide(t);
  }

 private:
  template <class Body>
  static HWY_INLINE void for_each(const ScoreTile& t, const Body& body) {
    const F32 d;
    for (int64_t j = 0; j < t.keys; ++j) {
      for (int64_t i = 0; i < t.lanes; i += hn::Lanes(d)) {
        float* p = t.s + j * t.stride + i;
        hn::StoreU(body(j, i, hn::LoadU(d, p)), d, p);
      }
    }
  }

  HWY_NOINLINE void cap(const ScoreTile& t, float* slope) const {
    const F32 d;
    const float cap = static_cast<float>(call_.p.softcap);
    const V per_cap = hn::Set(d, 1.0f / cap);
    for_each(t, [&](int64_t j, int64_t i, V x) HWY_ATTR {
      const V y = Tanh(d, hn::Mul(x, per_cap));
      if (slope != nullptr) {
        hn::StoreU(hn::NegMulAdd(y, y, hn::Set(d, 1.0f)), d, slope + j * t.stride + i);
      }
      return hn::Mul(y, hn::Set(d, cap));
    });
  }

  HWY_NOINLINE void add_bias(const ScoreTile& t) const {
    const F32 d;
    const int64_t width = padded_columns(t.keys);
    float *rows = room_, *columns = room_ + kQueryBlock * width;
    std::fill_n(rows, t.lanes * width, 0.0f);
    group_.for_each_head(
        t.begin, std::min(t.begin + t.lanes, group_.lanes()),
        [&](int64_t h, int64_t query, int64_t lane, int64_t count) HWY_ATTR {
          pack_rows(CpuCall::rows(call_.bias, call_.bias_dtype, group_.b, h, 0).from(query, t.key),
                    count, t.keys, rows + (lane - t.begin) * width, width);
        });
    transpose(rows, width, t.lanes, width, columns, t.lanes);
    for_each(t, [&](int64_t j, int64_t i, V x)
                    HWY_ATTR { return hn::Add(x, hn::LoadU(d, columns + j * t.lanes + i)); });
  }

  // Returns how far the first query of the group is ahead of a tile's first key.
  int64_t ahead(const ScoreTile& t) const {
    return group_.first + group_.s.k_len - group_.s.q_len - t.key;
  }

  HWY_NOINLINE void add_distance(const ScoreTile& t) const {
    const F32 d;
    const int64_t first = ahead(t);
    for_each(t, [&](int64_t j, int64_t i, V x) HWY_ATTR {
      const V distance = hn::Abs(
          hn::Add(hn::Set(d, static_cast<float>(first - j)), hn::LoadU(d, queries_ + t.begin + i)));
      return hn::NegMulAdd(hn::LoadU(d, slopes_ + t.begin + i), distance, x);
    });
  }

  HWY_NOINLINE void hide(const ScoreTile& t) const {
    const F32 d;
    const Mask& mask = call_.p.mask;
    // Query i of the group sees row j of the tile if j - right <= first + i <= j + left. Where the
    // limits are too large to be exact as floats, they are far from any query.
    const int64_t first = ahead(t);
    const V hidden = hn::Set(d, -kInfinity);
    const auto lanes = static_cast<int64_t>(hn::Lanes(d));
    for (int64_t i = 0; i < t.lanes; i += lanes) {
      const int64_t lane = t.begin + i;
      // Every lane sees rows [begin, end), so these are left alone.
      const KeyRange all = group_.keys_all_see(mask, lane, lane + lanes);
      const int64_t begin = std::clamp<int64_t>(all.begin - t.key, 0, t.keys);
      const int64_t end = std::clamp<int64_t>(all.end - t.key, begin, t.keys);
      const V query = hn::LoadU(d, queries_ + lane);
      for (int64_t j = begin == 0 ? end : 0; j < t.keys; j = j + 1 == begin ? end : j + 1) {
        const auto seen =
            hn::And(hn::Ge(query, hn::Set(d, static_cast<float>(j - mask.right - first))),
                    hn::Le(query, hn::Set(d, static_cast<float>(j + mask.left - first))));
        float* p = t.s + j * t.stride + i;
        hn::StoreU(hn::IfThenElse(seen, hn::LoadU(d, p), hidden), d, p);
      }
    }
  }

  const CpuCall& call_;
  const QueryGroup& group_;
  float* room_;
  alignas(64) float queries_[kQueryBlock];  // of each lane, counted from the group's first
  alignas(64) float slopes_[kQueryBlock] = {};
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_ATTENTION_CPU_SIMD_PER_TARGET
