// What the kernels of the selective scan's backward are given, and how a call is cut into blocks.
#pragma once

#include <cstdint>

#include "core/status.h"
#include "ops/selective_scan/cuda_scan.h"

namespace fk::cuda {

constexpr int kChunk = 32;        // steps that a block takes at a time
constexpr int kPieceSteps = 4;    // of which states and decays are in registers
constexpr int kWarpChannels = 8;  // a channel for every four lanes
constexpr int kGroupStates = 16;  // that a warp takes at a time, four a thread
constexpr int kMostWarps = 8;     // of a block
// A chunk's parts of dB and dC, of one block and group of states: 32 lanes' float4 a piece.
constexpr int kChunkParts = kChunk * 2 * kGroupStates;

struct BackwardArgs {
  scan::View u, delta, z, dy, du, ddelta, dz;
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
  // What each segment makes of an adjoint of 0, (slot, channel, state), and its sum of dt log2(e),
  // (slot, channel); NULL where sequences are whole.
  float* segment_adjoints;
  float* segment_sums;
  float* carried;            // adjoints between chunks: (block, group of states, 4, thread)
  float* parts_of_states;    // (block of channels, group, chunk, group of states, kChunkParts)
  float* parts_of_A;         // (slot, channel, state)
  float* parts_of_channels;  // (slot, 2, channel): of dD and ddelta_bias

  FK_HOST_DEVICE int64_t blocks() const {
    return int64_t{blocks_per_group} * groups * segments.slots;
  }
};

// Of a block: B and C, the states before pieces, the chunk and the sums over groups of states.
constexpr int backward_shared_bytes(int warps, bool several_groups) {
  const int width = warps * kWarpChannels;
  return 4 * (kChunkParts + warps * kChunk / kPieceSteps * 128 +
              kChunk * (2 * (2 * width + 4) + width + 2) + 2 * width +
              (several_groups ? 3 * kChunk * width : 0));
}

// Forward: kept states of whole sequences; in reverse: what segments make of an adjoint of 0.
template <class T>
Status launch_carry(bool reverse, const BackwardArgs& a, void* stream);
template <class T>
Status launch_backward(const BackwardArgs& a, void* stream);

}  // namespace fk::cuda
