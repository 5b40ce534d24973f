// gated_ssm is a state-space layer reduced to its gates, without a recurrence. It computes for each
// token
//
//   g = sigmoid(mean over D of dt),   s = sigmoid(sum over N of B C),   u = g s x,
//   y = u + (1 - g) u w_t,   w_t = 0.9^(L-1-t) / (sum over t of 0.9^(L-1-t)).
//
// So y = x * g s (1 + (1 - g) w_t): one factor per token.
#pragma once

#include "core/op.h"

namespace fk {

struct GatedSsmFwd {
  static constexpr const char* kName = "gated_ssm_fwd";
  static constexpr const char* kDoc =
      "y = u + (1 - g) u w_t with u = g s x, g = sigmoid(mean of dt), s = sigmoid(sum of B C) and "
      "weights w_t that fall by 0.9 a step into the past and sum to 1. No recurrence.";
  Tensor x, dt, B, C, y, g, s;

  static void declare(Declaration<GatedSsmFwd>& d) {
    d.reorders();
    d.batch({"B"});
    d.input("x", &GatedSsmFwd::x, "T[B, L, D]", "input");
    d.input("dt", &GatedSsmFwd::dt, "T[B, L, D]", "its mean over D opens the gate");
    d.input("B", &GatedSsmFwd::B, "T[B, L, N]", "input to states");
    d.input("C", &GatedSsmFwd::C, "T[B, L, N]", "states to output");
    d.output("y", &GatedSsmFwd::y, "T[B, L, D]", "output");
    d.output("g", &GatedSsmFwd::g, "F[B, L]", "the gate").saved();
    d.output("s", &GatedSsmFwd::s, "F[B, L]", "the selection").saved();
  }
};

struct GatedSsmBwd {
  static constexpr const char* kName = "gated_ssm_bwd";
  static constexpr const char* kDoc = "Gradients of gated_ssm.";
  Tensor dy, x, B, C, g, s, dx, ddt, dB, dC;

  static void declare(Declaration<GatedSsmBwd>& d) {
    d.reorders();
    d.batch({"B"});
    d.input("dy", &GatedSsmBwd::dy, "T[B, L, D]", "gradient of y");
    d.input("x", &GatedSsmBwd::x, "T[B, L, D]", "as in the forward");
    d.input("B", &GatedSsmBwd::B, "T[B, L, N]", "as in the forward");
    d.input("C", &GatedSsmBwd::C, "T[B, L, N]", "as in the forward");
    d.input("g", &GatedSsmBwd::g, "F[B, L]", "from the forward");
    d.input("s", &GatedSsmBwd::s, "F[B, L]", "from the forward");
    d.output("dx", &GatedSsmBwd::dx, "T[B, L, D]", "gradient of x");
    d.output("ddt", &GatedSsmBwd::ddt, "T[B, L, D]", "gradient of dt");
    d.output("dB", &GatedSsmBwd::dB, "T[B, L, N]", "gradient of B");
    d.output("dC", &GatedSsmBwd::dC, "T[B, L, N]", "gradient of C");
  }
};

namespace reference {
Status run(const GatedSsmFwd& a, const Exec& exec);
Status run(const GatedSsmBwd& a, const Exec& exec);
}  // namespace reference

namespace cpu {
Status run(const GatedSsmFwd& a, const Exec& exec);
Status run(const GatedSsmBwd& a, const Exec& exec);
}  // namespace cpu

namespace cuda {
Status run(const GatedSsmFwd& a, const Exec& exec);
Status run(const GatedSsmBwd& a, const Exec& exec);
}  // namespace cuda

}  // namespace fk
