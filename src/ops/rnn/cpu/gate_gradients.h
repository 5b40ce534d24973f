// A step backwards, element by element: from the gradient of a step's output to that of its gates.

// Once per target.
#if defined(FK_OPS_RNN_GATE_GRADIENTS_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_OPS_RNN_GATE_GRADIENTS_PER_TARGET
#undef FK_OPS_RNN_GATE_GRADIENTS_PER_TARGET
#else
#define FK_OPS_RNN_GATE_GRADIENTS_PER_TARGET
#endif

#include "cpu/simd_activations.h"
#include "ops/rnn/cpu/backward_job.h"
#include "ops/rnn/cpu/step_rows.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {

using rnn::BackwardJob;

// Stores n entries of the row of a position, if they are wanted.
HWY_INLINE void store_wanted(const MatrixView& m, int64_t row, int64_t column, int64_t n,
                             hn::Vec<F32> v) {
  if (m.data == nullptr) return;
  if (m.dtype == DType::kBFloat16) {
    store_vector(static_cast<bfloat16_t*>(m.data) + row * m.row + column, n, v);
  } else {
    store_vector(static_cast<float*>(m.data) + row * m.row + column, n, v);
  }
}

// n entries of a parameter's row, zeros where it is not given.
template <class T>
HWY_INLINE hn::Vec<F32> load_parameter(const Tensor& t, int64_t row, int64_t column, int64_t n) {
  if (!t) return hn::Zero(F32());
  const int64_t at = row * t.stride(0);
  return t.dtype == DType::kFloat32 ? load_some<float>(t, at, column, n)
                                    : load_some<T>(t, at, column, n);
}

// The state before a step, from the outputs: what its W_hh was multiplied by.
template <class T>
HWY_INLINE hn::Vec<F32> state_before(const BackwardJob& job, int64_t row, int64_t t, int64_t unit,
                                     int64_t n) {
  if (t == 0) return load_parameter<T>(job.h0, job.walk.rows[row].sequence, unit, n);
  return load_some<T>(job.y, job.walk.place(row, t - 1).offset(job.y), unit, n);
}

// Asks for what the next step back reads and writes of one row and vector of units: rows of a step
// are far apart in memory, and no processor guesses where those of the next step are.
template <class T>
HWY_INLINE void ask_for_step(const BackwardJob& job, int64_t row, int64_t t, int64_t unit) {
  if (t < 0) return;
  const Place place = job.walk.place(row, t);
  const auto ask = [](const Tensor& from, int64_t element, int64_t size) HWY_ATTR {
    __builtin_prefetch(static_cast<const char*>(from.data) + element * size, 0, 2);
  };
  const auto ask_to_write = [&](const MatrixView& to, int64_t column) HWY_ATTR {
    if (to.data == nullptr) return;
    const int64_t at = job.number(place) * to.row + column + unit;
    __builtin_prefetch(static_cast<const char*>(to.data) + at * size_of(to.dtype), 1, 2);
  };
  constexpr int64_t kSize = sizeof(T);
  for (int64_t gate = 0; gate < rnn::kKeptGates; ++gate) {
    ask(job.gates, place.offset(job.gates) + gate * job.walk.p.hidden + unit, kSize);
  }
  ask(job.dy, place.offset(job.dy) + unit, kSize);
  if (job.cells && t > 0) {  // the cells of step t are those before the step at hand
    ask(job.cells, job.walk.place(row, t - 1).offset(job.cells) + unit, 4);
  }
  for (int64_t gate = 0; gate < job.walk.p.gates; ++gate) {
    ask_to_write(job.of_input, gate * job.walk.p.hidden);
  }
  ask_to_write(job.states, 0);
  ask_to_write(job.of_met, 0);
}

// s (1 - s), the slope of the sigmoid whose value is s.
HWY_INLINE hn::Vec<F32> sigmoid_slope(hn::Vec<F32> s) { return hn::NegMulAdd(s, s, s); }
// 1 - t^2, the slope of the tanh whose value is t.
HWY_INLINE hn::Vec<F32> tanh_slope(hn::Vec<F32> t) {
  return hn::NegMulAdd(t, t, hn::Set(F32(), 1.0f));
}

// Where the gradients of one vector of units go, gate by gate.
struct GateGradients {
  const BackwardJob& job;
  int64_t number, unit, n;
  float* of_gates;

  GateGradients(const BackwardJob& j, int64_t row, int64_t t, const Place& place,
                int64_t first_unit, int64_t count)
      : job(j),
        number(j.number(place)),
        unit(first_unit),
        n(count),
        of_gates(j.of_gates[t % 2] + row * j.gates_row + first_unit) {}

  // Stores the gradient of the product with the state.
  HWY_INLINE void of_state_product(int64_t gate, hn::Vec<F32> v) const {
    store_vector(of_gates + gate * job.walk.p.hidden, n, v);
  }
  // Stores the gradient of the product with x, which is that of its bias too.
  HWY_INLINE void of_input(int64_t gate, hn::Vec<F32> v) const {
    store_wanted(job.of_input, number, gate * job.walk.p.hidden + unit, n, v);
    add_to_bias(gate, v);
  }
  HWY_INLINE void add_to_bias(int64_t sum, hn::Vec<F32> v) const {
    const F32 d;
    float* const to = job.sums + sum * job.hidden_row + unit;
    hn::StoreU(hn::Add(hn::LoadU(d, to), v), d, to);
  }
  HWY_INLINE void both(int64_t gate, hn::Vec<F32> v) const {
    of_state_product(gate, v);
    of_input(gate, v);
  }
};

// `sums` are the gradient of o tanh(c): with a projection all of it, otherwise dy is added.
template <class T>
HWY_NOINLINE void lstm_gradients(const BackwardJob& job, const StepRows& rows,
                                 const UnitGroup& group, const UnitSums& sums) {
  const F32 d;
  const int64_t hidden = job.walk.p.hidden;
  for_each_vector(
      job.walk, rows, group, hidden,
      [&](int64_t row, const Place& place, int64_t v, int64_t unit, int64_t n) HWY_ATTR {
        const GateGradients gradients(job, row, rows.t, place, unit, n);
        const auto gate = [&](int64_t g) HWY_ATTR {
          return load_some<T>(job.gates, place.offset(job.gates), g * hidden + unit, n);
        };
        const auto i = gate(0), f = gate(1), g = gate(2), o = gate(3);
        ask_for_step<T>(job, row, rows.t - 1, unit);
        const auto c = load_some<float>(job.cells, place.offset(job.cells), unit, n);
        auto before = hn::Zero(d);
        if (rows.t == 0) {
          before = load_parameter<T>(job.c0, job.walk.rows[row].sequence, unit, n);
        } else {
          const int64_t at = job.walk.place(row, rows.t - 1).offset(job.cells);
          before = load_some<float>(job.cells, at, unit, n);
        }
        auto dm = sums(row - rows.first, 0, v);
        if (job.cell == rnn::Cell::kLstm) {
          dm = hn::Add(dm, load_some<T>(job.dy, place.offset(job.dy), unit, n));
        }
        const auto tanh_c = Tanh(d, c);
        store_wanted(job.between, gradients.number, unit, n, hn::Mul(o, tanh_c));
        float* const carried = job.carried + row * job.hidden_row + unit;
        const auto dc = hn::MulAdd(hn::Mul(dm, o), tanh_slope(tanh_c), hn::LoadU(d, carried));
        hn::StoreU(hn::Mul(dc, f), d, carried);
        gradients.both(0, hn::Mul(hn::Mul(dc, g), sigmoid_slope(i)));
        gradients.both(1, hn::Mul(hn::Mul(dc, before), sigmoid_slope(f)));
        gradients.both(2, hn::Mul(hn::Mul(dc, i), tanh_slope(g)));
        gradients.both(3, hn::Mul(hn::Mul(dm, tanh_c), sigmoid_slope(o)));
      });
}

// The whole gradient of h, which the way back through the projection starts from.
template <class T>
HWY_NOINLINE void output_gradients(const BackwardJob& job, const StepRows& rows,
                                   const UnitGroup& group, const UnitSums& sums) {
  const F32 d;
  for_each_vector(
      job.walk, rows, group, job.walk.p.outputs,
      [&](int64_t row, const Place& place, int64_t v, int64_t unit, int64_t n) HWY_ATTR {
        const auto dh = hn::Add(sums(row - rows.first, 0, v),
                                load_some<T>(job.dy, place.offset(job.dy), unit, n));
        hn::StoreU(dh, d, job.of_state + row * job.state_row + unit);
        store_wanted(job.of_outputs, job.number(place), unit, n, dh);
      });
}

// Of a GRU: all that follows from the gradient of h, but for r where the reset gate comes before
// the product.
template <class T>
HWY_NOINLINE void gru_gradients(const BackwardJob& job, const StepRows& rows,
                                const UnitGroup& group, const UnitSums& sums) {
  const F32 d;
  const int64_t hidden = job.walk.p.hidden;
  const auto one = hn::Set(d, 1.0f);
  for_each_vector(
      job.walk, rows, group, hidden,
      [&](int64_t row, const Place& place, int64_t v, int64_t unit, int64_t count) HWY_ATTR {
        const GateGradients gradients(job, row, rows.t, place, unit, count);
        const auto gate = [&](int64_t g) HWY_ATTR {
          return load_some<T>(job.gates, place.offset(job.gates), g * hidden + unit, count);
        };
        ask_for_step<T>(job, row, rows.t - 1, unit);
        const auto z = gate(1), n = gate(2);
        const auto before = state_before<T>(job, row, rows.t, unit, count);
        float* const carried = job.carried + row * job.hidden_row + unit;
        const auto dy = load_some<T>(job.dy, place.offset(job.dy), unit, count);
        const auto dh = hn::Add(hn::Add(sums(row - rows.first, 0, v), hn::LoadU(d, carried)), dy);
        hn::StoreU(hn::Mul(dh, z), d, carried);
        gradients.both(1, hn::Mul(hn::Mul(dh, hn::Sub(before, n)), sigmoid_slope(z)));
        const auto dn = hn::Mul(hn::Mul(dh, hn::Sub(one, z)), tanh_slope(n));
        gradients.of_input(2, dn);
        if (job.cell == rnn::Cell::kGruResetBefore) return gradients.of_state_product(2, dn);
        const auto r = gate(0), met = gate(3), dmet = hn::Mul(dn, r);
        gradients.both(0, hn::Mul(hn::Mul(dn, met), sigmoid_slope(r)));
        gradients.of_state_product(2, dmet);
        gradients.add_to_bias(3, dmet);
        store_wanted(job.of_met, gradients.number, unit, count, dmet);
      });
}

// `sums` are the gradient of what r met, r h.
template <class T>
HWY_NOINLINE void reset_gradients(const BackwardJob& job, const StepRows& rows,
                                  const UnitGroup& group, const UnitSums& sums) {
  const F32 d;
  for_each_vector(job.walk, rows, group, job.walk.p.hidden,
                  [&](int64_t row, const Place& place, int64_t v, int64_t unit, int64_t n)
                      HWY_ATTR {
                        const GateGradients gradients(job, row, rows.t, place, unit, n);
                        const auto r = load_some<T>(job.gates, place.offset(job.gates), unit, n);
                        const auto before = state_before<T>(job, row, rows.t, unit, n);
                        const auto dmet = sums(row - rows.first, 0, v);
                        gradients.both(0, hn::Mul(hn::Mul(dmet, before), sigmoid_slope(r)));
                        float* const carried = job.carried + row * job.hidden_row + unit;
                        hn::StoreU(hn::MulAdd(dmet, r, hn::LoadU(d, carried)), d, carried);
                      });
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_OPS_RNN_GATE_GRADIENTS_PER_TARGET
