// This file holds what the CPU kernels of causal_conv1d share.
#pragma once

#include <algorithm>

#include "core/integers.h"
#include "core/sequences.h"
#include "core/workspace.h"
#include "cpu/tile_rows.h"
#include "cpu/workers.h"
#include "ops/causal_conv1d/causal_conv1d.h"

namespace fk::conv {

constexpr int64_t kSteps = 64;  // of a tile
constexpr int64_t kHistory = kMaxConvWidth - 1;

struct Input {
  StepView x;
  Sequences sequences;
  Tensor weight, bias, initial_state;
  int64_t width, channels, activation;

  // Returns the tiles of a sequence. An empty one has one too, for its states.
  int64_t tiles() const { return std::max<int64_t>(1, ceil_div(sequences.length, kSteps)); }
};

template <class Args>
Input input_of(const Args& a) {
  return {step_view(a.x),  sequences_of(a.x, a.cu_seqlens),
          a.weight,        a.bias,
          a.initial_state, a.weight.size(1),
          a.x.size(2),     a.activation};
}

// One tile of one sequence has the steps [step, end), which may be none.
struct Tile {
  int64_t s, step, end;
  SequenceSteps sequence;
  bool first;

  Tile(const Input& in, int64_t item) : s(item / in.tiles()), sequence(in.sequences[s]) {
    const int64_t number = item % in.tiles();
    first = number == 0;
    step = std::min(sequence.begin + number * kSteps, sequence.end);
    end = std::min(step + kSteps, sequence.end);
  }
};

}  // namespace fk::conv
