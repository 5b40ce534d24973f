// What the CPU kernels of the selective scan share: the call as they read it, and how it is cut
// into items. An item is one sequence's channels of one vector, all within a group.
#pragma once

#include <algorithm>

#include "core/integers.h"
#include "core/workspace.h"
#include "cpu/output_stage.h"
#include "cpu/tile_rows.h"
#include "ops/selective_scan/problem.h"

namespace fk::scan {

using cpu::kMaxLanes;
using cpu::TileRows;

// So many steps are staged at a time: a tensor's tile then takes 4 KiB.
constexpr int64_t kTileSteps = 64;
constexpr int64_t kTile = kTileSteps * kMaxLanes;

// Memory for B and C in float32, where they are not, and for A with its channels contiguous.
struct Parameters {
  float *A, *B, *C;
  int64_t A_stride;

  template <class Args>
  Parameters(const Args& a, WorkspaceParts& parts) {
    const Problem p = problem_of(a);
    A_stride = p.channels;
    A = parts.take(p.states * p.channels);
    const int64_t shared =
        a.B.dtype == DType::kFloat32 ? 0 : p.batch * p.length * p.groups * p.states;
    B = parts.take(shared);
    C = parts.take(shared);
  }
};

// Holds the inputs of a forward and of a backward, prepared.
struct Inputs {
  Problem p;
  StepView u, delta, z;
  GroupView B, C;  // float32
  const float* A;  // [state, channel], times log2(e)
  int64_t A_stride;
  Tensor D, delta_bias, initial_state;
  bool softplus;

  int64_t blocks_per_group(int64_t lanes) const { return ceil_div(p.channels_per_group(), lanes); }
  int64_t blocks(int64_t lanes) const { return p.groups * blocks_per_group(lanes); }
  const float* shared(const GroupView& v, int64_t batch, int64_t group) const {
    return static_cast<const float*>(v.data) + batch * v.batch + group * v.group;
  }
};

// The channels of a block are [first, first + count), of one group.
struct Block {
  int64_t group, first, count;

  Block(const Inputs& in, int64_t lanes, int64_t block) {
    const int64_t per_group = in.blocks_per_group(lanes), size = in.p.channels_per_group();
    group = block / per_group;
    const int64_t begin = block % per_group * lanes;
    first = group * size + begin;
    count = std::min(lanes, size - begin);
  }
};

struct ForwardJob {
  Inputs in;
  const cpu::OutputNorm& norm;
  StepView y, residual;
  Tensor last_state, checkpoints;
  int64_t algorithm;
  // A chunked call keeps here the state each chunk begins with, and its sum of dt; see
  // cpu/forward.cc.
  float* chunk_states;
};

}  // namespace fk::scan

namespace fk::cpu {

// Prepares B, C and A as the kernels take them.
void prepare_inputs(const SelectiveScanFwd& a, const scan::Parameters& memory, const Exec& exec,
                    scan::Inputs* in);
void prepare_inputs(const SelectiveScanBwd& a, const scan::Parameters& memory, const Exec& exec,
                    scan::Inputs* in);

}  // namespace fk::cpu
