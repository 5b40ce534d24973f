// gated_linear: two matrix products of the same x, one of which opens and closes the other,
//
//   gate = x Wg^T,   up = x Wu^T,   y = act(gate) up
//
// with x (..., K) and Wg and Wu (N, K), which may be one matrix (2N, K), Wg's rows first. Both
// products are of one pass over x, and neither reaches memory unless the backward asks for it.
//
// The backward needs `gate` and `up`: the forward keeps them, in x's dtype, which costs two stores
// of a tensor like y; or, with `recompute`, the backward computes them again, which costs the
// forward's products once more.
#pragma once

#include "core/activation.h"
#include "core/op.h"

namespace fk {

struct GatedLinearFwd {
  static constexpr const char* kName = "gated_linear_fwd";
  static constexpr const char* kDoc =
      "y = act(x w_gate^T) * (x w_up^T): a gated linear layer (SwiGLU with silu, GeGLU with gelu), "
      "both products in one pass. Without w_up, w_gate holds both, the gate's rows first.";
  Tensor x, w_gate, w_up, y, gate, up;
  int64_t activation = 0;
  bool recompute = false;

  static void declare(Declaration<GatedLinearFwd>& d) {
    using Op = GatedLinearFwd;
    d.multiplies();
    d.reorders();
    d.batch({"..."});
    d.input("x", &Op::x, "T[..., K]", "activations");
    d.input("w_gate", &Op::w_gate, "P[2*N, K]", "a row for each column of the gate, then of the up")
        .factors_unless("w_up")
        .drawn_between(-0.5, 0.5);  // products of two sums grow fast
    d.input("w_up", &Op::w_up, "P[N, K]", "a row for each output column")
        .optional()
        .drawn_between(-0.5, 0.5);
    d.keyword_only();
    d.choice("activation", &Op::activation, activation_names(),
             static_cast<int64_t>(Activation::kSilu), "of the gate");
    d.attribute("recompute", &Op::recompute, false,
                "the backward computes gate and up again, rather than the forward keeping them");
    d.output("y", &Op::y, "T[..., N]", "output");
    d.output("gate", &Op::gate, "T[..., N]", "what the activation is given")
        .when("!recompute")
        .saved();
    d.output("up", &Op::up, "T[..., N]", "what the activated gate is multiplied with")
        .when("!recompute")
        .saved();
  }
};

struct GatedLinearBwd {
  static constexpr const char* kName = "gated_linear_bwd";
  static constexpr const char* kDoc = "Gradients of gated_linear.";
  Tensor dy, x, w_gate, w_up, gate, up, dx, dw_gate, dw_up;
  int64_t activation = 0;

  static void declare(Declaration<GatedLinearBwd>& d) {
    using Op = GatedLinearBwd;
    d.multiplies();
    d.reorders();
    d.batch({"..."});
    d.input("dy", &Op::dy, "T[..., N]", "gradient of y");
    d.input("x", &Op::x, "T[..., K]", "as in the forward");
    d.input("w_gate", &Op::w_gate, "P[2*N, K]", "as in the forward")
        .factors_unless("w_up")
        .drawn_between(-0.5, 0.5);
    d.input("w_up", &Op::w_up, "P[N, K]", "as in the forward").optional().drawn_between(-0.5, 0.5);
    d.input("gate", &Op::gate, "T[..., N]", "from the forward; computed again where there is none")
        .optional();
    d.input("up", &Op::up, "T[..., N]", "likewise").optional();
    d.choice("activation", &Op::activation, activation_names(),
             static_cast<int64_t>(Activation::kSilu), "as in the forward");
    d.output("dx", &Op::dx, "T[..., K]", "gradient of x");
    d.output("dw_gate", &Op::dw_gate, "@w_gate", "gradient of w_gate");
    d.output("dw_up", &Op::dw_up, "@w_up", "gradient of w_up").when("w_up");
  }

  static Status validate(const GatedLinearBwd& a);
};

// The two weights of a call, or their gradients, as matrices of their own, also where they are the
// halves of one matrix, `w_gate`.
struct GatedWeights {
  Tensor gate, up;

  GatedWeights(const Tensor& w_gate, const Tensor& w_up, bool halves) : gate(w_gate), up(w_up) {
    if (!halves || !w_gate) return;
    up = w_gate;
    gate.shape[0] = up.shape[0] = w_gate.size(0) / 2;
    if (up.data == nullptr) return;  // a question about the workspace
    up.data = w_gate.ptr<char>() + gate.shape[0] * w_gate.stride(0) * size_of(w_gate.dtype);
  }
};

namespace reference {
Status run(const GatedLinearFwd& a, const Exec& exec);
Status run(const GatedLinearBwd& a, const Exec& exec);
}  // namespace reference

namespace cpu {
Status run(const GatedLinearFwd& a, const Exec& exec);
Status run(const GatedLinearBwd& a, const Exec& exec);
size_t workspace(const GatedLinearFwd& a);
size_t workspace(const GatedLinearBwd& a);
}  // namespace cpu

namespace cuda {
Status run(const GatedLinearFwd& a, const Exec& exec);
Status run(const GatedLinearBwd& a, const Exec& exec);
size_t workspace(const GatedLinearFwd& a);
size_t workspace(const GatedLinearBwd& a);
}  // namespace cuda

namespace cuda_sm90 {
bool accepts(const GatedLinearFwd& a);
bool accepts(const GatedLinearBwd& a);
Status run(const GatedLinearFwd& a, const Exec& exec);
Status run(const GatedLinearBwd& a, const Exec& exec);
size_t workspace(const GatedLinearFwd& a);
size_t workspace(const GatedLinearBwd& a);
}  // namespace cuda_sm90

}  // namespace fk
