// What the threads of a forward share.
#pragma once

#include "ops/rnn/cpu/walk.h"

namespace fk::rnn {

struct ForwardJob {
  Cell cell;
  const Walk& walk;
  int64_t first_step, last_step;   // of this job, in the order of the walk
  int64_t first_position, length;  // the positions along L that these steps have
  const float* of_input;           // products with x and biases, by position: gates * hidden
  const float* bias_of_met;        // GRU: of W_hn h, zeros if there is none; padded
  UnitMatrix first, second;
  // Rows as in the walk, padded to whole vectors with zeros. A step reads state[t % 2] and writes
  // the other.
  float* state[2];
  float* between;  // what the second product multiplies
  float* kept;     // c, or where the reset gate comes before the product z
  int64_t state_row, hidden_row;
  Tensor h0, c0, y, h, c, gates, cells;
  DType dtype;

  const float* input_row(const Place& place) const {
    const int64_t row = place.batch * length + place.position - first_position;
    return of_input + row * walk.p.gates * walk.p.hidden;
  }
};

}  // namespace fk::rnn
