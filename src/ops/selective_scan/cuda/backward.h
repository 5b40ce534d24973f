// What the kernels of the selective scan's backward are given, and how a call is cut into blocks.
#pragma once

#include <cstdint>

#include "core/integers.h"
#include "core/status.h"
#include "ops/selective_scan/cuda/scan.h"

namespace fk::cuda {

constexpr int kChunk = 32;        // steps that a block takes at a time
constexpr int kPieceSteps = 4;    // of which states and decays are in registers
constexpr int kWarpChannels = 8;  // a channel for every four lanes
constexpr int kGroupStates = 16;  // that a warp takes at a time, four a thread
constexpr int kMostWarps = 8;     // of a block
// A chunk's parts of dB and dC take so many floats, for one block and group of states: 32 lanes'
// float4 a piece.
constexpr int kChunkParts = kChunk * 2 * kGroupStates;

// For short sequences of few channels a thread has a state, and a block kWarpChannels channels.
constexpr int kShortThreads = kWarpChannels * kGroupStates;
constexpr int kShortPiece = 16;  // steps of which sums are in registers
constexpr int short_shared_bytes(int64_t steps) {
  const int padded = static_cast<int>(ceil_div(steps, kShortPiece)) * kShortPiece;
  return 8 * padded * (kShortThreads + kGroupStates) + 24 * kWarpChannels * (padded + 1);
}

struct BackwardArgs {
  StepView u, delta, z, dy, du, ddelta, dz;
  scan::GroupView B, C;
  const float* A;
  int64_t A_channel, A_state;
  ChannelView D, bias;
  StateView initial_state, dlast_state, dinitial_state;
  int64_t channels;
  int states, groups;
  int state_groups;      // of kGroupStates
  int warps;             // of a block
  int blocks_per_group;  // of channels
  bool softplus;
  bool time_contiguous;  // neighbouring steps, not neighbouring channels, lie side by side
  bool pairs;            // of channels can be loaded at once
  Segments segments;     // that blocks take side by side
  Segments chunks;       // of kChunk steps
  KeptStates kept;       // every kChunk steps
  // These are parts of segments: what each makes of an adjoint of 0, (slot, channel, state), and
  // its sum of dt log2(e), (slot, channel). They are NULL where sequences are whole.
  Segments carry_segments;
  float* carry_adjoints;
  float* carry_sums;
  float* carried;            // adjoints between chunks: (block, group of states, thread, 4)
  float* parts_of_states;    // (block of channels, group, chunk, group of states, kChunkParts)
  float* parts_of_A;         // (slot, channel, state)
  float* parts_of_channels;  // (slot, 2, channel): of dD and ddelta_bias

  FK_HOST_DEVICE int64_t blocks() const {
    return int64_t{blocks_per_group} * groups * segments.slots;
  }
};

// A warp keeps its channels of a chunk in shared memory: {dt log2(e), u ln(2)}, whose product is dt
// u, as [step][channel]; {factor of dz, d dt / d delta}; dy silu(z); bias and D. Pairs of channels
// are where place_of_pair says. du, ddelta and dz take the places of the first and the third.
constexpr int kStepInputs = 2 * kWarpChannels;
constexpr int kFactorsAt = kChunk * kStepInputs;
constexpr int kGradientsAt = 2 * kFactorsAt;
constexpr int kBiasAt = kGradientsAt + kChunk * kWarpChannels;
constexpr int kSkipAt = kBiasAt + kWarpChannels;
constexpr int kWarpChunk = kSkipAt + kWarpChannels;
constexpr int kWarpStateSums = 3 * kChunk * kWarpChannels;

// B and C of a step take so many floats in shared memory, in all four orders of
// cuda/backward_stage.cuh.
constexpr int kStepStates = 8 * kGroupStates;

// Returns what a block keeps in shared memory: B and C, and for each of its warps the states before
// pieces, the chunk and the sums over groups of states.
constexpr int backward_shared_bytes(int warps, bool several_groups) {
  return 4 * (kChunk * kStepStates + warps * (kChunk / kPieceSteps * 128 + kWarpChunk +
                                              (several_groups ? kWarpStateSums : 0)));
}

// Launches the recurrence alone. Forward it finds the kept states of whole sequences, in reverse
// what segments make of an adjoint of 0.
template <class T>
Status launch_carry(bool reverse, const BackwardArgs& a, void* stream);
template <class T>
Status launch_backward(const BackwardArgs& a, void* stream);
// Launches the kernel for whole sequences of at most `steps` steps and up to kGroupStates states.
template <class T>
Status launch_short(int64_t steps, const BackwardArgs& a, void* stream);

}  // namespace fk::cuda
