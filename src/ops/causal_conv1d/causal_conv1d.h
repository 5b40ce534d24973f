// causal_conv1d is a depthwise causal convolution over time, with W taps per channel. Its update is
// one step of it, for inference:
//
//   y_t = act(bias + sum_k weight[k] x_{t - (W-1) + k}),   act: identity or silu
//
// Inputs before the first come from the initial state, which holds the last W-1, oldest first;
// without one they are 0. The final state is the same for whatever follows.
#pragma once

#include "core/op.h"

namespace fk {

enum ConvActivation : int64_t { kNoActivation = 0, kSilu = 1 };

constexpr int64_t kMinConvWidth = 2, kMaxConvWidth = 8;

struct CausalConv1dFwd {
  static constexpr const char* kName = "causal_conv1d_fwd";
  static constexpr const char* kDoc =
      "Depthwise causal convolution over L: y_t = act(bias + sum over k of weight[k] "
      "x_{t-(W-1)+k}), W from 2 to 8. With cu_seqlens, sequences stand packed one after another "
      "along L, in a batch of 1, and states have one row per sequence.";
  Tensor x, weight, bias, initial_state, cu_seqlens, y, final_state;
  int64_t activation = kNoActivation;
  bool return_final_state = false;

  static void declare(Declaration<CausalConv1dFwd>& d) {
    using Op = CausalConv1dFwd;
    d.autocast(Autocast::kLower);
    d.size_unless_given("S", "B");
    d.batch({"B"});
    d.independent({"D"});
    d.input("x", &Op::x, "T[B, L, D]", "input");
    d.input("weight", &Op::weight, "P[D, W]", "taps, the oldest input's first");
    d.input("bias", &Op::bias, "P[D]", "added to each channel").optional();
    d.keyword_only();
    d.choice("activation", &Op::activation, {"", "silu"}, kNoActivation, "of the sum");
    d.input("initial_state", &Op::initial_state, "T[S, W-1, D]",
            "the inputs before the first, oldest first; None: 0")
        .optional();
    d.attribute("return_final_state", &Op::return_final_state, false, "return final_state too");
    d.input("cu_seqlens", &Op::cu_seqlens, "J[S+1]", "where each sequence begins along L, and L")
        .optional()
        .rises_to("L");
    d.output("y", &Op::y, "T[B, L, D]", "output");
    d.output("final_state", &Op::final_state, "T[S, W-1, D]", "the last W-1 inputs, oldest first")
        .when("return_final_state");
  }

  static Status validate(const CausalConv1dFwd& a);
};

struct CausalConv1dBwd {
  static constexpr const char* kName = "causal_conv1d_bwd";
  static constexpr const char* kDoc = "Gradients of causal_conv1d.";
  Tensor dy, dfinal_state, x, weight, bias, initial_state, cu_seqlens;
  Tensor dx, dweight, dbias, dinitial_state;
  int64_t activation = kNoActivation;

  static void declare(Declaration<CausalConv1dBwd>& d) {
    using Op = CausalConv1dBwd;
    d.size_unless_given("S", "B");
    d.batch({"B"});
    d.independent({"D"});
    d.input("dy", &Op::dy, "T[B, L, D]", "gradient of y");
    d.input("dfinal_state", &Op::dfinal_state, "T[S, W-1, D]", "gradient of final_state")
        .optional();
    d.input("x", &Op::x, "T[B, L, D]", "as in the forward");
    d.input("weight", &Op::weight, "P[D, W]", "as in the forward");
    d.input("bias", &Op::bias, "P[D]", "as in the forward").optional();
    d.choice("activation", &Op::activation, {"", "silu"}, kNoActivation, "as in the forward");
    d.input("initial_state", &Op::initial_state, "T[S, W-1, D]", "as in the forward").optional();
    d.input("cu_seqlens", &Op::cu_seqlens, "J[S+1]", "as in the forward").optional().rises_to("L");
    d.output("dx", &Op::dx, "T[B, L, D]", "gradient of x");
    d.output("dweight", &Op::dweight, "@weight[D, W]", "gradient of weight");
    d.output("dbias", &Op::dbias, "@bias[D]", "gradient of bias").when("bias");
    d.output("dinitial_state", &Op::dinitial_state, "@initial_state", "gradient of initial_state")
        .when("initial_state");
  }

  static Status validate(const CausalConv1dBwd& a);
};

struct CausalConv1dUpdateFwd {
  static constexpr const char* kName = "causal_conv1d_update_fwd";
  static constexpr const char* kDoc =
      "The next step, or the next L steps, of causal_conv1d, from a state of the last W-1 inputs "
      "that is moved on in place.";
  Tensor x, state, weight, bias, y, new_state;
  int64_t activation = kNoActivation;

  static void declare(Declaration<CausalConv1dUpdateFwd>& d) {
    using Op = CausalConv1dUpdateFwd;
    d.autocast(Autocast::kLower);
    d.batch({"B"});
    d.independent({"D"});
    d.input("x", &Op::x, "T[B, L, D | B, D]", "input of one step, or of L");
    d.input("state", &Op::state, "T[B, W-1, D]", "the inputs before, oldest first");
    d.input("weight", &Op::weight, "P[D, W]", "taps, the oldest input's first");
    d.input("bias", &Op::bias, "P[D]", "added to each channel").optional();
    d.keyword_only();
    d.choice("activation", &Op::activation, {"", "silu"}, kNoActivation, "of the sum");
    d.output("y", &Op::y, "T[B, L, D | B, D]", "output");
    d.output("new_state", &Op::new_state, "@state", "the inputs before the next step")
        .updates("state");
  }

  static Status validate(const CausalConv1dUpdateFwd& a);
};

namespace reference {
Status run(const CausalConv1dFwd& a, const Exec& exec);
Status run(const CausalConv1dBwd& a, const Exec& exec);
Status run(const CausalConv1dUpdateFwd& a, const Exec& exec);
}  // namespace reference

namespace cpu {
Status run(const CausalConv1dFwd& a, const Exec& exec);
Status run(const CausalConv1dBwd& a, const Exec& exec);
Status run(const CausalConv1dUpdateFwd& a, const Exec& exec);
size_t workspace(const CausalConv1dBwd& a);
}  // namespace cpu

namespace cuda {
Status run(const CausalConv1dFwd& a, const Exec& exec);
Status run(const CausalConv1dBwd& a, const Exec& exec);
Status run(const CausalConv1dUpdateFwd& a, const Exec& exec);
size_t workspace(const CausalConv1dBwd& a);
}  // namespace cuda

}  // namespace fk
