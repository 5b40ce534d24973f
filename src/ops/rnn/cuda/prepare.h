// This is what surrounds the recurrence: copies of weights and states in the layout that its
// kernels read, and the products and sums over all steps at once.
#pragma once

#include "cuda/launch.h"
#include "ops/rnn/cuda/kept_plan.h"
#include "ops/rnn/problem.h"

namespace fk::cuda::rnn {

// Tells whether a matrix of weights serves as it lies: rows without gaps between elements, of
// `dtype`.
inline bool serves(const Tensor& weight, DType dtype) {
  return weight.dtype == dtype && (weight.stride(-1) == 1 || weight.size(-1) <= 1);
}

// Copies a matrix (rows, columns) into memory without gaps, as `dtype`; transposed on request.
Status copy_weight(const Tensor& weight, DType dtype, void* to, bool transposed,
                   cudaStream_t stream);

// Packs W_hh for the kernels that keep it, each lane's share in the order of its registers, and
// fills the memory in which blocks publish vectors (exchange.cuh).
struct PackedWeight {
  Tensor w_hh;
  DType dtype;  // in which it is multiplied
  int64_t hidden, gates;
  Direction direction;
  KeptPlan plan;
  uint4* packed;  // null: not wanted
  // Rows of plan.depth() elements of `dtype`: first `unpublished` of them, then those of `known`.
  void* published = nullptr;
  int64_t unpublished = 0;
  Tensor known;  // may be undefined: zeros
  int64_t known_rows = 0;
};
Status pack_weight(const PackedWeight& w, cudaStream_t stream);

// The states ahead of the first step: h0 as `dtype` into `h` (S rows of R), and what a unit carries
// as float into `state` (S rows of H): c0, or h0 where c0 is `none`. Sequences without steps end
// with them. `last_h` and `last_c` may be undefined.
struct FirstStates {
  Tensor h0, c0, last_h, last_c;
  bool has_cell;
  DType dtype;
  void* h;
  float* state;
};
Status begin_states(const fk::rnn::Problem& p, const FirstStates& states, cudaStream_t stream);

// How many floats the products below need for sums where they split what they add up.
int64_t partial_floats_of(const fk::rnn::Problem& p, DType dtype, int device, bool backward);

// x W_ih^T + b_ih of all positions, gates * H floats each.
Status multiply_inputs(const Tensor& x, const Tensor& w_ih, const Tensor& b_ih, float* to,
                       float* partials, cudaStream_t stream);

// This is what the backward of a layer makes of the gradients of its gates, for both ops.
struct GradientSums {
  Tensor x, w_ih, y, h0;                  // from the call
  Tensor met;                             // where it is what W_hn met: (B, L, H)
  Tensor of_x, of_h;                      // (positions, gates * H)
  Tensor dx, dw_ih, dw_hh, db_ih, db_hh;  // where they are wanted
  void* h_before;                         // memory for h_{t-1} of all positions
  float* partials;
  // The walk has added up gradients for the biases here: kBiasSums of each unit and team.
  const float* bias_sums = nullptr;
  int teams = 0;
};
Status add_gradients(const fk::rnn::Problem& p, const GradientSums& g, cudaStream_t stream);

// dw = a^T b over all positions.
Status multiply_over_steps(const Tensor& a, const Tensor& b, const Tensor& dw, float* partials,
                           cudaStream_t stream);

}  // namespace fk::cuda::rnn
