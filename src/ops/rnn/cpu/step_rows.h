// How forward and backward go through the rows and units of a step.

// Once per target.
#if defined(FK_OPS_RNN_STEP_ROWS_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_OPS_RNN_STEP_ROWS_PER_TARGET
#undef FK_OPS_RNN_STEP_ROWS_PER_TARGET
#else
#define FK_OPS_RNN_STEP_ROWS_PER_TARGET
#endif

#include "ops/rnn/cpu/unit_product.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {

using rnn::Place;

// A few of the rows of a step.
struct StepRows {
  int64_t t, first, last;
};

// Calls body(row, place, vector, unit, n) for each row and each vector of a group, which has units
// [unit, unit + n).
template <class Body>
HWY_INLINE void for_each_vector(const rnn::Walk& walk, const StepRows& rows, const UnitGroup& group,
                                int64_t units, const Body& body) {
  const int64_t lanes = hn::Lanes(F32());
  for (int64_t row = rows.first; row < rows.last; ++row) {
    const Place place = walk.place(row, rows.t);
    for (int64_t v = 0; v < group.vectors; ++v) {
      const int64_t unit = group.first + v * lanes;
      body(row, place, v, unit, std::min(lanes, units - unit));
    }
  }
}

// Lanes from n on are made 0: they are padding.
HWY_INLINE hn::Vec<F32> first_lanes(hn::Vec<F32> v, int64_t n) {
  const F32 d;
  if (n == static_cast<int64_t>(hn::Lanes(d))) return v;
  return hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(n)), v);
}

// The states of a thread's units, from a tensor with a row for each sequence (zeros if it is not
// given) to rows as in the walk, which are padded with zeros.
inline void load_states(const rnn::Walk& walk, const Tensor& state, int64_t units, float* to,
                        int64_t to_row, const ThreadTeam::Member& me) {
  const F32 d;
  for_each_group(me, units, 1, false, [&](const UnitGroup& group) HWY_ATTR {
    for (int64_t row = 0; row < walk.count(); ++row) {
      float* const out = to + row * to_row + group.first;
      const int64_t from = state ? walk.rows[row].sequence * state.stride(0) : 0;
      for_vectors(group.columns(), [&](int64_t c, int64_t n) HWY_ATTR {
        const int64_t left = std::min(units - group.first - c, n);
        auto v = hn::Zero(d);
        if (state) {
          by_type(state.dtype, [&](auto t) HWY_ATTR {
            v = load_some<decltype(t)>(state, from, group.first + c, left);
          });
        }
        hn::StoreU(first_lanes(v, left), d, out + c);
      });
    }
  });
}

// The other way: from rows, which `from(row)` finds, to a tensor.
template <class From>
HWY_INLINE void store_states(const rnn::Walk& walk, const Tensor& state, int64_t units,
                             const ThreadTeam::Member& me, const From& from) {
  const F32 d;
  if (!state) return;
  for_each_group(me, units, 1, false, [&](const UnitGroup& group) HWY_ATTR {
    for (int64_t row = 0; row < walk.count(); ++row) {
      const float* const values = from(row) + group.first;
      const int64_t to = walk.rows[row].sequence * state.stride(0);
      const int64_t columns = std::min(group.columns(), units - group.first);
      by_type(state.dtype, [&](auto t) HWY_ATTR {
        for_vectors(columns, [&](int64_t c, int64_t n) HWY_ATTR {
          store_some<decltype(t)>(state, to, group.first + c, n, hn::LoadU(d, values + c));
        });
      });
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_OPS_RNN_STEP_ROWS_PER_TARGET
