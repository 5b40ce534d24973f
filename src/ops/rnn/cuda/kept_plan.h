// How the kernels that keep the recurrent weights (kept.cuh) cut a call: which block, warp and lane
// keeps which of them, and which sequences a team of blocks walks.
//
// A block owns `units` hidden units with all their gates. It multiplies `rows` rows of weights by
// a vector of `depth` elements for each sequence: going forward the rows of W_hh of its units, one
// for each gate, by h_{t-1}; going backward the columns of W_hh of its units by the gradients of
// all gates of the step after. Eight warps share these rows and that depth: `slices` of them lie
// side by side along the depth. Each lane keeps up to 512 bytes of weights in registers, all of the
// call.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/host_device.h"
#include "core/tensor.h"

namespace fk::cuda::rnn {

constexpr int kKeptWarps = 8, kKeptThreads = 32 * kKeptWarps;
constexpr int kKeptVectors = 32;  // of 16 bytes, in the registers of a lane
constexpr int kTogether = 8;      // sequences that an instruction multiplies
constexpr int kMostUnits = 64;    // of a block
constexpr int kPairs = 2;         // of a sequence and a unit, that a thread has in a round

enum class Direction { kForward, kBackward };
// Where blocks of a team leave vectors for each other: in global memory, or in shared memory, their
// own or that of the blocks of their cluster.
enum class Exchange { kGlobal, kShared };

// Sets of vectors in shared memory: two that take turns where blocks write into each other's; one
// that FMA units read; none where lanes load what tensor cores multiply from global memory.
FK_HOST_DEVICE constexpr int vector_sets(DType dtype, Exchange exchange) {
  if (exchange == Exchange::kShared) return 2;
  return dtype == DType::kFloat32 ? 1 : 0;
}

struct KeptPlan {
  int units;   // of a block; the last block of a team may have fewer
  int blocks;  // of a team
  int teams;
  int sequences;  // of a team, a multiple of kTogether
  int together;   // sequences of a round, a multiple of kTogether; a step has as many rounds as it
                  // takes
  int entries;    // of a vector; what is left of the depth is zeros
  int gate_stride;  // going backward: from one gate's entries of a vector to the next gate's
  int slices;       // warps side by side along the depth
  int lanes;        // a warp has 32 / lanes rows, where FMA units multiply
  int slab;         // elements of the depth that a slice has
  int rows;         // of a block, with those that are padding
  int vectors;      // of weights that a lane really keeps
  int pitch;        // elements from one vector in shared memory to the next
  int sum_pitch;    // floats from one sequence's sums to the next
  int bias_sums;    // 1 going backward, where threads sum up what they made of their units

  FK_HOST_DEVICE int depth() const { return slices * slab; }
  // Floats of a round's sums. There are two sets, which rounds use in turn.
  FK_HOST_DEVICE int sums() const { return slices * together * sum_pitch; }
  int64_t shared_bytes(DType dtype, Exchange exchange) const {
    const int64_t bytes_of_vectors = int64_t{kTogether} * pitch * size_of(dtype);
    return vector_sets(dtype, exchange) * bytes_of_vectors + 2 * 4 * sums() +
           4 * int64_t{sequences} * units + 24 * int64_t{sequences} + 16 +
           std::max(16 * units, bias_sums * 16 * kPairs * kKeptThreads);
  }
  // Vectors of 16 bytes that the packed weights of a team's blocks take.
  FK_HOST_DEVICE int64_t packed() const { return int64_t{blocks} * kKeptThreads * vectors; }
};

// This is what a plan is made for.
struct KeptCall {
  Direction direction;
  DType dtype;
  int64_t hidden, gates, count;  // units, gates of each, sequences
  int64_t most_blocks;           // on the device at once (kGlobal) or in a cluster (kShared)
  int64_t most_shared_bytes;     // of a block
};

// Finds the plan with the fewest rounds of kTogether sequences a step, and among those the one with
// the most blocks. False where no plan keeps all weights.
bool plan_kept(const KeptCall& call, Exchange exchange, KeptPlan* plan);

// The tile of a warp: with tensor cores `kTiles` tiles of 16 rows, whose depth a warp keeps in
// blocks of 32. Going backward there are fewer rows and more depth.
FK_HOST_DEVICE constexpr int tensor_tiles(Direction direction) {
  return direction == Direction::kForward ? 2 : 1;
}
constexpr int kTensorBlock = 32;

// With FMA units a lane has kFloatRows rows, vector i being of row i % kFloatRows of them; as many
// lanes as have the same rows, kFloatRows * plan.lanes, lie side by side along the depth. These are
// the first of the rows, and where vector i begins in the warp's part of the depth.
constexpr int kFloatRows = 4;
FK_HOST_DEVICE int float_row(const KeptPlan& plan, int warp, int lane) {
  return warp / plan.slices * (32 / plan.lanes) + lane / (kFloatRows * plan.lanes) * kFloatRows;
}
FK_HOST_DEVICE int float_depth(const KeptPlan& plan, int lane, int i) {
  const int parts = kFloatRows * plan.lanes;
  return (i / kFloatRows * parts + lane % parts) * 4;
}

}  // namespace fk::cuda::rnn
