// lstm and gru on the CPU, forward.
//
// Floor: the products with x, and with h where there are many rows, run at the machine's matrix
// peak. Of one row, a step is the time in which each core reads its share of W_hh from its
// second-level cache.
//
// A team of threads stays together for all steps: each owns some of the hidden units with all their
// gates, keeps those columns of W_hh in its cache and makes the gates of its sums while they are in
// the first-level cache; all meet once a step, when the new h is complete (twice where there is a
// second product). Every few steps a thread makes the products of the next steps' x with its own
// columns of W_ih, which are then in its cache when they are needed.

#ifndef FK_OPS_RNN_CPU_FORWARD_ONCE_
#define FK_OPS_RNN_CPU_FORWARD_ONCE_

#include "core/access.h"
#include "core/thread_team.h"
#include "cpu/denormals.h"
#include "ops/rnn/cpu/forward_job.h"

#endif  // FK_OPS_RNN_CPU_FORWARD_ONCE_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/rnn/cpu/forward.cc"
#include "cpu/foreach_target.h"
#include "ops/rnn/cpu/gates.h"
#include "ops/rnn/cpu/unit_product.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

using rnn::Cell;

// Brings this thread's share of a chunk's rows of x.
template <class T>
void bring_rows(const ForwardJob& job, const rnn::Chunk& chunk, float* out,
                const ThreadTeam::Member& me) {
  const int64_t begin = me.begin(chunk.rows), end = me.end(chunk.rows), width = job.walk.p.inputs;
  int64_t of_step = 0;
  for (int64_t t = chunk.first; t < chunk.last && of_step < end; ++t) {
    const int64_t rows = job.walk.active(t);
    for (int64_t i = std::max(begin, of_step); i < std::min(end, of_step + rows); ++i) {
      const MatrixView row{job.x.data, job.x.dtype, 1, job.x.stride(-1)};
      const int64_t at = job.walk.place(i - of_step, t).offset(job.x);
      pack_rows(row.from(at), 1, width, out + i * job.x_row, padded_columns(width));
    }
    of_step += rows;
  }
}

// The products of a chunk's rows of x with the columns of this thread's units.
void multiply_input(const ForwardJob& job, const float* x, int64_t rows,
                    const ThreadTeam::Member& me) {
  for_each_group(me, job.input.units, job.input.gates, false, [&](const UnitGroup& group) HWY_ATTR {
    multiply_units(job.input, group, x, job.x_row, rows,
                   job.of_input + group.first * job.input.gates, job.input_row);
  });
}

// The sums of this thread's units for all rows of a step, through `finish`.
template <class Finish>
HWY_INLINE void step_units(const UnitMatrix& m, const float* state, int64_t state_row, int64_t t,
                           int64_t rows, const ThreadTeam::Member& me, const Finish& finish) {
  alignas(64) float memory[kUnitSums];
  for_each_group(me, m.units, m.gates, t % 2 != 0, [&](const UnitGroup& group) HWY_ATTR {
    for (int64_t r = 0; r < rows; r += kUnitRows) {
      const int64_t some = std::min(kUnitRows, rows - r);
      finish(StepRows{t, r, r + some}, group,
             sum_units(m, group, state + r * state_row, state_row, some, memory));
    }
  });
}

// `before_meeting` is called when this thread is done with what the step's last meeting is for.
template <class T, class Body>
HWY_INLINE void walk_step(const ForwardJob& job, int64_t t, int64_t rows, const InputSums& input,
                          ThreadTeam::Member& me, const Body& before_meeting) {
  step_units(job.first, job.state[t % 2], job.state_row, t, rows, me,
             [&](const StepRows& some, const UnitGroup& group, const UnitSums& sums) HWY_ATTR {
               if (job.cell == Cell::kGru) {
                 finish_gru<T>(job, some, group, sums, input);
               } else if (job.cell == Cell::kGruResetBefore) {
                 finish_reset<T>(job, some, group, sums, input);
               } else {
                 finish_lstm<T>(job, some, group, sums, input);
               }
             });
  if (job.second.units > 0) {
    me.meet([] {});
    step_units(job.second, job.between, job.hidden_row, t, rows, me,
               [&](const StepRows& some, const UnitGroup& group, const UnitSums& sums) HWY_ATTR {
                 if (job.cell == Cell::kGruResetBefore) {
                   finish_candidate<T>(job, some, group, sums, input);
                 } else {
                   finish_projection<T>(job, some, group, sums);
                 }
               });
  }
  before_meeting();
  me.meet([] {});
}

template <class T>
void walk_steps(const ForwardJob& job, ThreadTeam::Member& me) {
  rnn::Chunk chunk = rnn::Chunk::from(job.walk, 0);
  bring_rows<T>(job, chunk, job.x_rows[0], me);
  me.meet([] {});  // first states are there, too
  for (int64_t i = 0; chunk.rows > 0; ++i) {
    multiply_input(job, job.x_rows[i % 2], chunk.rows, me);
    const rnn::Chunk next = rnn::Chunk::from(job.walk, chunk.last);
    const float* input = job.of_input;
    for (int64_t t = chunk.first; t < chunk.last; ++t) {
      const int64_t rows = job.walk.active(t);
      walk_step<T>(job, t, rows, InputSums{input, job}, me, [&]() HWY_ATTR {
        if (t + 1 == chunk.last) bring_rows<T>(job, next, job.x_rows[(i + 1) % 2], me);
      });
      input += rows * job.input_row;
    }
    chunk = next;
  }
}

}  // namespace

void rnn_walk_forward(const ForwardJob& job, ThreadTeam::Member& me) {
  const rnn::Problem& p = job.walk.p;
  for (const UnitMatrix* m : {&job.input, &job.first, &job.second}) pack_own_units(*m, me);
  const bool lstm = job.cell == Cell::kLstm || job.cell == Cell::kLstmProjected;
  load_states(job.walk, job.h0, p.outputs, job.state[0], job.state_row, me);
  if (lstm) load_states(job.walk, job.c0, p.hidden, job.kept, job.hidden_row, me);
  by_type(job.dtype, [&](auto t) HWY_ATTR { walk_steps<decltype(t)>(job, me); });
  store_states(job.walk, job.h, p.outputs, me, [&](int64_t row) {
    return job.state[job.walk.rows[row].length() % 2] + row * job.state_row;
  });
  if (!lstm) return;
  store_states(job.walk, job.c, p.hidden, me,
               [&](int64_t row) { return job.kept + row * job.hidden_row; });
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace fk::cpu {

FK_CPU_EXPORT(rnn_walk_forward);

namespace {

using rnn::Cell;
using rnn::Problem;
using rnn::UnitMatrix;

// The one or two bias vectors of the gates, as floats; those of gate g begin at g * row.
template <class Args>
void add_biases(const Args& a, const Problem& p, int64_t row, float* bias, float* bias_of_met) {
  std::fill_n(bias, p.gates * row, 0.0f);
  std::fill_n(bias_of_met, row, 0.0f);
  for (int64_t i = 0; i < p.gates * p.hidden; ++i) {
    const int64_t gate = i / p.hidden, unit = i % p.hidden;
    const bool met = p.gates == 3 && gate == 2;
    const double of_x = a.b_ih ? load(a.b_ih, i * a.b_ih.stride(0)) : 0;
    const double of_h = a.b_hh ? load(a.b_hh, i * a.b_hh.stride(0)) : 0;
    bias[gate * row + unit] = static_cast<float>(met ? of_x : of_x + of_h);
    if (met) bias_of_met[unit] = static_cast<float>(of_h);
  }
}

// Whether the weights are read where they are: packing them takes as long as a few steps, and rows
// of weights along K serve a few rows as well.
bool in_place(const UnitMatrix& m, const Problem& p) {
  for (int64_t g = 0; g < m.gates; ++g) {
    if (m.gate[g].row != 1 && m.depth > 1) return false;
  }
  return p.length <= 4;
}

// What the second product of a step multiplies by, if there is one.
UnitMatrix second_matrix(const LstmFwd& a, const Problem& p) {
  if (!a.w_hr) return {};
  return rnn::units_of_rows(a.w_hr, 0, 1, p.outputs);
}
UnitMatrix second_matrix(const GruFwd& a, const Problem& p) {
  if (a.reset_after) return {};
  return rnn::units_of_rows(a.w_hh, 2 * p.hidden, 1, p.hidden);
}

template <class Args>
struct ForwardParts {
  WorkspaceParts parts;
  Problem p;
  rnn::Walk walk;
  UnitMatrix input, first, second;
  float *x_rows[2], *of_input, *bias, *bias_of_met, *state[2], *between, *kept;
  int64_t x_row, input_row, state_row, hidden_row;

  ForwardParts(const Args& a, void* memory)
      : parts(memory),
        p(rnn::problem_of(a)),
        walk(p, parts),
        x_row(rnn::spread_columns(p.inputs)),
        input_row(rnn::spread_columns(p.gates * padded_columns(p.hidden))),
        state_row(rnn::spread_columns(p.outputs)),
        hidden_row(rnn::spread_columns(p.hidden)) {
    const Cell cell = rnn::cell_of(a);
    input = rnn::units_of_rows(a.w_ih, 0, p.gates, p.hidden);
    first = rnn::units_of_rows(a.w_hh, 0, cell == Cell::kGruResetBefore ? 2 : p.gates, p.hidden);
    second = second_matrix(a, p);
    for (UnitMatrix* m : {&input, &first, &second}) {
      if (m->units > 0 && !in_place(*m, p)) m->packed = parts.take(m->packed_floats());
    }
    const int64_t rows = p.sequences.count, chunk_rows = rnn::Chunk::most_rows(p);
    for (float*& s : state) s = parts.take(rows * state_row);
    kept = parts.take(rows * hidden_row);
    const bool has_second = cell == Cell::kLstmProjected || cell == Cell::kGruResetBefore;
    between = parts.take(has_second ? rows * hidden_row : 0);
    bias = parts.take(p.gates * hidden_row);
    bias_of_met = parts.take(hidden_row);
    for (float*& x : x_rows) x = parts.take(chunk_rows * x_row);
    of_input = parts.take(chunk_rows * input_row);
  }
};

void set_cells(const LstmFwd& a, rnn::ForwardJob* job) {
  job->c0 = a.c0;
  job->c = a.c;
  job->cells = a.cells;
}
void set_cells(const GruFwd&, rnn::ForwardJob*) {}

template <class Args>
Status run_forward(const Args& a, const Exec& exec) {
  const ForwardParts<Args> all(a, exec.workspace());
  const Problem& p = all.p;
  if (p.sequences.count == 0) return {};
  all.walk.sort();
  add_biases(a, p, all.hidden_row, all.bias, all.bias_of_met);
  rnn::ForwardJob job{rnn::cell_of(a),
                      all.walk,
                      a.x,
                      all.input,
                      all.first,
                      all.second,
                      {all.x_rows[0], all.x_rows[1]},
                      all.x_row,
                      all.of_input,
                      all.input_row,
                      all.bias,
                      all.bias_of_met,
                      {all.state[0], all.state[1]},
                      all.between,
                      all.kept,
                      all.state_row,
                      all.hidden_row,
                      a.h0,
                      {},
                      a.y,
                      a.h,
                      {},
                      a.gates,
                      {},
                      a.x.dtype};
  set_cells(a, &job);
  const auto walk = FK_CPU_DISPATCH(rnn_walk_forward);
  const int64_t most = rnn::team_size(p, all.walk.count(), p.inputs + p.outputs);
  ThreadTeam::run(exec, most, [&](ThreadTeam::Member& me) {
    const FlushDenormals flush;
    walk(job, me);
  });
  return {};
}

}  // namespace

size_t workspace(const LstmFwd& a) { return ForwardParts<LstmFwd>(a, nullptr).parts.bytes(); }
size_t workspace(const GruFwd& a) { return ForwardParts<GruFwd>(a, nullptr).parts.bytes(); }
Status run(const LstmFwd& a, const Exec& exec) { return run_forward(a, exec); }
Status run(const GruFwd& a, const Exec& exec) { return run_forward(a, exec); }

}  // namespace fk::cpu

#endif  // HWY_ONCE
