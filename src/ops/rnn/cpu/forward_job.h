// What the threads of a forward share.
#pragma once

#include "ops/rnn/cpu/walk.h"

namespace fk::rnn {

// Some steps of the walk whose products with x are made together: [first, last), which have `rows`
// rows in all, those of one step after those of another.
struct Chunk {
  int64_t first, last, rows;

  // The chunk that begins at a step: so many rows that weights are read for many of them, and so
  // few that their sums stay in a second-level cache beside the weights.
  static constexpr int64_t kRows = 96;
  static Chunk from(const Walk& walk, int64_t first) {
    Chunk chunk{first, first, 0};
    for (const int64_t steps = walk.steps(); chunk.last < steps; ++chunk.last) {
      const int64_t more = walk.active(chunk.last);
      if (chunk.rows > 0 && chunk.rows + more > kRows) break;
      chunk.rows += more;
    }
    return chunk;
  }
  // The most rows that a chunk of a problem has.
  static int64_t most_rows(const Problem& p) {
    return std::min(std::max(kRows, p.sequences.count), p.positions());
  }
};

struct ForwardJob {
  Cell cell;
  const Walk& walk;
  Tensor x;
  UnitMatrix input, first, second;
  // The rows of x of a chunk, as floats; the next chunk's are brought while this one's are used.
  float* x_rows[2];
  int64_t x_row;
  // A chunk's products with x: of every vector of units all gates, as in a group.
  float* of_input;
  int64_t input_row;
  const float* bias;         // gate by gate, hidden_row apart, padded
  const float* bias_of_met;  // GRU: of W_hn h, zeros if there is none; padded
  // Rows as in the walk, padded to whole vectors with zeros. A step reads state[t % 2] and writes
  // the other.
  float* state[2];
  float* between;  // what the second product multiplies
  float* kept;     // c, or where the reset gate comes before the product z
  int64_t state_row, hidden_row;
  Tensor h0, c0, y, h, c, gates, cells;
  DType dtype;
};

}  // namespace fk::rnn
