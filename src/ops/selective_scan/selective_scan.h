// The selective scan of Mamba: in every channel a linear recurrence over time whose coefficients
// come from the input. With dt = delta + delta_bias, through softplus if asked,
//
//   h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t          (N states per channel)
//   y_t = (C_t . h_t + D u_t) * silu(z_t)
//
// and then the output stage (core/output_stage.h). For the backward the forward keeps the state
// after every `checkpoint` steps, counted from the beginning of L, also where sequences are packed
// along it; states in between are computed again.
#pragma once

#include "core/op.h"
#include "core/output_stage.h"

namespace fk {

enum ScanAlgorithm : int64_t {
  kAutoScan = 0,
  kSequentialScan = 1,
  kBlellochScan = 2,
  kHillisSteeleScan = 3,
  kChunkedScan = 4,
  kCumsumScan = 5
};

// The states that are kept are so many steps apart, unless the caller says otherwise: one state of
// N float32 per channel is then half of one float32 input for N = 16.
constexpr int64_t kScanCheckpoint = 32;
constexpr int64_t kMaxScanStates = 256;

struct SelectiveScanFwd : OutputStage {
  static constexpr const char* kName = "selective_scan_fwd";
  static constexpr const char* kDoc =
      "Mamba's selective scan: h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t, "
      "y_t = (C_t . h_t + D u_t) silu(z_t), with dt = softplus(delta + delta_bias) or delta + "
      "delta_bias. Every D / G channels share B and C. With cu_seqlens, sequences stand packed "
      "one after another along L, in a batch of 1, and states have one row per sequence. With "
      "residual, y has that added; with norm_weight, the norm of y over D is returned before y.";
  static constexpr StageTypes kStage = {"T[B, L, D]", "P[D]", "F[B, L, 2]"};
  Tensor u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens;
  Tensor y, last_state, checkpoints;
  int64_t algorithm = kAutoScan, checkpoint = kScanCheckpoint;
  bool delta_softplus = false, return_last_state = false;

  static void declare(Declaration<SelectiveScanFwd>& d) {
    d.reorders();
    d.size_unless_given("S", "B");
    d.batch({"B"});
    d.input("u", &SelectiveScanFwd::u, "T[B, L, D]", "input");
    d.input("delta", &SelectiveScanFwd::delta, "T[B, L, D]", "time steps").drawn_between(0.01, 1.0);
    d.input("A", &SelectiveScanFwd::A, "F[D, N]", "decay of each state; negative as a rule")
        .drawn_between(-2.0, -0.01);
    d.input("B", &SelectiveScanFwd::B, "T[B, L, G, N | B, L, N]", "input to states");
    d.input("C", &SelectiveScanFwd::C, "T[B, L, G, N | B, L, N]", "states to output");
    d.input("D", &SelectiveScanFwd::D, "P[D]", "input to output").optional();
    d.keyword_only();
    d.input("z", &SelectiveScanFwd::z, "T[B, L, D]", "gate: y is multiplied by silu(z)").optional();
    d.input("delta_bias", &SelectiveScanFwd::delta_bias, "P[D]", "added to delta")
        .optional()
        .drawn_between(0.0, 0.5);
    d.attribute("delta_softplus", &SelectiveScanFwd::delta_softplus, false,
                "delta goes through log(1 + exp(x)) after the bias");
    d.input("initial_state", &SelectiveScanFwd::initial_state, "P[S, D, N]",
            "the state before the first step; None: 0")
        .optional();
    d.attribute("return_last_state", &SelectiveScanFwd::return_last_state, false,
                "return last_state too");
    d.input("cu_seqlens", &SelectiveScanFwd::cu_seqlens, "J[S+1]",
            "where each sequence begins along L, and L")
        .optional()
        .rises_to("L");
    d.choice("algorithm", &SelectiveScanFwd::algorithm,
             {"auto", "sequential", "blelloch", "hillis_steele", "chunked", "cumsum"}, kAutoScan,
             "how the recurrence is computed");
    d.attribute("checkpoint", &SelectiveScanFwd::checkpoint, kScanCheckpoint,
                "steps between the states kept for the backward: 1 keeps all, 0 none, -1 takes the "
                "square root of L")
        .at_least(-1);
    declare_inputs(d, kStage);
    declare_outputs(d, kStage);
    d.output("y", &SelectiveScanFwd::y, "T[B, L, D]", "output");
    d.output("last_state", &SelectiveScanFwd::last_state, "F[S, D, N]",
             "the state after the last step")
        .when("return_last_state");
    d.output("checkpoints", &SelectiveScanFwd::checkpoints, "F[B, L/checkpoint, N, D]",
             "the state after every so many steps")
        .saved();
  }

  Tensor& stage_output() { return y; }
  DType stage_dtype() const { return u.dtype; }
  static Status validate(const SelectiveScanFwd& a);
};

struct SelectiveScanBwd : OutputStageGradient {
  static constexpr const char* kName = "selective_scan_bwd";
  static constexpr const char* kDoc = "Gradients of selective_scan.";
  Tensor dy, dlast_state, u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens;
  Tensor checkpoints;
  Tensor du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dinitial_state;
  int64_t algorithm = kAutoScan, checkpoint = kScanCheckpoint;
  bool delta_softplus = false;

  static void declare(Declaration<SelectiveScanBwd>& d) {
    d.reorders();
    d.size_unless_given("S", "B");
    d.batch({"B"});
    d.input("dy", &SelectiveScanBwd::dy, "T[B, L, D]", "gradient of y");
    d.input("dlast_state", &SelectiveScanBwd::dlast_state, "F[S, D, N]", "gradient of last_state")
        .optional();
    d.input("u", &SelectiveScanBwd::u, "T[B, L, D]", "as in the forward");
    d.input("delta", &SelectiveScanBwd::delta, "T[B, L, D]", "as in the forward");
    d.input("A", &SelectiveScanBwd::A, "F[D, N]", "as in the forward");
    d.input("B", &SelectiveScanBwd::B, "T[B, L, G, N | B, L, N]", "as in the forward");
    d.input("C", &SelectiveScanBwd::C, "T[B, L, G, N | B, L, N]", "as in the forward");
    d.input("D", &SelectiveScanBwd::D, "P[D]", "as in the forward").optional();
    d.input("z", &SelectiveScanBwd::z, "T[B, L, D]", "as in the forward").optional();
    d.input("delta_bias", &SelectiveScanBwd::delta_bias, "P[D]", "as in the forward").optional();
    d.attribute("delta_softplus", &SelectiveScanBwd::delta_softplus, false, "as in the forward");
    d.input("initial_state", &SelectiveScanBwd::initial_state, "P[S, D, N]", "as in the forward")
        .optional();
    d.input("cu_seqlens", &SelectiveScanBwd::cu_seqlens, "J[S+1]", "as in the forward")
        .optional()
        .rises_to("L");
    d.choice("algorithm", &SelectiveScanBwd::algorithm,
             {"auto", "sequential", "blelloch", "hillis_steele", "chunked", "cumsum"}, kAutoScan,
             "as in the forward");
    d.attribute("checkpoint", &SelectiveScanBwd::checkpoint, kScanCheckpoint, "as in the forward")
        .at_least(-1);
    d.input("checkpoints", &SelectiveScanBwd::checkpoints, "F[B, L/checkpoint, N, D]",
            "from the forward");
    declare_inputs(d, SelectiveScanFwd::kStage);
    d.output("du", &SelectiveScanBwd::du, "T[B, L, D]", "gradient of u");
    d.output("ddelta", &SelectiveScanBwd::ddelta, "T[B, L, D]", "gradient of delta");
    d.output("dA", &SelectiveScanBwd::dA, "F[D, N]", "gradient of A");
    d.output("dB", &SelectiveScanBwd::dB, "@B", "gradient of B");
    d.output("dC", &SelectiveScanBwd::dC, "@C", "gradient of C");
    d.output("dD", &SelectiveScanBwd::dD, "@D", "gradient of D").when("D");
    d.output("dz", &SelectiveScanBwd::dz, "@z", "gradient of z").when("z");
    d.output("ddelta_bias", &SelectiveScanBwd::ddelta_bias, "@delta_bias", "gradient of delta_bias")
        .when("delta_bias");
    d.output("dinitial_state", &SelectiveScanBwd::dinitial_state, "@initial_state",
             "gradient of initial_state")
        .when("initial_state");
    declare_outputs(d, SelectiveScanFwd::kStage);
  }

  Tensor& stage_gradient() { return dy; }
  static Status validate(const SelectiveScanBwd& a);
};

namespace reference {
Status run(const SelectiveScanFwd& a, const Exec& exec);
Status run(const SelectiveScanBwd& a, const Exec& exec);
}  // namespace reference

namespace cpu {
Status run(const SelectiveScanFwd& a, const Exec& exec);
Status run(const SelectiveScanBwd& a, const Exec& exec);
size_t workspace(const SelectiveScanFwd& a);
size_t workspace(const SelectiveScanBwd& a);
}  // namespace cpu

namespace cuda {
Status run(const SelectiveScanFwd& a, const Exec& exec);
Status run(const SelectiveScanBwd& a, const Exec& exec);
size_t workspace(const SelectiveScanFwd& a);
size_t workspace(const SelectiveScanBwd& a);
}  // namespace cuda

// The forward's kernel for Hopper takes few channels of 2-byte elements. It takes the workspace
// that the others take, since it depends on addresses too to which of them a call comes.
namespace cuda_sm90 {
bool accepts(const SelectiveScanFwd& a);
Status run(const SelectiveScanFwd& a, const Exec& exec);
}  // namespace cuda_sm90

}  // namespace fk
