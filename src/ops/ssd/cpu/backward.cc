// ssd on the CPU, backward.
//
// Floor: in a chunk of Q steps of one head, N P Q multiply-adds each for the state (again), what dx
// takes from its gradient, dB, dC and the gradient itself, and Q Q P / 2 each for dy x^T and for
// dx: two and a half times the forward's; with a gate the outputs once more.
//
// An item (plan.h) walks its chunks forwards and keeps the state that each begins with, then goes
// back. dB and dC are summed over the heads of an item in [state, step], where a state is the left
// operand as it stands; where a group has several items, each writes sums of its own, and another
// pass adds them in order. So do the gradients of parameters, by piece: results do not depend on
// which worker took what.

#include "ops/ssd/ssd.h"

#ifndef FK_OPS_SSD_CPU_BACKWARD_ONCE_
#define FK_OPS_SSD_CPU_BACKWARD_ONCE_

#include "core/access.h"
#include "ops/ssd/cpu/backward_plan.h"

#endif  // FK_OPS_SSD_CPU_BACKWARD_ONCE_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/ssd/cpu/backward.cc"
#include "cpu/foreach_target.h"
#include "ops/ssd/cpu/backward_simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

HWY_INLINE void load_x(const Plan& plan, const Inputs& in, const Chunk& chunk, int64_t head,
                       float* x) {
  pack_rows(rows_of_head(in.x, chunk.batch, chunk.begin, head), chunk.count, plan.p.channels, x,
            plan.channel_width);
}

// Sums the gradients of all that a step's decay and dt are in to ddt, and adds to dA and ddt_bias.
// `through` is what the chunk's decay as a whole is worth.
HWY_INLINE void store_step_gradients(const BackwardJob& job, const BackwardScratch& m,
                                     const Chunk& chunk, int64_t head, double through,
                                     ssd::HeadSums* sums) {
  const StepScratch& steps = m.chunk.steps;
  const double A = number_of_head(job.in.A, head);
  double later = 0;  // what decays from the begin to this step and later ones are worth
  for (int64_t t = chunk.count - 1; t >= 0; --t) {
    later += m.from_state[t];
    m.from_state[t] = later;
  }
  double earlier = 0;  // what decays from steps before this one to the end are worth
  for (int64_t t = 0; t < chunk.count; ++t) {
    const double rate = m.rate[t] + m.from_state[t] + earlier + through;
    earlier += m.to_state[t] * steps.dt[t];
    sums->A += rate * steps.dt[t];
    const double ddt = (rate * A + m.column[t] + m.to_state[t]) * steps.slope[t];
    sums->dt_bias += ddt;
    m.rate[t] = static_cast<float>(ddt);
  }
  if (job.ddt.data == nullptr) return;
  const MatrixView row{static_cast<char*>(job.ddt.data) +
                           job.ddt.offset(chunk.batch, chunk.begin, head) * size_of(job.ddt.dtype),
                       job.ddt.dtype, 0, job.ddt.strides[1]};
  unpack_rows(m.rate, job.plan.chunk_width, 1, chunk.count, nullptr, row);
}

// Computes all gradients of a chunk in one head. `state` is what it begins with, unless that is 0;
// `dstate` the gradient of what it ends with, unless that is 0 (`is_flat`).
void head_gradients(const BackwardJob& job, const BackwardScratch& m, const Chunk& chunk,
                    int64_t head, const float* state, bool is_zero, const float* dstate,
                    bool is_flat, float decay, ssd::HeadSums* sums, float* dD) {
  const Plan& plan = job.plan;
  const int64_t p = plan.channel_width, q = plan.chunk_width;
  load_x(plan, job.in, chunk, head, m.chunk.x);
  load_skip(plan, job.in.D, head, m.chunk.skip);
  load_gradient(plan, job.dy, job.in.z, chunk, head, m.chunk.weighted, m.dy);
  if (job.dz.data != nullptr) store_gate_gradient(job, m, chunk, head, state, is_zero);
  turn(m.chunk.x, p, chunk.count, plan.p.channels, m.x_turned, q);
  turn(m.dy, p, chunk.count, plan.p.channels, m.dy_turned, q);

  std::fill_n(m.column, q, 0.0f);
  for (int64_t t = (chunk.count - 1) / kStrip * kStrip; t >= 0; t -= kStrip) {
    const int64_t rows = std::min(kStrip, chunk.count - t);
    multiply_in_parts(reinterpret_cast<float*>(m.chunk.room), rows, padded_columns(t + rows),
                      plan.p.channels, {m.dy + t * p, p, 1}, {m.x_turned, q}, {m.strip, q},
                      Keep::kNothing);
    score_gradients(plan, m, chunk.count, t, rows);
    rate_gradients(plan, m, t, rows);
  }
  store_input_gradient(job, m, chunk, head, dstate, is_flat, dD);

  const StepScratch& steps = m.chunk.steps;
  std::fill_n(m.from_state, q, 0.0);
  std::fill_n(m.to_state, q, 0.0);
  if (!is_zero) {
    add_state_product(plan, m.chunk.room, state, m.dy_turned, m.C_turned, chunk.count, steps.grown,
                      steps.grown, m.product, m.dC_turned, m.from_state);
  }
  if (!is_flat) {
    add_state_product(plan, m.chunk.room, dstate, m.x_turned, m.chunk.B_turned, chunk.count,
                      steps.weight, steps.tail, m.product, m.dB_turned, m.to_state);
  }
  const double through = is_zero || is_flat ? 0.0 : decay * dot(state, dstate, plan.p.states * p);
  store_step_gradients(job, m, chunk, head, through, sums);
}

// Stores dB and dC of a chunk, from the sums over the heads of a block.
HWY_INLINE void store_shared_gradients(const BackwardJob& job, const BackwardScratch& m,
                                       const Chunk& chunk, int64_t block, int64_t group) {
  const Plan& plan = job.plan;
  const int64_t n = plan.state_width, q = plan.chunk_width, states = plan.p.states;
  const auto store = [&](const View& to, int64_t stride) HWY_ATTR {
    MatrixView rows = rows_of_head(to, chunk.batch, chunk.begin, group);
    rows.data = static_cast<char*>(rows.data) + block * stride * size_of(rows.dtype);
    unpack_rows(m.dshared, n, chunk.count, states, nullptr, rows);
  };
  if (job.dC.data != nullptr) {
    turn(m.dC_turned, q, states, chunk.count, m.dshared, n);
    for_each_strip(chunk.count, [&](int64_t t, int64_t rows) HWY_ATTR {
      multiply(rows, n, t + rows, MatrixA{m.dproducts + t * q, q, 1}, MatrixB{m.chunk.B, n},
               MatrixC{m.dshared + t * n, n}, Keep::kSum);
    });
    store(job.dC, job.dC_block);
  }
  if (job.dB.data != nullptr) {
    turn(m.dB_turned, q, states, chunk.count, m.dshared, n);
    for_each_strip(chunk.count, [&](int64_t s, int64_t rows) HWY_ATTR {
      multiply(rows, n, chunk.count - s, MatrixA{m.dproducts + s * q + s, 1, q},
               MatrixB{m.chunk.C + s * n, n}, MatrixC{m.dshared + s * n, n}, Keep::kSum);
    });
    store(job.dB, job.dB_block);
  }
}

// Computes the states that each chunk of a piece begins with, for a block of heads. Returns whether
// the first is 0: it is not written then.
bool keep_states(const BackwardJob& job, const BackwardScratch& m, const Piece& piece,
                 int64_t piece_at, const HeadBlock& block) {
  const Plan& plan = job.plan;
  const int64_t size = plan.state_size(), next = plan.block_heads * size;
  const bool is_zero = job.piece_states == nullptr && job.in.initial_state.data == nullptr;
  for (int64_t i = 0; i < block.count && !is_zero; ++i) {
    const int64_t head = block.first + i;
    if (job.piece_states != nullptr) {
      const float* from = job.piece_states + (piece_at * plan.p.heads + head) * size;
      std::copy_n(from, size, m.states + i * size);
    } else {
      load_state(plan, state_of_head(job.in.initial_state, piece.sequence, head), m.chunk.turned,
                 m.states + i * size);
    }
  }
  float* states = m.states;
  for_each_chunk(plan, piece, [&](const Chunk& chunk) HWY_ATTR {
    if (chunk.begin + chunk.count == piece.end) return;
    load_shared(plan, job.in, chunk, block.group, m.chunk, false);
    const bool from_zero = is_zero && states == m.states;
    for (int64_t i = 0; i < block.count; ++i) {
      const float decay = prepare_steps(plan, job.in, chunk, block.first + i, m.chunk.steps);
      load_x(plan, job.in, chunk, block.first + i, m.chunk.x);
      float* state = states + i * size;
      if (!from_zero) std::copy_n(state, size, state + next);
      advance_state(plan, chunk, decay, m.chunk, from_zero, state + next);
    }
    states += next;
  });
  return is_zero;
}

// Computes one item: a block of heads of a piece.
void backward_item(const BackwardJob& job, const BackwardScratch& m, int64_t item) {
  const Plan& plan = job.plan;
  const int64_t piece_at = item / plan.blocks(), size = plan.state_size();
  const Piece& piece = job.pieces[piece_at];
  const HeadBlock block(plan, item % plan.blocks());
  const bool begins_with_zero = keep_states(job, m, piece, piece_at, block);
  bool is_flat = job.piece_dstates == nullptr && job.dfinal_state.data == nullptr;
  for (int64_t i = 0; i < block.count; ++i) {
    const int64_t head = block.first + i, at = piece_at * plan.p.heads + head;
    job.sums[at] = {};
    std::fill_n(job.dD + at * plan.channel_width, plan.channel_width, 0.0f);
    if (job.piece_dstates != nullptr) {
      std::copy_n(job.piece_dstates + at * size, size, m.dstates + i * size);
    } else if (!is_flat) {
      load_state(plan, state_of_head(job.dfinal_state, piece.sequence, head), m.chunk.turned,
                 m.dstates + i * size);
    }
  }
  const bool wants_dstate = piece.first && job.dinitial_state.data != nullptr;
  const int64_t chunks = ceil_div(piece.end - piece.begin, plan.chunk);
  for (int64_t c = chunks - 1; c >= 0; --c) {
    const int64_t begin = piece.begin + c * plan.chunk;
    const Chunk chunk{piece.batch, begin, std::min(plan.chunk, piece.end - begin)};
    load_shared(plan, job.in, chunk, block.group, m.chunk, true);
    turn(m.chunk.C, plan.state_width, chunk.count, plan.p.states, m.C_turned, plan.chunk_width);
    std::fill_n(m.dB_turned, plan.p.states * plan.chunk_width, 0.0f);
    std::fill_n(m.dC_turned, plan.p.states * plan.chunk_width, 0.0f);
    std::fill_n(m.dproducts, plan.chunk_width * plan.chunk_width, 0.0f);
    for (int64_t i = 0; i < block.count; ++i) {
      const int64_t head = block.first + i, at = piece_at * plan.p.heads + head;
      float* dstate = m.dstates + i * size;
      const float decay = prepare_steps(plan, job.in, chunk, head, m.chunk.steps);
      head_gradients(job, m, chunk, head, m.states + (c * plan.block_heads + i) * size,
                     c == 0 && begins_with_zero, dstate, is_flat, decay, job.sums + at,
                     job.dD + at * plan.channel_width);
      if (c > 0 || wants_dstate) {
        retreat_state(plan, chunk, decay, m.chunk, m.dy, is_flat, dstate);
      }
    }
    store_shared_gradients(job, m, chunk, item % plan.blocks() % plan.group_blocks, block.group);
    is_flat = false;
  }
  for (int64_t i = 0; wants_dstate && i < block.count; ++i) {
    if (is_flat) std::fill_n(m.dstates + i * size, size, 0.0f);  // a sequence without steps
    store_state(plan, m.dstates + i * size, m.chunk.turned,
                state_of_head(job.dinitial_state, piece.sequence, block.first + i));
  }
}

// Adds the blocks' sums in order, for rows [begin, end), a row being a step of one group.
void add_blocks(const Plan& plan, float* sums, const View& out, int64_t begin, int64_t end) {
  const int64_t groups = plan.p.groups, states = plan.p.states, length = plan.p.length;
  const int64_t block = plan.p.batch * length * groups * states;
  for (int64_t row = begin; row < end; ++row) {
    float* total = sums + row * states;
    for (int64_t k = 1; k < plan.group_blocks; ++k) {
      const float* more = total + k * block;
      for (int64_t i = 0; i < states; ++i) total[i] += more[i];
    }
    const int64_t step = row / groups;
    const MatrixView to = rows_of_head(out, step / length, step % length, row % groups);
    alignas(64) float padded[kMaxSsdStates];
    std::copy_n(total, states, padded);
    unpack_rows(padded, plan.state_width, 1, states, nullptr, to);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fk::cpu {
namespace {

FK_CPU_EXPORT(backward_item);
FK_CPU_EXPORT(add_blocks);

// Adds over pieces, in order, what each has for the parameters of a head.
void store_parameter_gradients(const SsdBwd& a, const ssd::Plan& plan, int64_t pieces,
                               const ssd::BackwardMemory& memory, int64_t head) {
  ssd::HeadSums total{};
  for (int64_t k = 0; k < pieces; ++k) {
    const ssd::HeadSums& own = memory.sums[k * plan.p.heads + head];
    total.A += own.A;
    total.dt_bias += own.dt_bias;
  }
  if (a.dA) store(a.dA, head * a.dA.stride(0), total.A);
  if (a.ddt_bias) store(a.ddt_bias, head * a.ddt_bias.stride(0), total.dt_bias);
  if (!a.dD) return;
  double whole = 0;
  for (int64_t c = 0; c < plan.p.channels; ++c) {
    double sum = 0;
    for (int64_t k = 0; k < pieces; ++k) {
      sum += memory.dD[(k * plan.p.heads + head) * plan.channel_width + c];
    }
    whole += sum;
    if (a.dD.ndim == 2) store(a.dD, head * a.dD.stride(0) + c * a.dD.stride(1), sum);
  }
  if (a.dD.ndim == 1) store(a.dD, head * a.dD.stride(0), whole);
}

// Returns blocks' sums as a tensor of rows of states.
ssd::View sums_view(const ssd::Plan& plan, float* sums) {
  const int64_t step = plan.p.groups * plan.p.states;
  return {sums, DType::kFloat32, {plan.p.length * step, step, plan.p.states, 1}};
}

}  // namespace

Status run(const SsdBwd& a, const Exec& exec) {
  const ssd::Plan plan = ssd::plan_of(ssd::problem_of(a), a.x.dtype);
  WorkspaceParts parts(exec.workspace());
  const ssd::BackwardMemory memory(plan, parts);
  const int64_t pieces = list_pieces(plan, memory.pieces);
  const bool in_blocks = plan.group_blocks > 1;
  const int64_t rows = plan.p.batch * plan.p.length * plan.p.groups;
  const ssd::View dB = ssd::view_of(a.dB), dC = ssd::view_of(a.dC);
  const ssd::BackwardJob job{plan,
                             ssd::Inputs(a),
                             ssd::view_of(a.dy),
                             ssd::view_of(a.dfinal_state),
                             ssd::view_of(a.dx),
                             ssd::view_of(a.ddt),
                             a.dB && in_blocks ? sums_view(plan, memory.dB) : dB,
                             a.dC && in_blocks ? sums_view(plan, memory.dC) : dC,
                             ssd::view_of(a.dz),
                             ssd::view_of(a.dinitial_state),
                             in_blocks ? rows * plan.p.states : 0,
                             in_blocks ? rows * plan.p.states : 0,
                             memory.pieces,
                             pieces,
                             memory.states.states,
                             memory.dstates.states,
                             memory.sums,
                             memory.dD};
  if (plan.cuts_sequences()) {
    find_piece_states(plan, job.in, memory.pieces, pieces, memory.walks, memory.states, exec);
    find_piece_gradients(plan, job.in, job.dy, job.dfinal_state, memory.pieces, pieces,
                         memory.walks, memory.dstates, exec);
  }
  const auto kernel = FK_CPU_DISPATCH(backward_item);
  run_on_workers(exec, plan.workers, pieces * plan.blocks(),
                 [&](int64_t worker, int64_t item) { kernel(job, memory.scratch[worker], item); });
  if (in_blocks) {
    const auto add = FK_CPU_DISPATCH(add_blocks);
    exec.parallel_for(rows, 256, [&](int64_t begin, int64_t end) {
      if (a.dB) add(plan, memory.dB, dB, begin, end);
      if (a.dC) add(plan, memory.dC, dC, begin, end);
    });
  }
  exec.parallel_for(plan.p.heads, 4, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) {
      store_parameter_gradients(a, plan, pieces, memory, head);
    }
  });
  return {};
}

size_t workspace(const SsdBwd& a) {
  const ssd::Plan plan = ssd::plan_of(ssd::problem_of(a), a.x.dtype);
  WorkspaceParts parts;
  const ssd::BackwardMemory memory(plan, parts);
  return parts.bytes();
}

}  // namespace fk::cpu
#endif  // HWY_ONCE
