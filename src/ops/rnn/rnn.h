// Recurrent nets: one layer, one direction, all steps of all sequences in one call. Weights, biases
// and the order of gates are those of torch.nn.LSTM and torch.nn.GRU. With `s` for the sigmoid and
// `*` for products of elements,
//
//   lstm   i, f, g, o = s, s, tanh, s of W_ih x_t + b_ih + W_hh h_{t-1} + b_hh   (H rows each)
//          c_t = f * c_{t-1} + i * g
//          m_t = o * tanh(c_t)
//          h_t = m_t, or W_hr m_t where there is a projection; then h has R entries, not H
//
//   gru    r, z = s of W_ih x_t + b_ih + W_hh h_{t-1} + b_hh                     (H rows each)
//          n = tanh(W_in x_t + b_in + r * (W_hn h_{t-1} + b_hn)), or, not reset_after,
//              tanh(W_in x_t + b_in + W_hn (r * h_{t-1}) + b_hn)
//          h_t = (1 - z) * n + z * h_{t-1}
//
// y_t is h_t in x's dtype. Between steps h and c are float; a kernel may round the h that it
// multiplies to x's dtype, as it may round the weights. With `reverse` a sequence is walked from
// its last step to its first: y_t is still the output at position t, and the states that come out
// are those after position 0.
//
// The forward keeps for the backward, at every position t,
//   lstm   gates (B, L, 4 H): i, f, g, o, as they are after sigmoid and tanh, in x's dtype;
//          cells (B, L, H): c_t, float
//   gru    gates (B, L, 4 H): r, z, n, and what r met: W_hn h_{t-1} + b_hn, or, not reset_after,
//          r * h_{t-1}
// and the backward takes h_{t-1} from y (from h0 at a sequence's first step).
//
// The output stage (core/output_stage.h) comes behind the last step: the h that recurs knows
// nothing of it. Where it adds a residual, the forward keeps y as it was before, for the backward.
//
// Floor: 2 * gates * H * (I + R) operations for each step of each sequence, three times that with
// the backward, by the machine's matrix peak. The products with x do not wait for each other; those
// with h do: a step is at least the time in which every core reads its share of W_hh from its own
// memory (caches, registers) and all cores meet once.
#pragma once

#include "core/op.h"
#include "core/output_stage.h"

namespace fk {

struct LstmFwd : OutputStage {
  static constexpr const char* kName = "lstm_fwd";
  static constexpr const char* kDoc =
      "A layer of an LSTM over whole sequences: gates i, f, g, o of W_ih x + b_ih + W_hh h + b_hh, "
      "c = f c + i g, h = o tanh(c), or w_hr times that. With cu_seqlens, sequences stand packed "
      "one after another along L, in a batch of 1, and states have one row per sequence. With "
      "residual, y has that added, the h that recurs has not; with norm_weight, the norm of y is "
      "returned before y.";
  static constexpr StageTypes kStage = {"T[B, L, R]", "P[R]", "F[B, L, 2]"};
  Tensor x, w_ih, w_hh, b_ih, b_hh, h0, c0, w_hr, cu_seqlens;
  Tensor y, h, c, gates, cells;
  bool reverse = false;

  static void declare(Declaration<LstmFwd>& d) {
    using Op = LstmFwd;
    d.multiplies();
    d.reorders();
    d.size_unless_given("S", "B");
    d.batch({"B"});
    d.input("x", &Op::x, "T[B, L, I]", "input");
    d.input("w_ih", &Op::w_ih, "P[4*H, I]", "input to gates").drawn_between(-0.3, 0.3);
    d.input("w_hh", &Op::w_hh, "P[4*H, R]", "the last output to gates; R is H without w_hr")
        .drawn_between(-0.3, 0.3);
    d.input("b_ih", &Op::b_ih, "P[4*H]", "added to the gates").optional();
    d.input("b_hh", &Op::b_hh, "P[4*H]", "added to the gates as well").optional();
    d.input("h0", &Op::h0, "P[S, R]", "the output before the first step; None: 0").optional();
    d.input("c0", &Op::c0, "P[S, H]", "the cell before the first step; None: 0").optional();
    d.keyword_only();
    d.input("w_hr", &Op::w_hr, "P[R, H]", "projects o tanh(c) to the output")
        .optional()
        .drawn_between(-0.3, 0.3);
    d.input("cu_seqlens", &Op::cu_seqlens, "J[S+1]", "where each sequence begins along L, and L")
        .optional()
        .rises_to("L");
    d.attribute("reverse", &Op::reverse, false, "walk each sequence from its end");
    declare_inputs(d, kStage);
    declare_outputs(d, kStage);
    d.output("y", &Op::y, "T[B, L, R]", "the output of every step");
    d.output("h", &Op::h, "F[S, R]", "the output of the last step");
    d.output("c", &Op::c, "F[S, H]", "the cell after the last step");
    d.output("gates", &Op::gates, "T[B, L, 4*H]", "i, f, g, o of every step").saved();
    d.output("cells", &Op::cells, "F[B, L, H]", "the cell after every step").saved();
    declare_before_residual(d, kStage);
  }

  Tensor& stage_output() { return y; }
  DType stage_dtype() const { return x.dtype; }

  static Status validate(const LstmFwd& a);
};

struct LstmBwd : OutputStageGradient {
  static constexpr const char* kName = "lstm_bwd";
  static constexpr const char* kDoc = "Gradients of lstm.";
  Tensor dy, dh, dc, x, w_ih, w_hh, b_ih, b_hh, h0, c0, w_hr, cu_seqlens, y, gates, cells;
  Tensor dx, dw_ih, dw_hh, db_ih, db_hh, dh0, dc0, dw_hr;
  bool reverse = false;

  static void declare(Declaration<LstmBwd>& d) {
    using Op = LstmBwd;
    d.multiplies();
    d.reorders();
    d.size_unless_given("S", "B");
    d.batch({"B"});
    d.input("dy", &Op::dy, "T[B, L, R]", "gradient of y");
    d.input("dh", &Op::dh, "F[S, R]", "gradient of h").optional();
    d.input("dc", &Op::dc, "F[S, H]", "gradient of c").optional();
    d.input("x", &Op::x, "T[B, L, I]", "as in the forward");
    d.input("w_ih", &Op::w_ih, "P[4*H, I]", "as in the forward");
    d.input("w_hh", &Op::w_hh, "P[4*H, R]", "as in the forward");
    d.input("b_ih", &Op::b_ih, "P[4*H]", "as in the forward; its dtype").optional();
    d.input("b_hh", &Op::b_hh, "P[4*H]", "as in the forward; its dtype").optional();
    d.input("h0", &Op::h0, "P[S, R]", "as in the forward").optional();
    d.input("c0", &Op::c0, "P[S, H]", "as in the forward").optional();
    d.input("w_hr", &Op::w_hr, "P[R, H]", "as in the forward").optional();
    d.input("cu_seqlens", &Op::cu_seqlens, "J[S+1]", "as in the forward").optional().rises_to("L");
    d.attribute("reverse", &Op::reverse, false, "as in the forward");
    d.input("y", &Op::y, "T[B, L, R]", "from the forward, without residual")
        .prefer("before_residual");
    d.input("gates", &Op::gates, "T[B, L, 4*H]", "from the forward");
    d.input("cells", &Op::cells, "F[B, L, H]", "from the forward");
    declare_inputs(d, LstmFwd::kStage);
    d.output("dx", &Op::dx, "T[B, L, I]", "gradient of x");
    d.output("dw_ih", &Op::dw_ih, "@w_ih", "gradient of w_ih");
    d.output("dw_hh", &Op::dw_hh, "@w_hh", "gradient of w_hh");
    d.output("db_ih", &Op::db_ih, "@b_ih", "gradient of b_ih").when("b_ih");
    d.output("db_hh", &Op::db_hh, "@b_hh", "gradient of b_hh").when("b_hh");
    d.output("dh0", &Op::dh0, "@h0", "gradient of h0").when("h0");
    d.output("dc0", &Op::dc0, "@c0", "gradient of c0").when("c0");
    d.output("dw_hr", &Op::dw_hr, "@w_hr", "gradient of w_hr").when("w_hr");
    declare_outputs(d, LstmFwd::kStage);
  }

  Tensor& stage_gradient() { return dy; }
  static Status validate(const LstmBwd& a);
};

struct GruFwd : OutputStage {
  static constexpr const char* kName = "gru_fwd";
  static constexpr const char* kDoc =
      "A layer of a GRU over whole sequences: gates r, z, n, h = (1 - z) n + z h. The reset gate r "
      "meets W_hn h + b_hn (reset_after, as in torch), or h before that product (Keras, ONNX). "
      "With cu_seqlens, sequences stand packed one after another along L, in a batch of 1, and "
      "states have one row per sequence. With residual, y has that added, the h that recurs has "
      "not; with norm_weight, the norm of y is returned before y.";
  static constexpr StageTypes kStage = {"T[B, L, H]", "P[H]", "F[B, L, 2]"};
  Tensor x, w_ih, w_hh, b_ih, b_hh, h0, cu_seqlens;
  Tensor y, h, gates;
  bool reset_after = true, reverse = false;

  static void declare(Declaration<GruFwd>& d) {
    using Op = GruFwd;
    d.multiplies();
    d.reorders();
    d.size_unless_given("S", "B");
    d.batch({"B"});
    d.input("x", &Op::x, "T[B, L, I]", "input");
    d.input("w_ih", &Op::w_ih, "P[3*H, I]", "input to gates").drawn_between(-0.3, 0.3);
    d.input("w_hh", &Op::w_hh, "P[3*H, H]", "the last output to gates").drawn_between(-0.3, 0.3);
    d.input("b_ih", &Op::b_ih, "P[3*H]", "added to the product with x").optional();
    d.input("b_hh", &Op::b_hh, "P[3*H]", "added to the product with h").optional();
    d.input("h0", &Op::h0, "P[S, H]", "the output before the first step; None: 0").optional();
    d.keyword_only();
    d.attribute("reset_after", &Op::reset_after, true,
                "the reset gate meets the product with h, not h itself");
    d.input("cu_seqlens", &Op::cu_seqlens, "J[S+1]", "where each sequence begins along L, and L")
        .optional()
        .rises_to("L");
    d.attribute("reverse", &Op::reverse, false, "walk each sequence from its end");
    declare_inputs(d, kStage);
    declare_outputs(d, kStage);
    d.output("y", &Op::y, "T[B, L, H]", "the output of every step");
    d.output("h", &Op::h, "F[S, H]", "the output of the last step");
    d.output("gates", &Op::gates, "T[B, L, 4*H]", "r, z, n and what r met, of every step").saved();
    declare_before_residual(d, kStage);
  }

  Tensor& stage_output() { return y; }
  DType stage_dtype() const { return x.dtype; }

  static Status validate(const GruFwd& a);
};

struct GruBwd : OutputStageGradient {
  static constexpr const char* kName = "gru_bwd";
  static constexpr const char* kDoc = "Gradients of gru.";
  Tensor dy, dh, x, w_ih, w_hh, b_ih, b_hh, h0, cu_seqlens, y, gates;
  Tensor dx, dw_ih, dw_hh, db_ih, db_hh, dh0;
  bool reset_after = true, reverse = false;

  static void declare(Declaration<GruBwd>& d) {
    using Op = GruBwd;
    d.multiplies();
    d.reorders();
    d.size_unless_given("S", "B");
    d.batch({"B"});
    d.input("dy", &Op::dy, "T[B, L, H]", "gradient of y");
    d.input("dh", &Op::dh, "F[S, H]", "gradient of h").optional();
    d.input("x", &Op::x, "T[B, L, I]", "as in the forward");
    d.input("w_ih", &Op::w_ih, "P[3*H, I]", "as in the forward");
    d.input("w_hh", &Op::w_hh, "P[3*H, H]", "as in the forward");
    d.input("b_ih", &Op::b_ih, "P[3*H]", "as in the forward; its dtype").optional();
    d.input("b_hh", &Op::b_hh, "P[3*H]", "as in the forward; its dtype").optional();
    d.input("h0", &Op::h0, "P[S, H]", "as in the forward").optional();
    d.attribute("reset_after", &Op::reset_after, true, "as in the forward");
    d.input("cu_seqlens", &Op::cu_seqlens, "J[S+1]", "as in the forward").optional().rises_to("L");
    d.attribute("reverse", &Op::reverse, false, "as in the forward");
    d.input("y", &Op::y, "T[B, L, H]", "from the forward, without residual")
        .prefer("before_residual");
    d.input("gates", &Op::gates, "T[B, L, 4*H]", "from the forward");
    declare_inputs(d, GruFwd::kStage);
    d.output("dx", &Op::dx, "T[B, L, I]", "gradient of x");
    d.output("dw_ih", &Op::dw_ih, "@w_ih", "gradient of w_ih");
    d.output("dw_hh", &Op::dw_hh, "@w_hh", "gradient of w_hh");
    d.output("db_ih", &Op::db_ih, "@b_ih", "gradient of b_ih").when("b_ih");
    d.output("db_hh", &Op::db_hh, "@b_hh", "gradient of b_hh").when("b_hh");
    d.output("dh0", &Op::dh0, "@h0", "gradient of h0").when("h0");
    declare_outputs(d, GruFwd::kStage);
  }

  Tensor& stage_gradient() { return dy; }
  static Status validate(const GruBwd& a);
};

namespace reference {
Status run(const LstmFwd& a, const Exec& exec);
Status run(const LstmBwd& a, const Exec& exec);
Status run(const GruFwd& a, const Exec& exec);
Status run(const GruBwd& a, const Exec& exec);
}  // namespace reference

namespace cpu {
Status run(const LstmFwd& a, const Exec& exec);
Status run(const LstmBwd& a, const Exec& exec);
Status run(const GruFwd& a, const Exec& exec);
Status run(const GruBwd& a, const Exec& exec);
size_t workspace(const LstmFwd& a);
size_t workspace(const LstmBwd& a);
size_t workspace(const GruFwd& a);
size_t workspace(const GruBwd& a);
}  // namespace cpu

}  // namespace fk
