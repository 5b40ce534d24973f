// From sums to gates to the next state: what follows the products of a step, element by element.

// Once per target.
#if defined(FK_OPS_RNN_GATES_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_OPS_RNN_GATES_PER_TARGET
#undef FK_OPS_RNN_GATES_PER_TARGET
#else
#define FK_OPS_RNN_GATES_PER_TARGET
#endif

#include "cpu/simd_activations.h"
#include "ops/rnn/cpu/forward_job.h"
#include "ops/rnn/cpu/step_rows.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {

using rnn::ForwardJob;

// This is what came from x for the rows of a step and a group of units, with the biases.
struct InputSums {
  const float* sums;  // of the step's first row
  const ForwardJob& job;

  HWY_INLINE hn::Vec<F32> operator()(int64_t row, int64_t gate, int64_t unit) const {
    const F32 d;
    const int64_t gates = job.walk.p.gates, lanes = hn::Lanes(d);
    const auto sum = hn::LoadU(d, sums + row * job.input_row + unit * gates + gate * lanes);
    return hn::Add(sum, hn::LoadU(d, job.bias + gate * job.hidden_row + unit));
  }
};

// Stores a gate, or a cell, if it is kept.
template <class T>
HWY_INLINE void keep(const Tensor& t, const Place& place, int64_t column, int64_t n,
                     hn::Vec<F32> v) {
  if (t) store_some<T>(t, place.offset(t), column, n, v);
}

template <class T>
HWY_NOINLINE void finish_lstm(const ForwardJob& job, const StepRows& rows, const UnitGroup& group,
                              const UnitSums& sums, const InputSums& input) {
  const F32 d;
  const int64_t hidden = job.walk.p.hidden;
  const bool projects = job.cell == rnn::Cell::kLstmProjected;
  float* const to = projects ? job.between : job.state[(rows.t + 1) % 2];
  const int64_t to_row = projects ? job.hidden_row : job.state_row;
  for_each_vector(job.walk, rows, group, hidden,
                  [&](int64_t row, const Place& place, int64_t v, int64_t unit, int64_t n)
                      HWY_ATTR {
                        const auto before = [&](int64_t gate) HWY_ATTR {
                          return hn::Add(sums(row - rows.first, gate, v), input(row, gate, unit));
                        };
                        const auto i = Sigmoid(d, before(0)), f = Sigmoid(d, before(1));
                        const auto g = Tanh(d, before(2)), o = Sigmoid(d, before(3));
                        float* const cell = job.kept + row * job.hidden_row + unit;
                        const auto c = hn::MulAdd(f, hn::LoadU(d, cell), hn::Mul(i, g));
                        hn::StoreU(first_lanes(c, n), d, cell);
                        const auto m = first_lanes(hn::Mul(o, Tanh(d, c)), n);
                        hn::StoreU(m, d, to + row * to_row + unit);
                        if (!projects) keep<T>(job.y, place, unit, n, m);
                        keep<T>(job.gates, place, unit, n, i);
                        keep<T>(job.gates, place, hidden + unit, n, f);
                        keep<T>(job.gates, place, 2 * hidden + unit, n, g);
                        keep<T>(job.gates, place, 3 * hidden + unit, n, o);
                        keep<float>(job.cells, place, unit, n, c);
                      });
}

// The new h is the sum itself.
template <class T>
HWY_NOINLINE void finish_projection(const ForwardJob& job, const StepRows& rows,
                                    const UnitGroup& group, const UnitSums& sums) {
  const F32 d;
  float* const to = job.state[(rows.t + 1) % 2];
  for_each_vector(job.walk, rows, group, job.walk.p.outputs,
                  [&](int64_t row, const Place& place, int64_t v, int64_t unit, int64_t n)
                      HWY_ATTR {
                        const auto h = first_lanes(sums(row - rows.first, 0, v), n);
                        hn::StoreU(h, d, to + row * job.state_row + unit);
                        keep<T>(job.y, place, unit, n, h);
                      });
}

// The last line of a GRU: h = (1 - z) n + z h.
template <class T>
HWY_INLINE void finish_state(const ForwardJob& job, const StepRows& rows, int64_t row,
                             const Place& place, int64_t unit, int64_t count, hn::Vec<F32> z,
                             hn::Vec<F32> n) {
  const F32 d;
  const int64_t at = row * job.state_row + unit;
  const auto h = hn::LoadU(d, job.state[rows.t % 2] + at);
  const auto next = first_lanes(hn::MulAdd(z, hn::Sub(h, n), n), count);
  hn::StoreU(next, d, job.state[(rows.t + 1) % 2] + at);
  keep<T>(job.y, place, unit, count, next);
  keep<T>(job.gates, place, 2 * job.walk.p.hidden + unit, count, n);
}

template <class T>
HWY_NOINLINE void finish_gru(const ForwardJob& job, const StepRows& rows, const UnitGroup& group,
                             const UnitSums& sums, const InputSums& input) {
  const F32 d;
  const int64_t hidden = job.walk.p.hidden;
  for_each_vector(
      job.walk, rows, group, hidden,
      [&](int64_t row, const Place& place, int64_t v, int64_t unit, int64_t n) HWY_ATTR {
        const int64_t r_row = row - rows.first;
        const auto r = Sigmoid(d, hn::Add(sums(r_row, 0, v), input(row, 0, unit)));
        const auto z = Sigmoid(d, hn::Add(sums(r_row, 1, v), input(row, 1, unit)));
        const auto met = hn::Add(sums(r_row, 2, v), hn::LoadU(d, job.bias_of_met + unit));
        keep<T>(job.gates, place, unit, n, r);
        keep<T>(job.gates, place, hidden + unit, n, z);
        keep<T>(job.gates, place, 3 * hidden + unit, n, met);
        const auto candidate = Tanh(d, hn::MulAdd(r, met, input(row, 2, unit)));
        finish_state<T>(job, rows, row, place, unit, n, z, candidate);
      });
}

// Where the reset gate comes before the product: r and z, then, of what r met, the rest.
template <class T>
HWY_NOINLINE void finish_reset(const ForwardJob& job, const StepRows& rows, const UnitGroup& group,
                               const UnitSums& sums, const InputSums& input) {
  const F32 d;
  const int64_t hidden = job.walk.p.hidden;
  for_each_vector(
      job.walk, rows, group, hidden,
      [&](int64_t row, const Place& place, int64_t v, int64_t unit, int64_t n) HWY_ATTR {
        const int64_t r_row = row - rows.first;
        const auto r = Sigmoid(d, hn::Add(sums(r_row, 0, v), input(row, 0, unit)));
        const auto z = Sigmoid(d, hn::Add(sums(r_row, 1, v), input(row, 1, unit)));
        const auto h = hn::LoadU(d, job.state[rows.t % 2] + row * job.state_row + unit);
        const auto met = first_lanes(hn::Mul(r, h), n);
        hn::StoreU(met, d, job.between + row * job.hidden_row + unit);
        hn::StoreU(z, d, job.kept + row * job.hidden_row + unit);
        keep<T>(job.gates, place, unit, n, r);
        keep<T>(job.gates, place, hidden + unit, n, z);
        keep<T>(job.gates, place, 3 * hidden + unit, n, met);
      });
}

template <class T>
HWY_NOINLINE void finish_candidate(const ForwardJob& job, const StepRows& rows,
                                   const UnitGroup& group, const UnitSums& sums,
                                   const InputSums& input) {
  const F32 d;
  const int64_t hidden = job.walk.p.hidden;
  for_each_vector(job.walk, rows, group, hidden,
                  [&](int64_t row, const Place& place, int64_t v, int64_t unit, int64_t n)
                      HWY_ATTR {
                        const auto bias = hn::LoadU(d, job.bias_of_met + unit);
                        const auto of_x = hn::Add(input(row, 2, unit), bias);
                        const auto candidate = Tanh(d, hn::Add(sums(row - rows.first, 0, v), of_x));
                        const auto z = hn::LoadU(d, job.kept + row * job.hidden_row + unit);
                        finish_state<T>(job, rows, row, place, unit, n, z, candidate);
                      });
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_OPS_RNN_GATES_PER_TARGET
