// The products of a step of a recurrent layer: rows of x or of the state times the columns of a
// thread's own units.
//
// Floor: of one row, reading those columns from the thread's second-level cache; of many, the
// multiply-adds. Units are taken a few vectors at a time (a group): all columns of a group, for
// all rows, are summed into a block that stays in the first-level cache, where the caller makes
// gates of it.
//
// The columns of a group are vectors of units, a lane each: of every vector of units all gates, one
// after another. A packed group is a row of panels of two such columns (unit_tiles.h). Without
// packing, which takes as long as a few steps, a row of weights is multiplied along K, four units
// at a time, and lanes are added up at the end.

// Once per target.
#if defined(FK_OPS_RNN_UNIT_PRODUCT_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_OPS_RNN_UNIT_PRODUCT_PER_TARGET
#undef FK_OPS_RNN_UNIT_PRODUCT_PER_TARGET
#else
#define FK_OPS_RNN_UNIT_PRODUCT_PER_TARGET
#endif

#include "core/thread_team.h"
#include "cpu/gemm/elements.h"
#include "cpu/gemm/pack.h"
#include "ops/rnn/cpu/unit_tiles.h"
#include "ops/rnn/cpu/walk.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {

using rnn::UnitMatrix;

// Rows that are summed at a time, and the vectors that a group's columns fill at most.
constexpr int64_t kUnitRows = 48, kUnitVectors = 6;
constexpr int64_t kUnitSums = kUnitRows * kUnitVectors * static_cast<int64_t>(hn::MaxLanes(F32()));

// A few vectors of units that a thread owns.
struct UnitGroup {
  int64_t first, vectors;  // the first unit

  int64_t columns() const { return vectors * static_cast<int64_t>(hn::Lanes(F32())); }
};

// The sums of a group: of row r and gate g, unit `first + v * lanes + i` is lane i of the vector
// (r, g, v).
struct UnitSums {
  const float* data;
  int64_t stride, gates;

  HWY_INLINE hn::Vec<F32> operator()(int64_t r, int64_t gate, int64_t v) const {
    const F32 d;
    const int64_t lanes = hn::Lanes(d);
    return hn::LoadU(d, data + r * stride + (v * gates + gate) * lanes);
  }
};

// Calls body(group) for the groups of this thread's units. Every other time they come in reverse,
// so that what the caches kept of the last of them is used before it is lost.
template <class Body>
HWY_INLINE void for_each_group(const ThreadTeam::Member& me, int64_t units, int64_t gates,
                               bool reversed, const Body& body) {
  const int64_t lanes = hn::Lanes(F32()), vectors = (units + lanes - 1) / lanes;
  const int64_t first = me.begin(vectors), last = me.end(vectors);
  const int64_t width = std::max<int64_t>(1, kUnitVectors / gates);
  const int64_t groups = (last - first + width - 1) / width;
  for (int64_t i = 0; i < groups; ++i) {
    const int64_t at = first + (reversed ? groups - 1 - i : i) * width;
    body(UnitGroup{at * lanes, std::min(width, last - at)});
  }
}

// Copies one vector of units, side by side in each row of K, to rows `width` apart.
inline void copy_units(const MatrixView& from, int64_t depth, int64_t units, float* out,
                       int64_t width) {
  const F32 d;
  by_type(from.dtype, [&](auto t) HWY_ATTR {
    using T = decltype(t);
    const T* p = static_cast<const T*>(from.data);
    for (int64_t k = 0; k < depth; ++k, p += from.row, out += width) {
      const bool whole = units == static_cast<int64_t>(hn::Lanes(d));
      hn::StoreU(whole ? LoadF32(d, p) : LoadNF32(d, p, static_cast<size_t>(units)), d, out);
    }
  });
}

// Packs the columns of this thread's units.
inline void pack_own_units(const UnitMatrix& m, const ThreadTeam::Member& me) {
  if (m.packed == nullptr) return;
  constexpr int64_t kDepth = 128;
  const int64_t lanes = hn::Lanes(F32());
  alignas(64) float turned[hn::MaxLanes(F32()) * kDepth];
  for_each_group(me, m.units, m.gates, false, [&](const UnitGroup& group) HWY_ATTR {
    const int64_t vectors = m.gates * group.vectors;
    for (int64_t i = 0; i < vectors; ++i) {
      const int64_t gate = i % m.gates, unit = group.first + i / m.gates * lanes;
      const int64_t units = std::min(lanes, m.units - unit);
      const int64_t panel = i / detail::kPanelVectors * detail::kPanelVectors;
      const int64_t width = std::min<int64_t>(detail::kPanelVectors, vectors - panel) * lanes;
      float* const out = m.packed + (group.first * m.gates + panel * lanes) * m.packed_depth() +
                         (i - panel) * lanes;
      const MatrixView from = m.gate[gate].from(0, unit);
      if (from.column == 1) {
        copy_units(from, m.depth, units, out, width);
        continue;
      }
      for (int64_t k = 0; k < m.depth; k += kDepth) {
        const int64_t depth = std::min(kDepth, m.depth - k), fours = (depth + 3) / 4 * 4;
        if (from.dtype == DType::kFloat32 && from.row == 1 && units == lanes && depth == fours) {
          const float* const rows = static_cast<const float*>(from.from(k).data);
          transpose(rows, from.column, lanes, depth, out + k * width, width);
          continue;
        }
        pack_rows(transposed(from.from(k)), units, depth, turned, kDepth);
        std::fill_n(turned + units * kDepth, (lanes - units) * kDepth, 0.0f);
        transpose(turned, kDepth, lanes, fours, out + k * width, width);
      }
    }
  });
}

namespace detail {

// Adds up the lanes of four vectors and stores the four sums.
HWY_INLINE void store_sums_of_four(const hn::Vec<F32> (&x)[4], float* out) {
  const F32 d;
  const hn::Repartition<double, F32> pairs;
  const auto sum_01 =
      hn::Add(hn::InterleaveLower(d, x[0], x[1]), hn::InterleaveUpper(d, x[0], x[1]));
  const auto sum_23 =
      hn::Add(hn::InterleaveLower(d, x[2], x[3]), hn::InterleaveUpper(d, x[2], x[3]));
  const auto low = hn::BitCast(pairs, sum_01), high = hn::BitCast(pairs, sum_23);
  auto sums = hn::Add(hn::BitCast(d, hn::InterleaveLower(pairs, low, high)),
                      hn::BitCast(d, hn::InterleaveUpper(pairs, low, high)));
  // Every four lanes have the four sums of their part.
  if constexpr (hn::MaxLanes(F32()) == 16) {
    const hn::Half<F32> half;
    const hn::Half<decltype(half)> quarter;
    const auto eight = hn::Add(hn::LowerHalf(half, sums), hn::UpperHalf(half, sums));
    hn::StoreU(hn::Add(hn::LowerHalf(quarter, eight), hn::UpperHalf(quarter, eight)), quarter, out);
  } else if constexpr (hn::MaxLanes(F32()) == 8) {
    const hn::Half<F32> half;
    hn::StoreU(hn::Add(hn::LowerHalf(half, sums), hn::UpperHalf(half, sums)), half, out);
  } else {
    hn::StoreU(sums, d, out);
  }
}

// kRows rows of the state times four units' rows of weights.
template <int kRows, class T>
HWY_INLINE void multiply_four_units(const float* state, int64_t state_row, const T* const (&w)[4],
                                    int64_t depth, float* out, int64_t out_row) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  hn::Vec<F32> sum[kRows][4];
  repeat<kRows>([&](auto r) FK_MATRIX_BODY {
    repeat<4>([&](auto u) FK_MATRIX_BODY { sum[r][u] = hn::Zero(d); });
  });
  const auto add = [&](int64_t k, const auto& load) FK_MATRIX_BODY {
    hn::Vec<F32> x[kRows];
    repeat<kRows>([&](auto r) FK_MATRIX_BODY { x[r] = hn::LoadU(d, state + r * state_row + k); });
    repeat<4>([&](auto u) FK_MATRIX_BODY {
      const auto weights = load(w[u] + k);
      repeat<kRows>([&](auto r)
                        FK_MATRIX_BODY { sum[r][u] = hn::MulAdd(x[r], weights, sum[r][u]); });
    });
  };
  int64_t k = 0;
  for (; k + lanes <= depth; k += lanes) {
    add(k, [&](const T* p) FK_MATRIX_BODY { return LoadF32(d, p); });
  }
  if (k < depth) {  // rows of the state are padded with zeros
    const auto rest = static_cast<size_t>(depth - k);
    add(k, [&](const T* p) FK_MATRIX_BODY { return LoadNF32(d, p, rest); });
  }
  repeat<kRows>([&](auto r) FK_MATRIX_BODY { store_sums_of_four(sum[r], out + r * out_row); });
}

template <class T>
HWY_NOINLINE void multiply_in_place(const UnitMatrix& m, const UnitGroup& group, const float* state,
                                    int64_t state_row, int64_t rows, float* sums, int64_t width) {
  const int64_t lanes = hn::Lanes(F32());
  const int64_t units = std::min(group.columns(), m.units - group.first);
  for (int64_t g = 0; g < m.gates; ++g) {
    const T* const weights = static_cast<const T*>(m.gate[g].data);
    for (int64_t u = 0; u < units; u += 4) {
      const T* w[4];
      for (int64_t i = 0; i < 4; ++i) {
        w[i] = weights + (group.first + std::min(u + i, units - 1)) * m.gate[g].column;
      }
      float* const out = sums + (u / lanes * m.gates + g) * lanes + u % lanes;
      int64_t r = 0;
      for (; r + 4 <= rows; r += 4) {
        multiply_four_units<4>(state + r * state_row, state_row, w, m.depth, out + r * width,
                               width);
      }
      for (; r < rows; ++r) {
        multiply_four_units<1>(state + r * state_row, state_row, w, m.depth, out + r * width,
                               width);
      }
    }
  }
}

}  // namespace detail

// The sums of a group for some rows of A, in rows of C `c_row` apart. Where a group reaches past
// the last unit, the sums there may be anything.
HWY_INLINE void multiply_units(const UnitMatrix& m, const UnitGroup& group, const float* a,
                               int64_t a_row, int64_t rows, float* c, int64_t c_row) {
  if (m.packed == nullptr) {
    return by_type(m.gate[0].dtype, [&](auto t) HWY_ATTR {
      detail::multiply_in_place<decltype(t)>(m, group, a, a_row, rows, c, c_row);
    });
  }
  const float* const packed = m.packed + group.first * m.gates * m.packed_depth();
  multiply_panels(rows, a, a_row, packed, m.depth, m.packed_depth(), m.gates * group.vectors, c,
                  c_row);
}

// Does so for `rows` <= kUnitRows rows of the state, into kUnitSums floats.
HWY_INLINE UnitSums sum_units(const UnitMatrix& m, const UnitGroup& group, const float* state,
                              int64_t state_row, int64_t rows, float* sums) {
  const int64_t width = m.gates * group.columns();
  multiply_units(m, group, state, state_row, rows, sums, width);
  return {sums, width, m.gates};
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_OPS_RNN_UNIT_PRODUCT_PER_TARGET
