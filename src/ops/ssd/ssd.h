// Mamba-2's state-space duality: in every head a linear recurrence over time whose state is a
// matrix of P channels by N states, and whose decay is one number per step,
//
//   h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T        (P, N)
//   y_t = (h_t C_t + D x_t) * silu(z_t)               (P)
//
// with dt = clamp(softplus(dt + dt_bias)). Since the decay is a number, a chunk of Q steps is a
// masked matrix product, y = (C B^T o L) (dt x) with L_ts = exp(A (dt_{s+1} + ... + dt_t)), and
// only the state is carried from chunk to chunk. Nothing is saved for the backward: it computes the
// chunks' states again.
#pragma once

#include "core/op.h"

namespace fk {

constexpr int64_t kMaxSsdChannels = 256, kMaxSsdStates = 256;

struct SsdFwd {
  static constexpr const char* kName = "ssd_fwd";
  static constexpr const char* kDoc =
      "Mamba-2's scan (state-space duality): h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T, "
      "y_t = (h_t C_t + D x_t) silu(z_t), with dt clamped to dt_limit after its bias and softplus. "
      "Every H / G heads share B and C. With cu_seqlens, sequences stand packed one after another "
      "along L, in a batch of 1, and states have one row per sequence.";
  Tensor x, dt, A, B, C, D, z, dt_bias, initial_state, cu_seqlens;
  Tensor y, final_state;
  double dt_limit_min = 0, dt_limit_max = kLeftOut;
  int64_t chunk_size = 0;
  bool dt_softplus = false, return_final_state = false;

  static void declare(Declaration<SsdFwd>& d) {
    d.multiplies();
    d.reorders();
    d.size_unless_given("S", "B");
    d.batch({"B"});
    d.input("x", &SsdFwd::x, "T[B, L, H, P]", "input, of H heads");
    d.input("dt", &SsdFwd::dt, "T[B, L, H]", "time steps").drawn_between(0.01, 1.0);
    d.input("A", &SsdFwd::A, "F[H]", "decay of each head; negative as a rule")
        .drawn_between(-2.0, -0.01);
    d.input("B", &SsdFwd::B, "T[B, L, G, N]", "input to states");
    d.input("C", &SsdFwd::C, "T[B, L, G, N]", "states to output");
    d.input("D", &SsdFwd::D, "P[H, (P)]", "input to output").optional();
    d.keyword_only();
    d.input("z", &SsdFwd::z, "T[B, L, H, P]", "gate: y is multiplied by silu(z)").optional();
    d.input("dt_bias", &SsdFwd::dt_bias, "P[H]", "added to dt").optional().drawn_between(0.0, 0.5);
    d.attribute("dt_softplus", &SsdFwd::dt_softplus, false,
                "dt goes through log(1 + exp(x)) after the bias");
    d.attribute("dt_limit_min", &SsdFwd::dt_limit_min, 0.0, "the least that dt is then raised to");
    d.attribute("dt_limit_max", &SsdFwd::dt_limit_max, kLeftOut, "the most that it is lowered to")
        .may_be_infinite();
    d.group("dt_limit", {"dt_limit_min", "dt_limit_max"});
    d.input("initial_state", &SsdFwd::initial_state, "P[S, H, P, N]",
            "the state before the first step; None: 0")
        .optional();
    d.attribute("return_final_state", &SsdFwd::return_final_state, false, "return final_state too");
    d.input("cu_seqlens", &SsdFwd::cu_seqlens, "J[S+1]",
            "where each sequence begins along L, and L")
        .optional()
        .rises_to("L");
    d.attribute("chunk_size", &SsdFwd::chunk_size, 0,
                "the most steps of a chunk, which changes roundings and time only; None or 0: as "
                "suits the kernel")
        .at_least(0)
        .or_none();
    d.output("y", &SsdFwd::y, "T[B, L, H, P]", "output");
    d.output("final_state", &SsdFwd::final_state, "F[S, H, P, N]", "the state after the last step")
        .when("return_final_state");
  }

  static Status validate(const SsdFwd& a);
};

struct SsdBwd {
  static constexpr const char* kName = "ssd_bwd";
  static constexpr const char* kDoc = "Gradients of ssd.";
  Tensor dy, dfinal_state, x, dt, A, B, C, D, z, dt_bias, initial_state, cu_seqlens;
  Tensor dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial_state;
  double dt_limit_min = 0, dt_limit_max = kLeftOut;
  int64_t chunk_size = 0;
  bool dt_softplus = false;

  static void declare(Declaration<SsdBwd>& d) {
    d.multiplies();
    d.reorders();
    d.size_unless_given("S", "B");
    d.batch({"B"});
    d.input("dy", &SsdBwd::dy, "T[B, L, H, P]", "gradient of y");
    d.input("dfinal_state", &SsdBwd::dfinal_state, "F[S, H, P, N]", "gradient of final_state")
        .optional();
    d.input("x", &SsdBwd::x, "T[B, L, H, P]", "as in the forward");
    d.input("dt", &SsdBwd::dt, "T[B, L, H]", "as in the forward");
    d.input("A", &SsdBwd::A, "F[H]", "as in the forward");
    d.input("B", &SsdBwd::B, "T[B, L, G, N]", "as in the forward");
    d.input("C", &SsdBwd::C, "T[B, L, G, N]", "as in the forward");
    d.input("D", &SsdBwd::D, "P[H, (P)]", "as in the forward").optional();
    d.input("z", &SsdBwd::z, "T[B, L, H, P]", "as in the forward").optional();
    d.input("dt_bias", &SsdBwd::dt_bias, "P[H]", "as in the forward").optional();
    d.attribute("dt_softplus", &SsdBwd::dt_softplus, false, "as in the forward");
    d.attribute("dt_limit_min", &SsdBwd::dt_limit_min, 0.0, "as in the forward");
    d.attribute("dt_limit_max", &SsdBwd::dt_limit_max, kLeftOut, "as in the forward")
        .may_be_infinite();
    d.input("initial_state", &SsdBwd::initial_state, "P[S, H, P, N]", "as in the forward")
        .optional();
    d.input("cu_seqlens", &SsdBwd::cu_seqlens, "J[S+1]", "as in the forward")
        .optional()
        .rises_to("L");
    d.attribute("chunk_size", &SsdBwd::chunk_size, 0, "as in the forward").at_least(0).or_none();
    d.output("dx", &SsdBwd::dx, "T[B, L, H, P]", "gradient of x");
    d.output("ddt", &SsdBwd::ddt, "T[B, L, H]", "gradient of dt");
    d.output("dA", &SsdBwd::dA, "F[H]", "gradient of A");
    d.output("dB", &SsdBwd::dB, "T[B, L, G, N]", "gradient of B");
    d.output("dC", &SsdBwd::dC, "T[B, L, G, N]", "gradient of C");
    d.output("dD", &SsdBwd::dD, "@D", "gradient of D").when("D");
    d.output("dz", &SsdBwd::dz, "@z", "gradient of z").when("z");
    d.output("ddt_bias", &SsdBwd::ddt_bias, "@dt_bias", "gradient of dt_bias").when("dt_bias");
    d.output("dinitial_state", &SsdBwd::dinitial_state, "@initial_state",
             "gradient of initial_state")
        .when("initial_state");
  }

  static Status validate(const SsdBwd& a);
};

namespace reference {
Status run(const SsdFwd& a, const Exec& exec);
Status run(const SsdBwd& a, const Exec& exec);
}  // namespace reference

namespace cpu {
Status run(const SsdFwd& a, const Exec& exec);
Status run(const SsdBwd& a, const Exec& exec);
size_t workspace(const SsdFwd& a);
size_t workspace(const SsdBwd& a);
}  // namespace cpu

namespace cuda {
Status run(const SsdFwd& a, const Exec& exec);
Status run(const SsdBwd& a, const Exec& exec);
size_t workspace(const SsdFwd& a);
size_t workspace(const SsdBwd& a);
}  // namespace cuda

}  // namespace fk
