// selective_scan in double precision, one channel of one sequence at a time. The backward follows
// the recurrence from the end: dh_t is what the outputs and states from step t on make of h_t,
//
//   dh_t = C_t dg_t + a_{t+1} dh_{t+1},   a_t = exp(dt_t A),   dg_t the gradient of C . h + D u.
#include <cmath>
#include <vector>

#include "core/access.h"
#include "ops/selective_scan/problem.h"

namespace fk {
namespace reference {
namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

double softplus(double x) { return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)); }

double at(const Tensor& t, int64_t i) { return load(t, i * t.stride(0)); }
double at(const Tensor& t, int64_t i, int64_t j) {
  return load(t, i * t.stride(0) + j * t.stride(1));
}
int64_t place(const Tensor& t, int64_t i, int64_t j, int64_t k) {
  return i * t.stride(0) + j * t.stride(1) + k * t.stride(2);
}

// Returns where B and C (and their gradients) have the entry of a step, group and state.
int64_t place(const Tensor& t, int64_t b, int64_t l, int64_t g, int64_t n) {
  return b * t.stride(0) + l * t.stride(1) + (t.ndim == 4 ? g * t.stride(2) : 0) + n * t.stride(-1);
}

// Holds one channel of one sequence, as numbers.
struct Channel {
  int64_t length, states;
  std::vector<double> u, z, raw, dt;  // by step; raw: delta + delta_bias
  std::vector<double> a, B, C, h;     // by step and state
  std::vector<double> A, h0;          // by state
  double D;

  template <class Args>
  Channel(const Args& args, int64_t s, int64_t channel) {
    const scan::Problem p = scan::problem_of(args);
    const SequenceSteps sequence = p.sequences[s];
    const int64_t group = channel / p.channels_per_group();
    length = sequence.end - sequence.begin;
    states = p.states;
    D = args.D ? at(args.D, channel) : 0;
    for (int64_t n = 0; n < states; ++n) {
      A.push_back(at(args.A, channel, n));
      const Tensor& initial = args.initial_state;
      h0.push_back(initial ? load(initial, place(initial, s, channel, n)) : 0);
    }
    for (int64_t t = 0; t < length; ++t) {
      const int64_t b = sequence.batch, l = sequence.begin + t;
      u.push_back(load(args.u, place(args.u, b, l, channel)));
      if (args.z) z.push_back(load(args.z, place(args.z, b, l, channel)));
      raw.push_back(load(args.delta, place(args.delta, b, l, channel)) +
                    (args.delta_bias ? at(args.delta_bias, channel) : 0));
      dt.push_back(args.delta_softplus ? softplus(raw[t]) : raw[t]);
      for (int64_t n = 0; n < states; ++n) {
        B.push_back(load(args.B, place(args.B, b, l, group, n)));
        C.push_back(load(args.C, place(args.C, b, l, group, n)));
        const int64_t i = t * states + n;
        a.push_back(std::exp(dt[t] * A[n]));
        h.push_back(a[i] * before(t, n) + dt[t] * B[i] * u[t]);
      }
    }
  }

  // Returns the state before step t.
  double before(int64_t t, int64_t n) const { return t == 0 ? h0[n] : h[(t - 1) * states + n]; }

  // Returns C . h + D u.
  double output(int64_t t) const {
    double sum = D * u[t];
    for (int64_t n = 0; n < states; ++n) sum += C[t * states + n] * h[t * states + n];
    return sum;
  }
};

// Holds the gradients that many channels or steps have a share in.
struct Sums {
  std::vector<double> dA, dB, dC, dD, ddelta_bias;
};

// Walks one channel from its end, adds to the sums, and stores the rest.
void backward(const SelectiveScanBwd& a, const StageGradient& dy, int64_t s, int64_t channel,
              Sums* sums) {
  const scan::Problem p = scan::problem_of(a);
  const SequenceSteps sequence = p.sequences[s];
  const Channel x(a, s, channel);
  const int64_t group = channel / p.channels_per_group(), states = p.states;
  std::vector<double> dh(states);  // of h_t, from what follows step t
  for (int64_t n = 0; n < states; ++n) {
    if (a.dlast_state) dh[n] = load(a.dlast_state, place(a.dlast_state, s, channel, n));
  }
  for (int64_t t = x.length - 1; t >= 0; --t) {
    const int64_t b = sequence.batch, l = sequence.begin + t;
    const double g = dy.at(b * p.length + l, channel);
    double dg = g;
    if (a.z) {
      const double gate = sigmoid(x.z[t]);
      dg = g * x.z[t] * gate;
      const double dz = g * x.output(t) * gate * (1 + x.z[t] * (1 - gate));
      if (a.dz) store(a.dz, place(a.dz, b, l, channel), dz);
    }
    double du = x.D * dg, ddt = 0;
    for (int64_t n = 0; n < states; ++n) {
      const int64_t i = t * states + n,
                    shared = ((b * p.length + l) * p.groups + group) * states + n;
      sums->dC[shared] += dg * x.h[i];
      dh[n] += x.C[i] * dg;
      du += dh[n] * x.dt[t] * x.B[i];
      sums->dB[shared] += dh[n] * x.dt[t] * x.u[t];
      const double da = dh[n] * x.before(t, n) * x.a[i];  // of the exponent dt A
      ddt += da * x.A[n] + dh[n] * x.B[i] * x.u[t];
      sums->dA[channel * states + n] += da * x.dt[t];
      dh[n] *= x.a[i];
    }
    if (a.delta_softplus) ddt *= sigmoid(x.raw[t]);
    sums->dD[channel] += dg * x.u[t];
    sums->ddelta_bias[channel] += ddt;
    if (a.du) store(a.du, place(a.du, b, l, channel), du);
    if (a.ddelta) store(a.ddelta, place(a.ddelta, b, l, channel), ddt);
  }
  for (int64_t n = 0; a.dinitial_state && n < states; ++n) {
    store(a.dinitial_state, place(a.dinitial_state, s, channel, n), dh[n]);
  }
}

}  // namespace

Status run(const SelectiveScanFwd& a, const Exec&) {
  const scan::Problem p = scan::problem_of(a);
  std::vector<double> values(static_cast<size_t>(p.batch * p.length * p.channels));
  for (int64_t s = 0; s < p.sequences.count; ++s) {
    const SequenceSteps sequence = p.sequences[s];
    for (int64_t channel = 0; channel < p.channels; ++channel) {
      const Channel x(a, s, channel);
      for (int64_t t = 0; t < x.length; ++t) {
        const int64_t b = sequence.batch, l = sequence.begin + t;
        const double gate = a.z ? x.z[t] * sigmoid(x.z[t]) : 1;
        values[static_cast<size_t>((b * p.length + l) * p.channels + channel)] = x.output(t) * gate;
        if (!a.checkpoints || p.spacing == 0 || (l + 1) % p.spacing != 0) continue;
        const Tensor& c = a.checkpoints;
        for (int64_t n = 0; n < p.states; ++n) {
          const int64_t at = place(c, b, (l + 1) / p.spacing - 1, n) + channel * c.stride(3);
          store(c, at, x.h[t * p.states + n]);
        }
      }
      for (int64_t n = 0; a.last_state && n < p.states; ++n) {
        store(a.last_state, place(a.last_state, s, channel, n), x.before(x.length, n));
      }
    }
  }
  finish_rows(a, a.y, a.u.dtype, p.channels, values);
  return {};
}

Status run(const SelectiveScanBwd& a, const Exec&) {
  const scan::Problem p = scan::problem_of(a);
  const StageGradient dy(a, a.dy);
  Sums sums;
  sums.dA.resize(p.channels * p.states);
  sums.dB.resize(p.batch * p.length * p.groups * p.states);
  sums.dC.resize(sums.dB.size());
  sums.dD.resize(p.channels);
  sums.ddelta_bias.resize(p.channels);
  for (int64_t s = 0; s < p.sequences.count; ++s) {
    for (int64_t channel = 0; channel < p.channels; ++channel) {
      backward(a, dy, s, channel, &sums);
    }
  }
  for (int64_t i = 0; i < static_cast<int64_t>(sums.dB.size()); ++i) {
    const int64_t n = i % p.states, g = i / p.states % p.groups, row = i / p.states / p.groups;
    const int64_t b = row / p.length, l = row % p.length;
    if (a.dB) store(a.dB, place(a.dB, b, l, g, n), sums.dB[i]);
    if (a.dC) store(a.dC, place(a.dC, b, l, g, n), sums.dC[i]);
  }
  for (int64_t channel = 0; channel < p.channels; ++channel) {
    if (a.dD) store(a.dD, channel * a.dD.stride(0), sums.dD[channel]);
    if (a.ddelta_bias) {
      store(a.ddelta_bias, channel * a.ddelta_bias.stride(0), sums.ddelta_bias[channel]);
    }
    for (int64_t n = 0; a.dA && n < p.states; ++n) {
      const int64_t at = channel * a.dA.stride(0) + n * a.dA.stride(1);
      store(a.dA, at, sums.dA[channel * p.states + n]);
    }
  }
  return {};
}

}  // namespace reference
}  // namespace fk
