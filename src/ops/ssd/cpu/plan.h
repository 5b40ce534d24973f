// How ssd is cut into work on the CPU, and the memory that takes. Chunks become matrix products on
// the tiles of cpu/gemm/tiles.h. An item is a block of heads of one group over a piece of a
// sequence: its heads share B, C and the chunk's products C B^T, and their states stay in the
// second-level cache from chunk to chunk. A piece is a whole sequence where there are items enough
// for all workers; otherwise sequences are cut in time, and states.cc finds what each piece begins
// with.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/integers.h"
#include "core/workspace.h"
#include "cpu/gemm/bfloat16.h"
#include "cpu/gemm/view.h"
#include "cpu/workers.h"
#include "ops/ssd/problem.h"

namespace fk::ssd {

using cpu::MatrixView;
using cpu::padded_columns;

constexpr int64_t kChunk = 64, kMostChunk = 256;
// A chunk's matrix is computed so many rows at a time; beyond their diagonal it is left out.
constexpr int64_t kStrip = 16;
constexpr int64_t kMostBlockHeads = 8;
constexpr int64_t kLeastPieceChunks = 4;

// A piece is the steps [begin, end) of a sequence.
struct Piece {
  int64_t sequence, batch, begin, end;
  bool first, last;  // of its sequence
};

struct Plan {
  Problem p;
  int64_t chunk, piece_steps;
  int64_t block_heads, group_blocks;  // of an item; items of a group
  int64_t workers;
  bool in_pairs;                                    // large products take bfloat16 numbers in pairs
  int64_t chunk_width, channel_width, state_width;  // padded to whole vectors

  int64_t blocks() const { return p.groups * group_blocks; }
  bool cuts_sequences() const { return piece_steps < p.length; }
  int64_t most_pieces() const {
    if (!p.sequences.packed) {
      return p.batch * std::max<int64_t>(1, ceil_div(p.length, piece_steps));
    }
    return p.sequences.count + p.length / piece_steps;
  }
  int64_t piece_chunks() const { return ceil_div(std::min(piece_steps, p.length), chunk); }
  // Returns the floats of a head's state, which are N rows of P channels.
  int64_t state_size() const { return round_up(p.states, int64_t{4}) * channel_width; }
};

// These are the heads [first, first + count) of an item, of one group.
struct HeadBlock {
  int64_t group, first, count;

  HeadBlock(const Plan& plan, int64_t block) {
    const int64_t group_heads = plan.p.heads / plan.p.groups;
    group = block / plan.group_blocks;
    const int64_t begin = block % plan.group_blocks * plan.block_heads;
    first = group * group_heads + begin;
    count = std::min(plan.block_heads, group_heads - begin);
  }
};

inline Plan plan_of(const Problem& p, DType dtype) {
  Plan plan;
  plan.p = p;
  plan.chunk = p.chunk_size == 0 ? kChunk : std::min(p.chunk_size, kMostChunk);
  plan.chunk = std::max<int64_t>(1, std::min(plan.chunk, p.length));
  plan.in_pairs = dtype == DType::kBFloat16 && cpu::multiplies_bfloat16();
  plan.chunk_width = padded_columns(plan.chunk);
  plan.channel_width = padded_columns(p.channels);
  plan.state_width = padded_columns(p.states);
  const int64_t workers = cpu::worker_limit();
  const int64_t group_heads = p.groups == 0 ? 1 : std::max<int64_t>(1, p.heads / p.groups);
  const int64_t shared = p.heads * std::max<int64_t>(1, p.sequences.count) / (2 * workers);
  plan.block_heads = std::min(std::max<int64_t>(1, std::min(shared, kMostBlockHeads)), group_heads);
  plan.group_blocks = ceil_div(group_heads, plan.block_heads);
  // Packed sequences may be one long one and many short ones.
  const int64_t items =
      std::max<int64_t>(1, plan.blocks() * (p.sequences.packed ? 1 : p.sequences.count));
  const int64_t chunks = ceil_div(p.length, plan.chunk);
  plan.piece_steps = std::max<int64_t>(1, chunks) * plan.chunk;
  if (items < workers && chunks >= 2 * kLeastPieceChunks) {
    const int64_t pieces = ceil_div(2 * workers, items);
    plan.piece_steps = std::max(kLeastPieceChunks, ceil_div(chunks, pieces)) * plan.chunk;
  }
  plan.workers = std::min(workers, std::max<int64_t>(1, plan.most_pieces() * plan.blocks()));
  return plan;
}

// Lists the pieces of all sequences, in order, and returns how many there are.
inline int64_t list_pieces(const Plan& plan, Piece* pieces) {
  int64_t count = 0;
  for (int64_t s = 0; s < plan.p.sequences.count; ++s) {
    const SequenceSteps steps = plan.p.sequences[s];
    int64_t begin = steps.begin;
    do {
      const int64_t end = std::min(steps.end, begin + plan.piece_steps);
      pieces[count++] = {s, steps.batch, begin, end, begin == steps.begin, end == steps.end};
      begin = end;
    } while (begin < steps.end);
  }
  return count;
}

// These are the tensors that the chunks of the forward and of the backward read.
struct Inputs {
  View x, dt, B, C, z, initial_state;
  Tensor A, D, dt_bias;
  bool softplus;
  float least, most;  // the limits of dt

  template <class Args>
  explicit Inputs(const Args& a)
      : x(view_of(a.x)),
        dt(view_of(a.dt)),
        B(view_of(a.B)),
        C(view_of(a.C)),
        z(view_of(a.z)),
        initial_state(view_of(a.initial_state)),
        A(a.A),
        D(a.D),
        dt_bias(a.dt_bias),
        softplus(a.dt_softplus),
        least(static_cast<float>(a.dt_limit_min)),
        most(static_cast<float>(a.dt_limit_max)) {}
};

// Returns the rows of a tensor (B, L, H, P) from one step on, of one head.
inline MatrixView rows_of_head(const View& v, int64_t batch, int64_t step, int64_t head) {
  return {static_cast<char*>(v.data) + v.offset(batch, step, head) * size_of(v.dtype), v.dtype,
          v.strides[1], v.strides[3]};
}
// Returns the state of a head, of a tensor (S, H, P, N), as P rows of N states.
inline MatrixView state_of_head(const View& v, int64_t sequence, int64_t head) {
  return {static_cast<char*>(v.data) + v.offset(sequence, head, 0) * size_of(v.dtype), v.dtype,
          v.strides[2], v.strides[3]};
}

// This is what is known of each step of a chunk in one head. The logarithms of decays are summed in
// double and kept as a float and the rest: differences of such sums have all the digits of a float,
// however long ago the sums began.
struct StepScratch {
  float *raw, *dt, *slope;  // dt as given; as used; the derivative of the one by the other
  float *high, *low;        // the logarithm of the decay from the chunk's begin to each step
  float *grown, *tail;      // the decay from there to a step, and from a step to the chunk's end
  float* weight;            // tail dt: what a step's input counts in the state at the chunk's end

  StepScratch(int64_t width, WorkspaceParts& parts) {
    for (float** p : {&raw, &dt, &slope, &high, &low, &grown, &tail, &weight}) {
      *p = parts.take(width);
    }
  }
};

// This is the memory of a worker that all kernels need. Rows of a chunk are padded to whole strips.
struct ChunkScratch {
  StepScratch steps;
  float *B, *B_turned, *C;  // [step, state], [state, step]
  float* products;          // C B^T, [step, step]
  float *x, *weighted;      // x and weight x, [step, channel]
  float *turned, *carried;  // a state on its way in or out; a state
  float* scale;             // one number for each state
  float* skip;              // D for each channel of a head
  uint32_t* room;           // for a product: its operands, rounded, or a part of its sums

  ChunkScratch(const Plan& plan, WorkspaceParts& parts) : steps(plan.chunk_width, parts) {
    const int64_t q = plan.chunk_width, p = plan.channel_width, n = plan.state_width;
    B = parts.take(q * n);
    B_turned = parts.take(n * q);
    C = parts.take(q * n);
    products = parts.take(q * q);
    x = parts.take(q * p);
    weighted = parts.take(q * p);
    turned = parts.take(p * n);
    carried = parts.take(plan.state_size());
    scale = parts.take(n);
    skip = parts.take(p);
    const int64_t operands = std::max(q * n, n * p) + std::max(n * p, q * p);
    const int64_t largest = std::max({q * n, n * p, q * p, q * q});
    room = parts.take<uint32_t>(std::max(largest, operands / 2 + n + p + q));
  }
};

// This is the memory of all workers, of which each has a Scratch.
template <class Scratch>
class WorkerScratch {
 public:
  WorkerScratch(const Plan& plan, WorkspaceParts& parts) : plan_(plan) {
    WorkspaceParts one;
    Scratch counted(plan, one);
    bytes_ = static_cast<int64_t>(one.bytes());
    memory_ = parts.take<char>(plan.workers * bytes_);
  }
  Scratch operator[](int64_t worker) const {
    WorkspaceParts own(memory_ + worker * bytes_);
    return Scratch(plan_, own);
  }

 private:
  const Plan& plan_;
  int64_t bytes_;
  char* memory_;
};

// What pieces of cut sequences begin (or, backwards, end) with: a state for each piece and head,
// and the decay of a piece as a whole.
struct PieceStates {
  float *states = nullptr, *decays = nullptr;

  PieceStates(const Plan& plan, bool also_decays, WorkspaceParts& parts) {
    if (!plan.cuts_sequences()) return;
    states = parts.take(plan.most_pieces() * plan.p.heads * plan.state_size());
    if (also_decays) decays = parts.take(plan.most_pieces() * plan.p.heads);
  }
};

}  // namespace fk::ssd

namespace fk::cpu {

// Computes, for sequences that are cut, what each piece adds to the state, and from it the state
// that each piece begins with.
void find_piece_states(const ssd::Plan& plan, const ssd::Inputs& in, const ssd::Piece* pieces,
                       int64_t count, const ssd::WorkerScratch<ssd::ChunkScratch>& scratch,
                       const ssd::PieceStates& out, const Exec& exec);

}  // namespace fk::cpu
