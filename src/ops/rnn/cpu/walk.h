// This is what the forward and the backward on the CPU share outside of vector code: the order in
// which sequences are walked, and the matrices that meet the state at every step.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/workspace.h"
#include "cpu/gemm/plan.h"
#include "ops/rnn/problem.h"

namespace fk::rnn {

// This is what a step does after the product with the state. Two kinds need a second product, which
// waits for all of the first one's units: of what r met, or of o tanh(c) with the projection.
enum class Cell { kLstm, kLstmProjected, kGru, kGruResetBefore };

inline Cell cell_of(const LstmFwd& a) { return a.w_hr ? Cell::kLstmProjected : Cell::kLstm; }
inline Cell cell_of(const LstmBwd& a) { return a.w_hr ? Cell::kLstmProjected : Cell::kLstm; }
inline Cell cell_of(const GruFwd& a) { return a.reset_after ? Cell::kGru : Cell::kGruResetBefore; }
inline Cell cell_of(const GruBwd& a) { return a.reset_after ? Cell::kGru : Cell::kGruResetBefore; }

// Where a step's entries are in tensors (B, L, ...).
struct Place {
  int64_t batch, position;
  int64_t offset(const Tensor& t) const { return batch * t.stride(0) + position * t.stride(1); }
};

// All sequences take their steps together. They stand in rows, the longest first, so that those
// that still have a step t are the first `active(t)` rows.
struct Walk {
  struct Row {
    int64_t sequence;
    SequenceSteps steps;
    int64_t length() const { return steps.end - steps.begin; }
  };
  const Problem& p;
  Row* rows;

  Walk(const Problem& problem, WorkspaceParts& parts)
      : p(problem), rows(parts.take<Row>(problem.sequences.count)) {}

  int64_t count() const { return p.sequences.count; }
  int64_t steps() const { return count() == 0 ? 0 : rows[0].length(); }
  int64_t active(int64_t t) const {
    const auto longer = [t](const Row& row) { return row.length() > t; };
    return std::partition_point(rows, rows + count(), longer) - rows;
  }
  Place place(int64_t row, int64_t t) const {
    return {rows[row].steps.batch, p.position(rows[row].steps, t)};
  }

  // Reads the offsets; a query of the workspace comes without them.
  void sort() const {
    for (int64_t s = 0; s < count(); ++s) rows[s] = {s, p.sequences[s]};
    if (!p.sequences.packed) return;
    std::sort(rows, rows + count(), [](const Row& a, const Row& b) {
      return a.length() != b.length() ? a.length() > b.length() : a.sequence < b.sequence;
    });
  }
};

// A matrix whose columns belong to units of the layer, some for each gate: unit u has column u of
// every gate's view. Every thread of a team multiplies by the columns of its own units.
struct UnitMatrix {
  cpu::MatrixView gate[kKeptGates];
  int64_t gates, depth, units;
  // Where threads pack their columns, so that these stay in their caches; NULL: they are read where
  // they are, each along K.
  float* packed = nullptr;

  static UnitMatrix of(int64_t gates, int64_t depth, int64_t units) {
    UnitMatrix m{};
    m.gates = gates;
    m.depth = depth;
    m.units = units;
    return m;
  }
  int64_t packed_depth() const { return (depth + 3) / 4 * 4; }
  int64_t packed_floats() const { return packed_depth() * gates * cpu::padded_columns(units); }
};

// The matrix that takes `weight`'s columns to its rows; the rows [g * units, (g + 1) * units) from
// `first` on belong to gate g.
inline UnitMatrix units_of_rows(const Tensor& weight, int64_t first, int64_t gates, int64_t units) {
  UnitMatrix m = UnitMatrix::of(gates, weight.size(1), units);
  const cpu::MatrixView view = cpu::transposed(cpu::matrix_view(weight));
  for (int64_t g = 0; g < gates; ++g) m.gate[g] = view.from(0, first + g * units);
  return m;
}

// The matrix that takes the rows [first, last) of `weight` back to its columns.
inline UnitMatrix units_of_columns(const Tensor& weight, int64_t first, int64_t last) {
  UnitMatrix m = UnitMatrix::of(1, last - first, weight.size(1));
  m.gate[0] = cpu::matrix_view(weight).from(first);
  return m;
}

// Returns how far apart rows of `columns` floats lie: padded, and an odd number of cache lines, so
// that the same column of several rows is spread over all of a cache.
inline int64_t spread_columns(int64_t columns) {
  const int64_t padded = cpu::padded_columns(columns);
  return padded / 16 % 2 == 0 ? padded + 16 : padded;
}

// Returns how many threads are worth meeting at every step, in which `rows` rows are multiplied
// with `depth` rows of weights.
inline int64_t team_size(const Problem& p, int64_t rows, int64_t depth) {
  constexpr int64_t kLeastProducts = 1 << 14;  // of a thread in a step
  const int64_t products = rows * p.gates * p.hidden * depth;
  const int64_t vectors = std::min(p.hidden, p.outputs) / 16;
  return std::max<int64_t>(1, std::min({cpu::worker_limit(), vectors, products / kLeastProducts}));
}

}  // namespace fk::rnn
