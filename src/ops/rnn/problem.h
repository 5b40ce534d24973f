// One recurrent layer with every optional thing resolved: what all backends read instead of the
// arguments.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/sequences.h"
#include "core/tensor.h"
#include "ops/rnn/rnn.h"

namespace fk::rnn {

struct Problem {
  int64_t batch, length, inputs, hidden;
  int64_t outputs;  // R: entries of h, fewer than `hidden` where there is a projection
  int64_t gates;    // rows of W_ih for each hidden unit: 4 of an LSTM, 3 of a GRU
  Sequences sequences;
  bool reverse;

  int64_t positions() const { return batch * length; }
  // The position along L of the step `t` steps after a sequence's first.
  FK_HOST_DEVICE int64_t position(const SequenceSteps& s, int64_t t) const {
    return reverse ? s.end - 1 - t : s.begin + t;
  }
};

// What is kept of each hidden unit at each position: the gates, and of a GRU what r met.
constexpr int64_t kKeptGates = 4;

template <class Args>
Problem problem_of(const Args& a, int64_t gates) {
  Problem p;
  p.batch = a.x.size(0);
  p.length = a.x.size(1);
  p.inputs = a.x.size(2);
  p.gates = gates;
  p.hidden = a.w_ih.size(0) / gates;
  p.outputs = a.w_hh.size(1);
  p.sequences = sequences_of(a.x, a.cu_seqlens);
  p.reverse = a.reverse;
  return p;
}
inline Problem problem_of(const LstmFwd& a) { return problem_of(a, 4); }
inline Problem problem_of(const LstmBwd& a) { return problem_of(a, 4); }
inline Problem problem_of(const GruFwd& a) { return problem_of(a, 3); }
inline Problem problem_of(const GruBwd& a) { return problem_of(a, 3); }

}  // namespace fk::rnn
