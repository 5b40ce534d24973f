// selective_state_update is one step of the selective scan, as it is taken token by token: with dt
// through bias and softplus,
//
//   state = exp(dt A) state + dt B x,   y = (C . state + D x) * silu(z)
//
// Channels are D, or H heads of P each, as in Mamba-2 (whose A, dt, D and dt_bias are the same for
// all channels of a head: tensors of stride 0 along P say so).
#pragma once

#include "core/op.h"

namespace fk {

struct SelectiveStateUpdateFwd {
  static constexpr const char* kName = "selective_state_update_fwd";
  static constexpr const char* kDoc =
      "One step of the selective scan: state = exp(dt A) state + dt B x, in place, and "
      "y = (C . state + D x) silu(z). Every D / G channels (H / G heads) share B and C.";
  Tensor state, x, dt, A, B, C, D, z, dt_bias, y, new_state;
  bool dt_softplus = false;

  static void declare(Declaration<SelectiveStateUpdateFwd>& d) {
    using Op = SelectiveStateUpdateFwd;
    d.reorders();
    d.batch({"B"});
    d.input("state", &Op::state, "P[B, D, N | B, H, P, N]", "before the step");
    d.input("x", &Op::x, "T[B, D | B, H, P]", "input");
    d.input("dt", &Op::dt, "T[B, D | B, H, P]", "time step").drawn_between(0.01, 1.0);
    d.input("A", &Op::A, "F[D, N | H, P, N]", "decay of each state; negative as a rule")
        .drawn_between(-2.0, -0.01);
    d.input("B", &Op::B, "T[B, N | B, G, N]", "input to states").form("groups");
    d.input("C", &Op::C, "T[B, N | B, G, N]", "states to output").form("groups");
    d.input("D", &Op::D, "P[D | H, P]", "input to output").optional();
    d.keyword_only();
    d.input("z", &Op::z, "T[B, D | B, H, P]", "gate: y is multiplied by silu(z)").optional();
    d.input("dt_bias", &Op::dt_bias, "P[D | H, P]", "added to dt")
        .optional()
        .drawn_between(0.0, 0.5);
    d.attribute("dt_softplus", &Op::dt_softplus, false,
                "dt goes through log(1 + exp(x)) after the bias");
    d.output("y", &Op::y, "T[B, D | B, H, P]", "output");
    d.output("new_state", &Op::new_state, "@state", "after the step").updates("state");
  }

  static Status validate(const SelectiveStateUpdateFwd& a);
};

namespace reference {
Status run(const SelectiveStateUpdateFwd& a, const Exec& exec);
}  // namespace reference

namespace cpu {
Status run(const SelectiveStateUpdateFwd& a, const Exec& exec);
}  // namespace cpu

namespace cuda {
Status run(const SelectiveStateUpdateFwd& a, const Exec& exec);
}  // namespace cuda

}  // namespace fk
