// What the threads of a backward share.
#pragma once

#include "ops/rnn/cpu/walk.h"

namespace fk::rnn {

struct BackwardJob {
  Cell cell;
  const Walk& walk;
  // From the gradient of a step's gates to that of the state before; and where there is a second
  // product in a step, its way back: from h to o tanh(c), or from n to what r met.
  UnitMatrix to_state, second;
  // The gradient of what the state was multiplied to, in rows as in the walk, gate by gate; step t
  // writes gates[t % 2].
  float* of_gates[2];
  int64_t gates_row;
  float* of_state;  // with a projection: the gradient of h
  int64_t state_row;
  // What reaches the step before without a product: the gradient of c, or of h through z.
  float* carried;
  // The sums over all steps of the gates' gradients, for the biases; of a GRU the fourth is the
  // gradient of what r met.
  float* sums;
  int64_t hidden_row;
  // What the products over all steps need, a row for each position: the gradients of the products
  // with x; of what r met, where r comes after the product; the states before; and with a
  // projection the gradient of h, and o tanh(c). What has no data is not wanted.
  cpu::MatrixView of_input, of_met, states, of_outputs, between;
  Tensor dy, dh, dc, h0, c0, y, gates, cells, dh0, dc0;
  DType dtype;

  // The number of a position among all rows.
  int64_t number(const Place& place) const { return place.batch * walk.p.length + place.position; }
};

}  // namespace fk::rnn
