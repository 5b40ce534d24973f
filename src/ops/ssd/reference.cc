// ssd in double precision, step by step, one head of one sequence at a time. The backward follows
// the recurrence from the end: dh_t is what the outputs and states from step t on make of h_t,
//
//   dh_t = dg_t C_t^T + a_{t+1} dh_{t+1},   a_t = exp(dt_t A),   dg_t the gradient of h C + D x.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/access.h"
#include "ops/ssd/problem.h"

namespace fk {
namespace reference {
namespace {

using ssd::view_of;

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); }

double get(const Tensor& t, int64_t i, int64_t j, int64_t k, int64_t l = 0) {
  return load(t, view_of(t).offset(i, j, k, l));
}

void put(const Tensor& t, int64_t i, int64_t j, int64_t k, int64_t l, double value) {
  if (t) store(t, view_of(t).offset(i, j, k, l), value);
}

double at_head(const Tensor& t, int64_t head) { return t ? load(t, head * t.stride(0)) : 0; }

// Returns where D, (H) or (H, P), has its entry of a channel.
int64_t skip_place(const Tensor& D, int64_t head, int64_t p) {
  return head * D.stride(0) + (D.ndim == 2 ? p * D.stride(1) : 0);
}

// This is one head of one sequence, as numbers.
struct Head {
  int64_t length, channels, states;
  double A;
  std::vector<double> raw, dt, a;  // by step; raw: dt + dt_bias; a: the decay
  std::vector<double> x, z;        // by step and channel
  std::vector<double> B, C;        // by step and state
  std::vector<double> h;  // by step, channel and state: before the first step, then after each
  std::vector<double> D;  // by channel

  template <class Args>
  Head(const Args& args, int64_t s, int64_t head) {
    const ssd::Problem p = ssd::problem_of(args);
    const SequenceSteps sequence = p.sequences[s];
    length = sequence.end - sequence.begin;
    channels = p.channels;
    states = p.states;
    A = at_head(args.A, head);
    const int64_t b = sequence.batch, group = p.group(head);
    for (int64_t c = 0; c < channels; ++c) {
      D.push_back(args.D ? load(args.D, skip_place(args.D, head, c)) : 0);
      for (int64_t n = 0; n < states; ++n) {
        h.push_back(args.initial_state ? get(args.initial_state, s, head, c, n) : 0);
      }
    }
    for (int64_t t = 0; t < length; ++t) {
      const int64_t l = sequence.begin + t;
      raw.push_back(get(args.dt, b, l, head) + at_head(args.dt_bias, head));
      const double step = args.dt_softplus ? softplus(raw[t]) : raw[t];
      dt.push_back(std::min(std::max(step, args.dt_limit_min), args.dt_limit_max));
      if (std::isnan(step)) dt[t] = step;
      a.push_back(std::exp(dt[t] * A));
      for (int64_t n = 0; n < states; ++n) {
        B.push_back(get(args.B, b, l, group, n));
        C.push_back(get(args.C, b, l, group, n));
      }
      for (int64_t c = 0; c < channels; ++c) {
        x.push_back(get(args.x, b, l, head, c));
        if (args.z) z.push_back(get(args.z, b, l, head, c));
        for (int64_t n = 0; n < states; ++n) {
          h.push_back(a[t] * before(t, c, n) + dt[t] * B[t * states + n] * x[t * channels + c]);
        }
      }
    }
  }

  // Returns the state before a step; that after the last one is before(length, ...).
  double before(int64_t t, int64_t c, int64_t n) const {
    return h[(t * channels + c) * states + n];
  }

  // Returns h C + D x.
  double output(int64_t t, int64_t c) const {
    double sum = D[c] * x[t * channels + c];
    for (int64_t n = 0; n < states; ++n) sum += C[t * states + n] * before(t + 1, c, n);
    return sum;
  }
};

// These are the gradients that many heads or steps have a share in.
struct Sums {
  std::vector<double> dA, ddt_bias, dD, dB, dC;
};

// Walks one head from its end. Adds to the sums, stores the rest.
void backward(const SsdBwd& args, int64_t s, int64_t head, Sums* sums) {
  const ssd::Problem p = ssd::problem_of(args);
  const SequenceSteps sequence = p.sequences[s];
  const Head f(args, s, head);
  const int64_t b = sequence.batch;
  std::vector<double> dh(f.channels * f.states);  // of h_t, from what follows step t
  for (int64_t i = 0; args.dfinal_state && i < f.channels * f.states; ++i) {
    dh[i] = get(args.dfinal_state, s, head, i / f.states, i % f.states);
  }
  for (int64_t t = f.length - 1; t >= 0; --t) {
    const int64_t l = sequence.begin + t;
    const int64_t shared = ((b * p.length + l) * p.groups + p.group(head)) * f.states;
    double ddt = 0;
    for (int64_t c = 0; c < f.channels; ++c) {
      const double x = f.x[t * f.channels + c];
      double dg = get(args.dy, b, l, head, c);
      if (args.z) {
        const double z = f.z[t * f.channels + c], gate = sigmoid(z);
        put(args.dz, b, l, head, c, dg * f.output(t, c) * gate * (1 + z * (1 - gate)));
        dg *= z * gate;
      }
      double dx = f.D[c] * dg;
      for (int64_t n = 0; n < f.states; ++n) {
        const double B = f.B[t * f.states + n], C = f.C[t * f.states + n];
        double& state = dh[c * f.states + n];
        sums->dC[shared + n] += dg * f.before(t + 1, c, n);
        state += dg * C;
        dx += state * f.dt[t] * B;
        sums->dB[shared + n] += state * f.dt[t] * x;
        const double exponent = state * f.a[t] * f.before(t, c, n);  // the gradient of dt A
        ddt += exponent * f.A + state * B * x;
        sums->dA[head] += exponent * f.dt[t];
        state *= f.a[t];
      }
      sums->dD[head * f.channels + c] += dg * x;
      put(args.dx, b, l, head, c, dx);
    }
    const double step = args.dt_softplus ? softplus(f.raw[t]) : f.raw[t];
    if (step < args.dt_limit_min || step > args.dt_limit_max) ddt = 0;
    if (args.dt_softplus) ddt *= sigmoid(f.raw[t]);
    sums->ddt_bias[head] += ddt;
    put(args.ddt, b, l, head, 0, ddt);
  }
  for (int64_t i = 0; i < f.channels * f.states; ++i) {
    put(args.dinitial_state, s, head, i / f.states, i % f.states, dh[i]);
  }
}

void store_sums(const SsdBwd& args, const Sums& sums) {
  const ssd::Problem p = ssd::problem_of(args);
  for (size_t i = 0; i < sums.dB.size(); ++i) {
    const int64_t at = static_cast<int64_t>(i), n = at % p.states, g = at / p.states % p.groups;
    const int64_t row = at / p.states / p.groups, b = row / p.length, l = row % p.length;
    put(args.dB, b, l, g, n, sums.dB[i]);
    put(args.dC, b, l, g, n, sums.dC[i]);
  }
  for (int64_t head = 0; head < p.heads; ++head) {
    if (args.dA) store(args.dA, head * args.dA.stride(0), sums.dA[head]);
    if (args.ddt_bias) store(args.ddt_bias, head * args.ddt_bias.stride(0), sums.ddt_bias[head]);
    if (!args.dD) continue;
    double whole = 0;
    for (int64_t c = 0; c < p.channels; ++c) {
      const double own = sums.dD[head * p.channels + c];
      whole += own;
      if (args.dD.ndim == 2) store(args.dD, skip_place(args.dD, head, c), own);
    }
    if (args.dD.ndim == 1) store(args.dD, head * args.dD.stride(0), whole);
  }
}

}  // namespace

Status run(const SsdFwd& args, const Exec&) {
  const ssd::Problem p = ssd::problem_of(args);
  for (int64_t s = 0; s < p.sequences.count; ++s) {
    const SequenceSteps sequence = p.sequences[s];
    for (int64_t head = 0; head < p.heads; ++head) {
      const Head f(args, s, head);
      for (int64_t i = 0; i < f.length * f.channels; ++i) {
        const int64_t t = i / f.channels, c = i % f.channels;
        const double gate = args.z ? f.z[i] * sigmoid(f.z[i]) : 1;
        put(args.y, sequence.batch, sequence.begin + t, head, c, f.output(t, c) * gate);
      }
      for (int64_t i = 0; i < f.channels * f.states; ++i) {
        const int64_t c = i / f.states, n = i % f.states;
        put(args.final_state, s, head, c, n, f.before(f.length, c, n));
      }
    }
  }
  return {};
}

Status run(const SsdBwd& args, const Exec&) {
  const ssd::Problem p = ssd::problem_of(args);
  Sums sums;
  sums.dA.resize(p.heads);
  sums.ddt_bias.resize(p.heads);
  sums.dD.resize(p.heads * p.channels);
  sums.dB.resize(p.batch * p.length * p.groups * p.states);
  sums.dC.resize(sums.dB.size());
  for (int64_t s = 0; s < p.sequences.count; ++s) {
    for (int64_t head = 0; head < p.heads; ++head) backward(args, s, head, &sums);
  }
  store_sums(args, sums);
  return {};
}

}  // namespace reference
}  // namespace fk
