// The kernels of kept_forward.cuh and kept_backward.cuh, by what they are compiled for: their
// arguments, and functions that name the instances.
#pragma once

#include "ops/rnn/cuda/kept_plan.h"
#include "ops/rnn/cuda/views.cuh"

namespace fk::cuda::rnn {

struct KeptForward {
  ForwardViews views;
  KeptPlan plan;
  const uint4* packed;  // null: the weights are loaded as they lie
  const void* w_hh;
  int64_t w_hh_row;
  // Blocks meet here in global memory: rows of plan.depth() elements of T, h of all positions and
  // behind them the first h of all sequences.
  void* published;
};

struct KeptBackward {
  BackwardViews views;  // of_h has rows of plan.depth() elements where blocks meet in global memory
  KeptPlan plan;
  const uint4* packed;
  float* bias_sums;  // of each team: kBiasSums for each unit
};

// The instance for an exchange: a kernel that takes a KeptForward or KeptBackward. With kShared it
// must be launched in clusters, or with one block for each team.
const void* kept_through_global(Direction direction, bool lstm, DType dtype);
const void* kept_through_shared(Direction direction, bool lstm, DType dtype);

}  // namespace fk::cuda::rnn
