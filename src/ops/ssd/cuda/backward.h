// This is what the kernels of ssd's backward on CUDA read and write.
#pragma once

#include "ops/ssd/cuda/inputs.h"

namespace fk::cuda::ssd {

// A chunk has at most so many steps, and matrices are multiplied in squares of so many rows and
// columns: steps, channels or states.
constexpr int kSide = 64;
constexpr int kBackwardThreads = 256;

// This is what a step's log decay and time step are worth (backward_shared.cuh), in rows of kSide
// floats for each chunk and head: these, of which the last two come once more for each further 64
// states.
enum Worth : int { kRate, kColumn, kFromState, kToState };

struct BackwardArguments {
  Inputs in;
  Segments chunks;  // of at most kSide steps
  int64_t batch;
  Rows dy, dx, dB, dC, dz;
  View dfinal_state, ddt, dinitial_state;
  HeadNumbers dA, dD, ddt_bias;
  bool dD_has_channels;

  int channel_tiles, state_tiles;  // squares of a state
  int state_pitch;                 // of a state's row in memory: whole vectors
  int64_t heads_each;              // heads whose dB and dC a block sums
  int64_t parts;                   // such blocks of a group

  // Workspace. `states` is what each chunk begins with and `dstates` the gradient of what it ends
  // with, (chunk, head, channel, state) in the activations' type.
  void *states, *dstates;
  void* decays;                // ChunkDecays of each chunk and head (prepared.cuh)
  float* products;             // C B^T, (chunk, group, step, step)
  float* worth;                // (chunk, head, Worth, step)
  float* through;              // what a chunk's whole decay is worth, (chunk, head, tile of states)
  float* dD_parts;             // (chunk, head, channel)
  float *dB_parts, *dC_parts;  // (part, batch, step, group, state), unless parts is 1

  // The kernels for whole vectors (vector_inputs.cuh) keep V of so many heads each, in kHalves half
  // squares, (chunk, group, part).
  float* V_parts;
  int V_heads, V_parts_count;

  FK_HOST_DEVICE int64_t group_heads() const { return in.groups == 0 ? 0 : in.heads / in.groups; }
  FK_HOST_DEVICE int64_t worth_rows() const { return 2 + 2 * state_tiles; }
  FK_HOST_DEVICE int64_t shared_numbers() const {
    return batch * chunks.sequences.length * in.groups * in.states;
  }
  // Returns where the state of a head begins in `states` and `dstates`.
  FK_HOST_DEVICE int64_t state_at(int64_t chunk, int head) const {
    return (chunk * in.heads + head) * in.channels * state_pitch;
  }
  FK_HOST_DEVICE float* products_of(int64_t chunk, int group) const {
    return products + (chunk * in.groups + group) * kSide * kSide;
  }
  FK_HOST_DEVICE float* worth_of(int64_t chunk, int head) const {
    return worth + (chunk * in.heads + head) * worth_rows() * kSide;
  }

  // These tell how many blocks each task has.
  FK_HOST_DEVICE int64_t walks() const {
    return 2 * chunks.sequences.count * in.heads * channel_tiles * state_tiles;
  }
  FK_HOST_DEVICE int64_t product_blocks() const { return chunks.slots * in.groups; }
  FK_HOST_DEVICE int64_t shared_blocks_of_chunk() const { return in.groups * parts * state_tiles; }
};

}  // namespace fk::cuda::ssd
