// lstm and gru on the CPU, backward.
//
// Floor: twice the forward's operations. Only the products with W_hh wait for each other; the
// gradients of W_ih, W_hh and x are matrix products over all positions at once.
//
// One walk from the last step to the first finds the gradients of the gates. Threads own hidden
// units as in the forward: a thread multiplies the gates' gradients of the step behind it (all of
// them) by its own columns of W_hh, which gives the gradient of h for its units, and makes the
// gradients of their gates; then all meet. The walk writes the gates' gradients by position, for
// the products that follow, and sums them for the biases.

#ifndef FK_OPS_RNN_CPU_BACKWARD_ONCE_
#define FK_OPS_RNN_CPU_BACKWARD_ONCE_

#include "core/access.h"
#include "core/thread_team.h"
#include "cpu/denormals.h"
#include "cpu/gemm/multiply.h"
#include "ops/rnn/cpu/backward_job.h"

#endif  // FK_OPS_RNN_CPU_BACKWARD_ONCE_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/rnn/cpu/backward.cc"
#include "cpu/foreach_target.h"
#include "ops/rnn/cpu/gate_gradients.h"
#include "ops/rnn/cpu/step_rows.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

using rnn::Cell;

// The gradient of h that `rows` rows have after step t, without dy, through `finish`: the product
// of the gates' gradients of step t + 1, or where t is a row's last step, dh.
template <class Finish>
HWY_INLINE void gradients_of_state(const BackwardJob& job, int64_t t, int64_t rows,
                                   const ThreadTeam::Member& me, const Finish& finish) {
  const F32 d;
  alignas(64) float memory[kUnitSums];
  const int64_t units = job.to_state.units, behind = job.walk.active(t + 1);
  const float* const gates = job.of_gates[(t + 1) % 2];
  for_each_group(me, units, 1, t % 2 != 0, [&](const UnitGroup& group) HWY_ATTR {
    for (int64_t r = 0; r < rows; r += kUnitRows) {
      const int64_t some = std::min(kUnitRows, rows - r);
      const int64_t products = std::clamp<int64_t>(behind - r, 0, some);
      const UnitSums sums = sum_units(job.to_state, group, gates + r * job.gates_row, job.gates_row,
                                      products, memory);
      const int64_t width = group.columns();
      for (int64_t i = products; i < some; ++i) {
        const int64_t sequence = job.walk.rows[r + i].sequence;
        for_vectors(std::min(width, units - group.first), [&](int64_t c, int64_t n) HWY_ATTR {
          const auto dh = load_parameter<float>(job.dh, sequence, group.first + c, n);
          hn::StoreU(dh, d, memory + i * width + c);
        });
      }
      finish(StepRows{t, r, r + some}, group, sums);
    }
  });
}

// The second product of a step.
template <class Finish>
HWY_INLINE void second_product(const BackwardJob& job, const float* state, int64_t state_row,
                               int64_t t, int64_t rows, const ThreadTeam::Member& me,
                               const Finish& finish) {
  alignas(64) float memory[kUnitSums];
  for_each_group(me, job.second.units, 1, t % 2 == 0, [&](const UnitGroup& group) HWY_ATTR {
    for (int64_t r = 0; r < rows; r += kUnitRows) {
      const int64_t some = std::min(kUnitRows, rows - r);
      finish(StepRows{t, r, r + some}, group,
             sum_units(job.second, group, state + r * state_row, state_row, some, memory));
    }
  });
}

// What the weights' gradients multiply the gates' by.
template <class T>
HWY_INLINE void keep_states_before(const BackwardJob& job, const StepRows& rows,
                                   const UnitGroup& group) {
  if (job.states.data == nullptr) return;
  for_each_vector(job.walk, rows, group, job.walk.p.outputs,
                  [&](int64_t row, const Place& place, int64_t, int64_t unit, int64_t n) HWY_ATTR {
                    store_wanted(job.states, job.number(place), unit, n,
                                 state_before<T>(job, row, rows.t, unit, n));
                  });
}

template <class T>
void walk_back(const BackwardJob& job, ThreadTeam::Member& me) {
  const int64_t hidden = job.walk.p.hidden;
  for (int64_t t = job.walk.steps() - 1; t >= 0; --t) {
    const int64_t rows = job.walk.active(t);
    gradients_of_state(job, t, rows, me,
                       [&](const StepRows& some, const UnitGroup& group, const UnitSums& sums)
                           HWY_ATTR {
                             keep_states_before<T>(job, some, group);
                             if (job.cell == Cell::kLstm) {
                               lstm_gradients<T>(job, some, group, sums);
                             } else if (job.cell == Cell::kLstmProjected) {
                               output_gradients<T>(job, some, group, sums);
                             } else {
                               gru_gradients<T>(job, some, group, sums);
                             }
                           });
    me.meet([] {});
    if (job.cell == Cell::kLstmProjected) {
      second_product(job, job.of_state, job.state_row, t, rows, me,
                     [&](const StepRows& some, const UnitGroup& group, const UnitSums& sums)
                         HWY_ATTR { lstm_gradients<T>(job, some, group, sums); });
      me.meet([] {});
    } else if (job.cell == Cell::kGruResetBefore) {
      second_product(job, job.of_gates[t % 2] + 2 * hidden, job.gates_row, t, rows, me,
                     [&](const StepRows& some, const UnitGroup& group, const UnitSums& sums)
                         HWY_ATTR { reset_gradients<T>(job, some, group, sums); });
      me.meet([] {});
    }
  }
}

// The gradient of h0: what reaches the time before the first step.
void store_first_state(const BackwardJob& job, const ThreadTeam::Member& me) {
  const F32 d;
  if (!job.dh0) return;
  const bool gru = job.cell == Cell::kGru || job.cell == Cell::kGruResetBefore;
  gradients_of_state(
      job, -1, job.walk.count(), me,
      [&](const StepRows& some, const UnitGroup& group, const UnitSums& sums) HWY_ATTR {
        by_type(job.dh0.dtype, [&](auto type) HWY_ATTR {
          for (int64_t row = some.first; row < some.last; ++row) {
            const int64_t to = job.walk.rows[row].sequence * job.dh0.stride(0);
            const int64_t columns = std::min(group.columns(), job.walk.p.outputs - group.first);
            for_vectors(columns, [&](int64_t c, int64_t n) HWY_ATTR {
              auto dh = hn::LoadU(d, sums.data + (row - some.first) * sums.stride + c);
              if (gru) {
                const float* const carried = job.carried + row * job.hidden_row + group.first;
                dh = hn::Add(dh, hn::LoadU(d, carried + c));
              }
              store_some<decltype(type)>(job.dh0, to, group.first + c, n, dh);
            });
          }
        });
      });
}

}  // namespace

void rnn_walk_backward(const BackwardJob& job, ThreadTeam::Member& me) {
  const rnn::Problem& p = job.walk.p;
  pack_own_units(job.to_state, me);
  if (job.second.units > 0) pack_own_units(job.second, me);
  load_states(job.walk, job.dc, p.hidden, job.carried, job.hidden_row, me);
  for_each_group(me, p.hidden, 1, false, [&](const UnitGroup& group) HWY_ATTR {
    for (int64_t i = 0; i < rnn::kKeptGates; ++i) {
      std::fill_n(job.sums + i * job.hidden_row + group.first, group.columns(), 0.0f);
    }
  });
  by_type(job.dtype, [&](auto t) HWY_ATTR { walk_back<decltype(t)>(job, me); });
  store_first_state(job, me);
  store_states(job.walk, job.dc0, p.hidden, me,
               [&](int64_t row) { return job.carried + row * job.hidden_row; });
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace fk::cpu {

FK_CPU_EXPORT(rnn_walk_backward);

namespace {

using rnn::Cell;
using rnn::Problem;
using rnn::UnitMatrix;

// Columns [first, last) of a tensor's rows.
Tensor columns_of(const Tensor& t, int64_t first, int64_t last) {
  Tensor part = t;
  part.shape[t.ndim - 1] = last - first;
  if (part.data != nullptr) {
    part.data = static_cast<char*>(t.data) + first * t.stride(-1) * size_of(t.dtype);
  }
  return part;
}
Tensor rows_between(const Tensor& t, int64_t first, int64_t last) {
  Tensor part = t;
  part.shape[0] = last - first;
  if (part.data != nullptr) {
    part.data = static_cast<char*>(t.data) + first * t.stride(0) * size_of(t.dtype);
  }
  return part;
}

// What an LSTM's backward has and a GRU's does not, and the other way round.
struct OfLstm {
  Tensor c0, dc, cells, dc0, w_hr, dw_hr;
};
OfLstm of_lstm(const LstmBwd& a) { return {a.c0, a.dc, a.cells, a.dc0, a.w_hr, a.dw_hr}; }
OfLstm of_lstm(const GruBwd&) { return {}; }

// What the walk needs and leaves behind, and the products over all positions that follow it.
template <class Args>
struct BackwardParts {
  WorkspaceParts parts;
  Problem p;
  Cell cell;
  OfLstm lstm;
  rnn::Walk walk;
  UnitMatrix to_state, second{};
  float *of_gates[2], *of_state, *carried, *sums;
  int64_t gates_row, state_row, hidden_row;
  MatrixView of_input{}, of_met{}, states{}, of_outputs{}, between{};
  Tensor met_columns;
  RowsMatrix x, met;
  Product to_x, to_w_ih, to_w_hh, to_w_hn{}, to_w_hr{};
  float* scratch;

  BackwardParts(const Args& a, void* memory)
      : parts(memory),
        p(rnn::problem_of(a)),
        cell(rnn::cell_of(a)),
        lstm(of_lstm(a)),
        walk(p, parts),
        gates_row(rnn::spread_columns(p.gates * p.hidden)),
        state_row(rnn::spread_columns(p.outputs)),
        hidden_row(rnn::spread_columns(p.hidden)),
        met_columns(columns_of(a.gates, 3 * p.hidden, 4 * p.hidden)),
        x(a.x, parts),
        met(met_columns, parts) {
    const int64_t rows = p.sequences.count, H = p.hidden, R = p.outputs;
    const bool resets_before = cell == Cell::kGruResetBefore;
    to_state = rnn::units_of_columns(a.w_hh, 0, (resets_before ? 2 : p.gates) * H);
    if (cell == Cell::kLstmProjected) second = rnn::units_of_columns(lstm.w_hr, 0, R);
    if (resets_before) second = rnn::units_of_columns(a.w_hh, 2 * H, 3 * H);
    for (UnitMatrix* m : {&to_state, &second}) m->packed = parts.take(m->packed_floats());
    for (float*& gates : of_gates) gates = parts.take(rows * gates_row);
    of_state = parts.take(cell == Cell::kLstmProjected ? rows * state_row : 0);
    carried = parts.take(rows * hidden_row);
    sums = parts.take(rnn::kKeptGates * hidden_row);

    if (a.dx || a.dw_ih || a.dw_hh) of_input = take_rows(a, p.gates * H);
    if (a.dw_hh) states = take_rows(a, R);
    if (a.dw_hh && cell == Cell::kGru) of_met = take_rows(a, H);
    if (lstm.dw_hr) of_outputs = take_rows(a, R);
    if (lstm.dw_hr) between = take_rows(a, H);
    const int64_t M = p.positions();
    to_x = {of_input, matrix_view(a.w_ih), M, p.inputs, p.gates * H};
    to_w_ih = {transposed(of_input), x.view(), p.gates * H, p.inputs, M};
    to_w_hh = {transposed(of_input), states, (p.gates == 4 ? 4 : 2) * H, R, M};
    if (cell == Cell::kGru) to_w_hn = {transposed(of_met), states, H, H, M};
    if (resets_before) to_w_hn = {transposed(of_input.from(0, 2 * H)), met.view(), H, H, M};
    to_w_hr = {transposed(of_outputs), between, R, H, M};
    int64_t most = 0;
    for (const Product& product : {to_x, to_w_ih, to_w_hh, to_w_hn, to_w_hr}) {
      most = std::max(most, product_scratch(product));
    }
    scratch = parts.take(most);
  }

  // A row for each position. Gradients of bfloat16 are kept as torch keeps them, where products of
  // bfloat16 are quick; float16 could be too small.
  MatrixView take_rows(const Args& a, int64_t columns) {
    const DType dtype = a.x.dtype == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat32;
    const int64_t width = padded_columns(columns);
    return {parts.template take<char>(p.positions() * width * size_of(dtype)), dtype, width, 1};
  }
};

// Stores the gradient of a bias: of its third gate that is the sum numbered `third`.
void store_bias(const Tensor& bias, const float* sums, int64_t row, int64_t hidden, int64_t third) {
  for (int64_t i = 0; bias && i < bias.size(0); ++i) {
    const int64_t gate = i / hidden;
    store(bias, i * bias.stride(0), sums[(gate == 2 ? third : gate) * row + i % hidden]);
  }
}

template <class Args>
Status run_backward(const Args& a, const Exec& exec) {
  const BackwardParts<Args> all(a, exec.workspace());
  const Problem& p = all.p;
  all.walk.sort();
  const rnn::BackwardJob job{all.cell,
                             all.walk,
                             all.to_state,
                             all.second,
                             {all.of_gates[0], all.of_gates[1]},
                             all.gates_row,
                             all.of_state,
                             all.state_row,
                             all.carried,
                             all.sums,
                             all.hidden_row,
                             all.of_input,
                             all.of_met,
                             all.states,
                             all.of_outputs,
                             all.between,
                             a.dy,
                             a.dh,
                             all.lstm.dc,
                             a.h0,
                             all.lstm.c0,
                             a.y,
                             a.gates,
                             all.lstm.cells,
                             a.dh0,
                             all.lstm.dc0,
                             a.x.dtype};
  const auto walk = FK_CPU_DISPATCH(rnn_walk_backward);
  ThreadTeam::run(exec, rnn::team_size(p, all.walk.count(), p.outputs),
                  [&](ThreadTeam::Member& me) {
                    const FlushDenormals flush;
                    walk(job, me);
                  });
  store_bias(a.db_ih, all.sums, all.hidden_row, p.hidden, 2);
  store_bias(a.db_hh, all.sums, all.hidden_row, p.hidden, all.cell == Cell::kGru ? 3 : 2);
  if (a.dx) multiply(all.to_x, all.scratch, {a.dx, {}}, exec);
  if (a.dw_ih) {
    all.x.prepare(exec);
    multiply(all.to_w_ih, all.scratch, {a.dw_ih, {}}, exec);
  }
  if (a.dw_hh) {
    const int64_t rows = all.to_w_hh.rows;
    multiply(all.to_w_hh, all.scratch, {rows_between(a.dw_hh, 0, rows), {}}, exec);
    if (p.gates == 3) {
      if (all.cell == Cell::kGruResetBefore) all.met.prepare(exec);
      multiply(all.to_w_hn, all.scratch, {rows_between(a.dw_hh, rows, rows + p.hidden), {}}, exec);
    }
  }
  if (all.lstm.dw_hr) multiply(all.to_w_hr, all.scratch, {all.lstm.dw_hr, {}}, exec);
  return {};
}

}  // namespace

size_t workspace(const LstmBwd& a) { return BackwardParts<LstmBwd>(a, nullptr).parts.bytes(); }
size_t workspace(const GruBwd& a) { return BackwardParts<GruBwd>(a, nullptr).parts.bytes(); }
Status run(const LstmBwd& a, const Exec& exec) { return run_backward(a, exec); }
Status run(const GruBwd& a, const Exec& exec) { return run_backward(a, exec); }

}  // namespace fk::cpu

#endif  // HWY_ONCE
