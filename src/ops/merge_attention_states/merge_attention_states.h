// merge_attention_states makes one attention of attentions of the same queries over disjoint sets
// of keys.
//
//   lse = log(sum_s exp(lse_s)),   out = sum_s w_s out_s,   w_s = exp(lse_s - lse).
//
// A part with lse_s = -inf saw no key: its weight is 0 whatever its output holds. If no part saw
// one, the result is 0 with lse = -inf, and so are (as 0) all gradients:
//
//   dout_s = w_s dout,   dlse_s = w_s (dout . out_s - dout . out + dlse).
#pragma once

#include "core/op.h"

namespace fk {

struct MergeAttentionStatesFwd {
  static constexpr const char* kName = "merge_attention_states_fwd";
  static constexpr const char* kDoc =
      "Combines attentions of the same queries over disjoint keys into the attention over all of "
      "them, from each part's output and lse. Outputs stand in a batch (B, L, H, E) or packed "
      "(N, H, E), as attention gives them.";
  Tensor outs, lses, out, lse;

  static void declare(Declaration<MergeAttentionStatesFwd>& d) {
    using Args = MergeAttentionStatesFwd;
    d.batch({"B", "N"});
    d.independent({"L", "H"});
    d.input("outs", &Args::outs, "T[S, B, L, H, E | S, N, H, E]", "the output of each part")
        .stacked();
    d.input("lses", &Args::lses, "F[S, B, H, L | S, H, N]",
            "of each part, the log of the softmax's denominator; -inf where it saw no key")
        .stacked();
    d.output("out", &Args::out, "T[B, L, H, E | N, H, E]", "the output over all keys");
    d.output("lse", &Args::lse, "F[B, H, L | H, N]", "log of the softmax's denominator over them");
  }
};

struct MergeAttentionStatesBwd {
  static constexpr const char* kName = "merge_attention_states_bwd";
  static constexpr const char* kDoc = "Gradients of merge_attention_states.";
  Tensor dout, dlse, outs, lses, douts, dlses;

  static void declare(Declaration<MergeAttentionStatesBwd>& d) {
    using Args = MergeAttentionStatesBwd;
    d.batch({"B", "N"});
    d.independent({"L", "H"});
    d.input("dout", &Args::dout, "T[B, L, H, E | N, H, E]", "gradient of out");
    d.input("dlse", &Args::dlse, "F[B, H, L | H, N]", "gradient of lse").optional();
    d.input("outs", &Args::outs, "T[S, B, L, H, E | S, N, H, E]", "as in the forward");
    d.input("lses", &Args::lses, "F[S, B, H, L | S, H, N]", "as in the forward");
    d.output("douts", &Args::douts, "@outs", "gradient of outs");
    d.output("dlses", &Args::dlses, "@lses", "gradient of lses");
  }
};

namespace reference {
Status run(const MergeAttentionStatesFwd& a, const Exec& exec);
Status run(const MergeAttentionStatesBwd& a, const Exec& exec);
}  // namespace reference

namespace cpu {
Status run(const MergeAttentionStatesFwd& a, const Exec& exec);
Status run(const MergeAttentionStatesBwd& a, const Exec& exec);
}  // namespace cpu

namespace cuda {
Status run(const MergeAttentionStatesFwd& a, const Exec& exec);
Status run(const MergeAttentionStatesBwd& a, const Exec& exec);
}  // namespace cuda

}  // namespace fk
