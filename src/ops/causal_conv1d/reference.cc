// This file computes causal_conv1d in double precision, one channel of one sequence at a time.
#include <cmath>
#include <vector>

#include "core/access.h"
#include "core/sequences.h"
#include "ops/causal_conv1d/causal_conv1d.h"

namespace fk {
namespace reference {
namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

int64_t place(const Tensor& t, int64_t i, int64_t j, int64_t k) {
  return i * t.stride(0) + j * t.stride(1) + k * t.stride(2);
}

// One channel of one sequence has W-1 inputs from before, then its own.
struct Channel {
  int64_t length, width;
  double bias;
  std::vector<double> weight, x;

  template <class Args>
  Channel(const Args& a, const Tensor& state, int64_t s, const SequenceSteps& sequence,
          int64_t channel)
      : length(sequence.end - sequence.begin), width(a.weight.size(1)) {
    bias = a.bias ? load(a.bias, channel * a.bias.stride(0)) : 0;
    for (int64_t k = 0; k < width; ++k) {
      weight.push_back(load(a.weight, channel * a.weight.stride(0) + k * a.weight.stride(1)));
    }
    for (int64_t k = 0; k < width - 1; ++k) {
      x.push_back(state ? load(state, place(state, s, k, channel)) : 0);
    }
    for (int64_t l = sequence.begin; l < sequence.end; ++l) {
      const int64_t step = a.x.ndim == 3 ? l * a.x.stride(1) : 0;
      x.push_back(load(a.x, sequence.batch * a.x.stride(0) + step + channel * a.x.stride(-1)));
    }
  }

  // Returns the sum that the activation gets.
  double sum(int64_t t) const {
    double total = bias;
    for (int64_t k = 0; k < width; ++k) total += weight[k] * x[t + k];
    return total;
  }
};

double activate(double x, int64_t activation) { return activation == kSilu ? x * sigmoid(x) : x; }

double slope(double x, int64_t activation) {
  return activation == kSilu ? sigmoid(x) * (1 + x * (1 - sigmoid(x))) : 1;
}

}  // namespace

Status run(const CausalConv1dFwd& a, const Exec&) {
  const Sequences sequences = sequences_of(a.x, a.cu_seqlens);
  for (int64_t s = 0; s < sequences.count; ++s) {
    const SequenceSteps sequence = sequences[s];
    for (int64_t d = 0; d < a.x.size(2); ++d) {
      const Channel c(a, a.initial_state, s, sequence, d);
      for (int64_t t = 0; a.y && t < c.length; ++t) {
        store(a.y, place(a.y, sequence.batch, sequence.begin + t, d),
              activate(c.sum(t), a.activation));
      }
      for (int64_t k = 0; a.final_state && k < c.width - 1; ++k) {
        store(a.final_state, place(a.final_state, s, k, d), c.x[c.length + k]);
      }
    }
  }
  return {};
}

Status run(const CausalConv1dBwd& a, const Exec&) {
  const Sequences sequences = sequences_of(a.x, a.cu_seqlens);
  const int64_t width = a.weight.size(1);
  for (int64_t d = 0; d < a.x.size(2); ++d) {
    std::vector<double> dweight(width);
    double dbias = 0;
    for (int64_t s = 0; s < sequences.count; ++s) {
      const SequenceSteps sequence = sequences[s];
      const Channel c(a, a.initial_state, s, sequence, d);
      std::vector<double> dx(c.x.size());
      for (int64_t k = 0; a.dfinal_state && k < width - 1; ++k) {
        dx[c.length + k] = load(a.dfinal_state, place(a.dfinal_state, s, k, d));
      }
      for (int64_t t = 0; t < c.length; ++t) {
        const double dy = load(a.dy, place(a.dy, sequence.batch, sequence.begin + t, d));
        const double dsum = dy * slope(c.sum(t), a.activation);
        dbias += dsum;
        for (int64_t k = 0; k < width; ++k) {
          dx[t + k] += dsum * c.weight[k];
          dweight[k] += dsum * c.x[t + k];
        }
      }
      for (int64_t k = 0; a.dinitial_state && k < width - 1; ++k) {
        store(a.dinitial_state, place(a.dinitial_state, s, k, d), dx[k]);
      }
      for (int64_t t = 0; a.dx && t < c.length; ++t) {
        store(a.dx, place(a.dx, sequence.batch, sequence.begin + t, d), dx[width - 1 + t]);
      }
    }
    if (a.dbias) store(a.dbias, d * a.dbias.stride(0), dbias);
    for (int64_t k = 0; a.dweight && k < width; ++k) {
      store(a.dweight, d * a.dweight.stride(0) + k * a.dweight.stride(1), dweight[k]);
    }
  }
  return {};
}

Status run(const CausalConv1dUpdateFwd& a, const Exec&) {
  const int64_t length = a.x.ndim == 3 ? a.x.size(1) : 1;
  for (int64_t b = 0; b < a.x.size(0); ++b) {
    for (int64_t d = 0; d < a.x.size(-1); ++d) {
      const Channel c(a, a.state, b, {b, 0, length}, d);
      for (int64_t t = 0; a.y && t < length; ++t) {
        const int64_t step = a.y.ndim == 3 ? t * a.y.stride(1) : 0;
        store(a.y, b * a.y.stride(0) + step + d * a.y.stride(-1), activate(c.sum(t), a.activation));
      }
      for (int64_t k = 0; a.new_state && k < c.width - 1; ++k) {
        store(a.new_state, place(a.new_state, b, k, d), c.x[length + k]);
      }
    }
  }
  return {};
}

}  // namespace reference
}  // namespace fk
