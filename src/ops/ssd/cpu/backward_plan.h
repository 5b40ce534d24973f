// The memory of ssd's backward on the CPU, and what its kernels read and write.
#pragma once

#include "ops/ssd/cpu/plan.h"

namespace fk::ssd {

struct BackwardScratch {
  ChunkScratch chunk;
  float* C_turned;                   // [state, step]
  float *dy, *x_turned, *dy_turned;  // dy before the gate, [step, channel]; [channel, step]
  float* scores;                     // C B^T o decays, [step, step]
  float* strip;                      // of dy x^T
  float* rows;                       // y or dx, [step, channel]
  float* product;                    // of a state and steps, [state, step]
  float *dB_turned, *dC_turned;      // of the heads so far, [state, step]
  float *dproducts, *dshared;        // the gradient of C B^T; dB or dC, [step, state]
  float *column, *rate;              // by step: see backward_simd.h
  double *from_state, *to_state;
  float *states, *dstates;  // what each chunk of a piece begins with; what the chunk ends with

  BackwardScratch(const Plan& plan, WorkspaceParts& parts) : chunk(plan, parts) {
    const int64_t q = plan.chunk_width, p = plan.channel_width, n = plan.state_width;
    const int64_t heads = plan.block_heads, size = plan.state_size();
    C_turned = parts.take(n * q);
    dy = parts.take(q * p);
    x_turned = parts.take(p * q);
    dy_turned = parts.take(p * q);
    scores = parts.take(q * q);
    strip = parts.take(kStrip * q);
    rows = parts.take(q * p);
    product = parts.take(n * q);
    dB_turned = parts.take(n * q);
    dC_turned = parts.take(n * q);
    dproducts = parts.take(q * q);
    dshared = parts.take(q * n);
    column = parts.take(q);
    rate = parts.take(q);
    from_state = parts.take<double>(q);
    to_state = parts.take<double>(q);
    states = parts.take(std::max<int64_t>(1, plan.piece_chunks()) * heads * size);
    dstates = parts.take(heads * size);
  }
};

// This is what a piece adds to the gradients of a head's parameters.
struct HeadSums {
  double A, dt_bias;
};

struct BackwardMemory {
  Piece* pieces;
  WorkerScratch<BackwardScratch> scratch;
  WorkerScratch<ChunkScratch> walks;
  PieceStates states, dstates;
  float *dB, *dC;  // of each block of a group, where there are several: [block, row, state]
  HeadSums* sums;  // by piece and head
  float* dD;       // [piece, head, channel]

  BackwardMemory(const Plan& plan, WorkspaceParts& parts)
      : pieces(parts.take<Piece>(plan.most_pieces())),
        scratch(plan, parts),
        walks(plan, parts),
        states(plan, true, parts),
        dstates(plan, true, parts) {
    const int64_t shared =
        plan.group_blocks == 1
            ? 0
            : plan.group_blocks * plan.p.batch * plan.p.length * plan.p.groups * plan.p.states;
    dB = parts.take(shared);
    dC = parts.take(shared);
    sums = parts.take<HeadSums>(plan.most_pieces() * plan.p.heads);
    dD = parts.take(plan.most_pieces() * plan.p.heads * plan.channel_width);
  }
};

struct BackwardJob {
  const Plan& plan;
  Inputs in;
  View dy, dfinal_state;
  View dx, ddt, dB, dC, dz, dinitial_state;  // dB, dC: of one block, where a group has several
  int64_t dB_block, dC_block;                // elements from one block's to the next one's
  const Piece* pieces;
  int64_t count;
  const float *piece_states, *piece_dstates;  // NULL: pieces are whole sequences
  HeadSums* sums;
  float* dD;
};

}  // namespace fk::ssd

namespace fk::cpu {

// Computes, for sequences that are cut, what each piece makes of the gradient of the state, and
// from it the gradient that each piece ends with.
void find_piece_gradients(const ssd::Plan& plan, const ssd::Inputs& in, const ssd::View& dy,
                          const ssd::View& dfinal_state, const ssd::Piece* pieces, int64_t count,
                          const ssd::WorkerScratch<ssd::ChunkScratch>& scratch,
                          const ssd::PieceStates& out, const Exec& exec);

}  // namespace fk::cpu
