// lstm and gru on the CPU, forward.
//
// Floor: the product with x is one matrix product over all positions, at the machine's matrix peak;
// so is that with h where there are many rows. Of one row, a step is the time in which each core
// reads its share of W_hh from its second-level cache.
//
// First the products with x, with the biases. Then a team of threads stays together for all steps:
// each owns some of the hidden units with all their gates, keeps those columns of W_hh in its cache
// and makes the gates of its sums while they are in the first-level cache; all meet once a step,
// when the new h is complete (twice where there is a second product). A batch of long sequences is
// taken some steps at a time, so that the products with x take a bounded amount of memory.

#ifndef FK_OPS_RNN_CPU_FORWARD_ONCE_
#define FK_OPS_RNN_CPU_FORWARD_ONCE_

#include "core/access.h"
#include "core/thread_team.h"
#include "cpu/denormals.h"
#include "cpu/gemm/multiply.h"
#include "ops/rnn/cpu/forward_job.h"

namespace fk::cpu {

// What becomes of the products with x: they are stored with the biases.
struct InputProduct {
  float* out;
  int64_t stride;
  const float* bias;
};

}  // namespace fk::cpu

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

// The sums of this thread's units for all rows of a step, through `finish`.
template <class Finish>
HWY_INLINE void step_units(const UnitMatrix& m, const float* state, int64_t state_row, int64_t t,
                           int64_t rows, const ThreadTeam::Member& me, const Finish& finish) {
  alignas(64) float memory[kUnitSums];
  for_each_group(me, m.units, m.gates, t % 2 != 0, [&](const UnitGroup& group) HWY_ATTR {
    for (int64_t r = 0; r < rows; r += kUnitRows) {
      const int64_t some = std::min(kUnitRows, rows - r);
      const UnitSums sums =
          multiply_units(m, group, state + r * state_row, state_row, some, memory);
      finish(StepRows{t, r, r + some}, group, sums);
    }
  });
}

template <class T>
void walk_steps(const ForwardJob& job, ThreadTeam::Member& me) {
  for (int64_t t = job.first_step; t < job.last_step; ++t) {
    const int64_t rows = job.walk.active(t);
    step_units(job.first, job.state[t % 2], job.state_row, t, rows, me,
               [&](const StepRows& some, const UnitGroup& group, const UnitSums& sums) HWY_ATTR {
                 if (job.cell == Cell::kGru) {
                   finish_gru<T>(job, some, group, sums);
                 } else if (job.cell == Cell::kGruResetBefore) {
                   finish_reset<T>(job, some, group, sums);
                 } else {
                   finish_lstm<T>(job, some, group, sums);
                 }
               });
    me.meet([] {});
    if (job.second.units == 0) continue;
    step_units(job.second, job.between, job.hidden_row, t, rows, me,
               [&](const StepRows& some, const UnitGroup& group, const UnitSums& sums) HWY_ATTR {
                 if (job.cell == Cell::kGruResetBefore) {
                   finish_candidate<T>(job, some, group, sums);
                 } else {
                   finish_projection<T>(job, some, group, sums);
                 }
               });
    me.meet([] {});
  }
}

}  // namespace

void rnn_walk_forward(const ForwardJob& job, ThreadTeam::Member& me) {
  const rnn::Problem& p = job.walk.p;
  pack_own_units(job.first, me);
  if (job.second.units > 0) pack_own_units(job.second, me);
  const bool lstm = job.cell == Cell::kLstm || job.cell == Cell::kLstmProjected;
  if (job.first_step == 0) {
    load_states(job.walk, job.h0, p.outputs, job.state[0], job.state_row, me);
    if (lstm) load_states(job.walk, job.c0, p.hidden, job.kept, job.hidden_row, me);
  }
  me.meet([] {});
  by_type(job.dtype, [&](auto t) HWY_ATTR { walk_steps<decltype(t)>(job, me); });
  if (job.last_step != job.walk.steps()) return;
  store_states(job.walk, job.h, p.outputs, me, [&](int64_t row) {
    return job.state[job.walk.rows[row].length() % 2] + row * job.state_row;
  });
  if (!lstm) return;
  store_states(job.walk, job.c, p.hidden, me,
               [&](int64_t row) { return job.kept + row * job.hidden_row; });
}

void rnn_finish_input(const void* opaque, const SumsBlock& block) {
  const F32 d;
  const auto& job = *static_cast<const InputProduct*>(opaque);
  for (int64_t r = 0; r < block.rows; ++r) {
    float* const out = job.out + (block.first_row + r) * job.stride;
    for_vectors(block.columns, [&](int64_t c, int64_t n) HWY_ATTR {
      const auto sum = hn::LoadU(d, block.sums + r * block.stride + c);
      const auto bias = hn::LoadU(d, job.bias + block.first_column + c);
      store_vector(out + block.first_column + c, n, hn::Add(sum, bias));
    });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace fk::cpu {

FK_CPU_EXPORT(rnn_walk_forward);
FK_CPU_EXPORT(rnn_finish_input);

namespace {

using rnn::Cell;
using rnn::Problem;
using rnn::UnitMatrix;

// Products with x for so many bytes are made at a time, and at least those of one step.
constexpr int64_t kMostInputBytes = int64_t{64} << 20;

struct Slices {
  int64_t steps, count;

  explicit Slices(const Problem& p) : steps(p.length), count(1) {
    if (p.sequences.packed || p.length == 0) return;
    const int64_t step_bytes = std::max<int64_t>(1, p.batch * p.gates * p.hidden * 4);
    steps = std::clamp<int64_t>(kMostInputBytes / step_bytes, 1, p.length);
    count = blocks_of(p.length, steps);
  }
};

// The positions [begin, end) of a tensor (B, L, D).
Tensor positions_of(const Tensor& t, int64_t begin, int64_t end) {
  Tensor part = t;
  part.shape[1] = end - begin;
  if (part.data != nullptr) {
    part.data = static_cast<char*>(t.data) + begin * t.stride(1) * size_of(t.dtype);
  }
  return part;
}

// The one or two bias vectors of the gates, as floats.
template <class Args>
void add_biases(const Args& a, int64_t gates, int64_t hidden, bool met_apart, float* bias,
                float* bias_of_met) {
  for (int64_t u = 0; u < gates * hidden; ++u) {
    const bool met = met_apart && u >= 2 * hidden;
    const double of_x = a.b_ih ? load(a.b_ih, u * a.b_ih.stride(0)) : 0;
    const double of_h = a.b_hh ? load(a.b_hh, u * a.b_hh.stride(0)) : 0;
    bias[u] = static_cast<float>(met ? of_x : of_x + of_h);
    if (met) bias_of_met[u - 2 * hidden] = static_cast<float>(of_h);
  }
}

// Whether the weights are read where they are: packing them takes as long as a few steps, and rows
// of weights along K serve one row of the state as well.
bool in_place(const UnitMatrix& m, const Problem& p) {
  for (int64_t g = 0; g < m.gates; ++g) {
    if (m.gate[g].row != 1 && m.depth > 1) return false;
  }
  return p.sequences.count == 1 || p.length <= 2;
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
  Slices slices;
  rnn::Walk walk;
  UnitMatrix first, second;
  float *of_input, *bias, *bias_of_met, *state[2], *between, *kept;
  int64_t state_row, hidden_row;
  size_t before_product;

  ForwardParts(const Args& a, void* memory)
      : parts(memory), p(rnn::problem_of(a)), slices(p), walk(p, parts) {
    const int64_t first_gates = rnn::cell_of(a) == Cell::kGruResetBefore ? 2 : p.gates;
    first = rnn::units_of_rows(a.w_hh, 0, first_gates, p.hidden);
    second = second_matrix(a, p);
    for (UnitMatrix* m : {&first, &second}) {
      if (m->units > 0 && !in_place(*m, p)) m->packed = parts.take(m->packed_floats());
    }
    const int64_t rows = p.sequences.count, columns = p.gates * p.hidden;
    state_row = padded_columns(p.outputs);
    hidden_row = padded_columns(p.hidden);
    for (float*& s : state) s = parts.take(rows * state_row);
    kept = parts.take(rows * hidden_row);
    const bool two =
        rnn::cell_of(a) == Cell::kLstmProjected || rnn::cell_of(a) == Cell::kGruResetBefore;
    between = parts.take(two ? rows * hidden_row : 0);
    bias = parts.take(columns + kPanelColumns);
    bias_of_met = parts.take(hidden_row);
    // Whole vectors are read of its rows.
    of_input = parts.take(p.batch * slices.steps * columns + kPanelColumns);
  }
};

// The product of some positions of x with W_ih.
struct InputParts {
  Tensor x;
  RowsMatrix rows;
  Product product;
  float* scratch;

  InputParts(const Tensor& some, const Tensor& w_ih, WorkspaceParts& parts)
      : x(some),
        rows(x, parts),
        product{rows.view(), transposed(matrix_view(w_ih)), rows_of(x).count, w_ih.size(0),
                w_ih.size(1)},
        scratch(parts.take(product_scratch(product))) {}
};

template <class Args>
size_t bytes_of(const Args& a) {
  const ForwardParts<Args> all(a, nullptr);
  size_t most = 0;
  for (int64_t i : {int64_t{0}, all.slices.count - 1}) {  // the last slice is shorter
    const int64_t from = i * all.slices.steps, to = std::min(from + all.slices.steps, all.p.length);
    WorkspaceParts parts = all.parts;
    const InputParts input(positions_of(a.x, from, to), a.w_ih, parts);
    most = std::max(most, parts.bytes());
  }
  return most;
}

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
  const bool met_apart = p.gates == 3;
  std::fill_n(all.bias_of_met, all.hidden_row, 0.0f);
  add_biases(a, p.gates, p.hidden, met_apart, all.bias, all.bias_of_met);
  rnn::ForwardJob job{rnn::cell_of(a),
                      all.walk,
                      0,
                      0,
                      0,
                      0,
                      all.of_input,
                      all.bias_of_met,
                      all.first,
                      all.second,
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
  const int64_t steps = all.walk.steps();
  for (int64_t i = 0; i < all.slices.count; ++i) {
    const int64_t from = i * all.slices.steps, to = std::min(from + all.slices.steps, p.length);
    job.first_position = p.reverse ? p.length - to : from;
    job.length = to - from;
    job.first_step = std::min(from, steps);
    job.last_step = std::min(to, steps);
    WorkspaceParts parts = all.parts;
    const InputParts input(positions_of(a.x, job.first_position, job.first_position + job.length),
                           a.w_ih, parts);
    input.rows.prepare(exec);
    const InputProduct finish{all.of_input, p.gates * p.hidden, all.bias};
    multiply(input.product, input.scratch, FK_CPU_DISPATCH(rnn_finish_input), &finish, exec);
    const auto walk = FK_CPU_DISPATCH(rnn_walk_forward);
    ThreadTeam::run(exec, rnn::team_size(p, all.walk.count()), [&](ThreadTeam::Member& me) {
      const FlushDenormals flush;
      walk(job, me);
    });
  }
  return {};
}

}  // namespace

size_t workspace(const LstmFwd& a) { return bytes_of(a); }
size_t workspace(const GruFwd& a) { return bytes_of(a); }
Status run(const LstmFwd& a, const Exec& exec) { return run_forward(a, exec); }
Status run(const GruFwd& a, const Exec& exec) { return run_forward(a, exec); }

}  // namespace fk::cpu

#endif  // HWY_ONCE
