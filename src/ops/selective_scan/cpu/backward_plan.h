// How the CPU cuts the backward of the selective scan into items, and the memory it works in.
#pragma once

#include <algorithm>
#include <utility>

#include "core/integers.h"
#include "core/workspace.h"
#include "cpu/workers.h"
#include "ops/selective_scan/cpu/plan.h"

namespace fk::scan {

// An item is a slice of the sequences, a group, and a part of the group's blocks of channels. What
// items have a share in together (dA, dB, ...) each adds up in memory of its own, so that nothing
// depends on the number of threads; more items than this would only cost more memory.
constexpr int64_t kItems = 32;

struct Cut {
  int64_t slices, parts;

  Cut(const Problem& p, int64_t blocks_per_group) {
    const int64_t sequences = p.sequences.count;
    slices = std::clamp<int64_t>(kItems / std::max<int64_t>(p.groups, 1), 1,
                                 std::max<int64_t>(sequences, 1));
    parts = std::clamp<int64_t>(kItems / std::max<int64_t>(slices * p.groups, 1), 1,
                                std::max<int64_t>(blocks_per_group, 1));
  }
};

struct BackwardJob {
  Inputs in;
  StepView dy, du, ddelta, dz;
  Tensor dlast_state, checkpoints, dA, dB, dC, dD, ddelta_bias, dinitial_state;
  Cut cut;
  int64_t lanes, blocks_per_group;
  int64_t interval;  // steps between known states; more than a tile where few or none were kept
  // These are the sums of items: dA [slice, block, state, lane], dD and ddelta_bias [slice, block,
  // lane], dB and dC [part, batch, step, group, state].
  float *sum_dA, *sum_dD, *sum_bias, *sum_dB, *sum_dC;
  float* scratch;          // of all workers
  int64_t scratch_floats;  // of one

  int64_t items() const { return cut.slices * in.p.groups * cut.parts; }
  int64_t shared_floats() const { return in.p.batch * in.p.length * in.p.groups * in.p.states; }
};

// Cuts up a worker's memory.
struct BackwardScratch {
  float *dB, *dC;      // [step, state, lane] of a tile, all blocks of the part added up
  float* dstate;       // [block, state, lane]: what later steps make of the state
  float* tile_states;  // [tile of the interval, block, state, lane]: the state before it

  BackwardScratch(const Problem& p, const Cut& cut, int64_t blocks_per_group, int64_t lanes,
                  int64_t interval, WorkspaceParts& parts) {
    const int64_t blocks = ceil_div(blocks_per_group, cut.parts);
    const int64_t tiles = ceil_div(std::min(interval, p.length), kTileSteps);
    dB = parts.take(kTileSteps * p.states * lanes);
    dC = parts.take(kTileSteps * p.states * lanes);
    dstate = parts.take(blocks * p.states * lanes);
    tile_states = parts.take(tiles * blocks * p.states * lanes);
  }
};

struct BackwardMemory {
  Parameters parameters;
  Cut cut;
  int64_t blocks_per_group, workers, interval, scratch_floats;
  float *sum_dA, *sum_dD, *sum_bias, *sum_dB, *sum_dC, *scratch;

  BackwardMemory(const SelectiveScanBwd& a, int64_t lanes, WorkspaceParts& parts)
      : parameters(a, parts), cut(problem_of(a), blocks_of(a, lanes)) {
    const Problem p = problem_of(a);
    blocks_per_group = blocks_of(a, lanes);
    interval = interval_of(p);
    const int64_t vectors = cut.slices * p.groups * blocks_per_group * lanes;
    const int64_t shared = cut.parts * p.batch * p.length * p.groups * p.states;
    sum_dA = parts.take(vectors * p.states);
    sum_dD = parts.take(vectors);
    sum_bias = parts.take(vectors);
    sum_dB = parts.take(shared);
    sum_dC = parts.take(shared);
    WorkspaceParts one;
    const BackwardScratch counted(p, cut, blocks_per_group, lanes, interval, one);
    scratch_floats = static_cast<int64_t>(one.bytes() / sizeof(float));
    workers = std::clamp<int64_t>(cut.slices * p.groups * cut.parts, 1, cpu::worker_limit());
    scratch = parts.take(workers * scratch_floats);
  }

 private:
  static int64_t blocks_of(const SelectiveScanBwd& a, int64_t lanes) {
    return ceil_div(problem_of(a).channels_per_group(), lanes);
  }
  // Returns how many steps a piece has: as many whole distances between kept states as a tile
  // holds, or one if it is longer.
  static int64_t interval_of(const Problem& p) {
    if (p.spacing == 0) return std::max<int64_t>(p.length, 1);
    return p.spacing <= kTileSteps ? kTileSteps / p.spacing * p.spacing : p.spacing;
  }
};

}  // namespace fk::scan

namespace fk::cpu {

// Puts together what items added up, each by itself: dA, dB, dC, dD, ddelta_bias.
void finish_sums(const scan::BackwardJob& job, const Exec& exec);

}  // namespace fk::cpu
