// Attention computes softmax(q k^T) v, tile by tile, with what the models of the field put around
// it. The score of query i and key j is
//
//   s = softcap(scale * q_i . k_j) + bias_ij - slope * |p - j|,   softcap(x) = c tanh(x / c),
//
// where p = i + Lk - Lq is where the query sits among the keys. The query sees key j if
// p - left <= j <= p + right (causal: right = 0 at most). The softmax runs over the keys it sees
// and, if there are sinks, one more logit whose value is nothing. lse is the logarithm of its
// denominator. A query that sees no key gives 0, with lse = -inf.
//
// 8-bit q, k and v stand for q_scale * q, k_scale * k and v_scale * v, with a scale for each head.
#pragma once

#include "core/op.h"

namespace fk {

struct AttentionFwd {
  static constexpr const char* kName = "attention_fwd";
  static constexpr const char* kDoc =
      "Attention of each query over the keys it sees: out = softmax(scale * q k^T + ...) v. "
      "Sequences stand in a batch (B, L, heads, D) or, with cu_seqlens, packed one after another "
      "(T, heads, D). Every H / G query heads share a key head. Causal and window are aligned to "
      "the bottom right: query i sits at key i + Lk - Lq.";
  Tensor q, k, v, alibi_slopes, sinks, bias, cu_seqlens_q, cu_seqlens_k, rotary_cos, rotary_sin;
  Tensor q_scale, k_scale, v_scale;
  Tensor out, lse;
  int64_t window_left = -1, window_right = -1;
  double scale = 0, softcap = 0;
  bool causal = false, return_lse = false, deterministic = false, rotary_interleaved = false;

  static void declare(Declaration<AttentionFwd>& d) {
    d.multiplies();
    d.takes_float8();
    d.batch({"B"});
    d.input("q", &AttentionFwd::q, "T[B, Lq, H, D | Tq, H, D]", "queries");
    d.input("k", &AttentionFwd::k, "T[B, Lk, G, D | Tk, G, D]", "keys; H is a multiple of G");
    d.input("v", &AttentionFwd::v, "T[B, Lk, G, E | Tk, G, E]", "values");
    d.keyword_only();
    d.attribute("causal", &AttentionFwd::causal, false, "a query sees no key after itself");
    d.attribute("window_left", &AttentionFwd::window_left, -1,
                "how many keys before itself a query sees; -1: all")
        .at_least(-1);
    d.attribute("window_right", &AttentionFwd::window_right, -1,
                "how many keys after itself a query sees; -1: all")
        .at_least(-1);
    d.group("window", {"window_left", "window_right"});
    d.attribute("scale", &AttentionFwd::scale, kLeftOut, "of the scores; None: 1 / sqrt(D)");
    d.attribute("softcap", &AttentionFwd::softcap, 0.0,
                "scores are squeezed into (-softcap, softcap) by a tanh; 0: they are not")
        .at_least(0);
    d.input("alibi_slopes", &AttentionFwd::alibi_slopes, "P[H | B, H]",
            "-slope * distance is added to the scores")
        .optional()
        .own_form();
    d.input("sinks", &AttentionFwd::sinks, "P[H]", "one more logit in the softmax of each head")
        .optional();
    d.input("bias", &AttentionFwd::bias, "P[B?, H?, Lq?, Lk? | H?, Lq?, Lk? | Lq?, Lk? | Lk?]",
            "added to the scores")
        .optional()
        .own_form();
    d.input("cu_seqlens_q", &AttentionFwd::cu_seqlens_q, "J[S+1]",
            "where each sequence begins among the Tq packed queries, and Tq")
        .optional()
        .rises_to("Tq");
    d.input("cu_seqlens_k", &AttentionFwd::cu_seqlens_k, "J[S+1]",
            "where each sequence begins among the Tk packed keys, and Tk")
        .optional()
        .rises_to("Tk");
    d.attribute("return_lse", &AttentionFwd::return_lse, false, "return lse too");
    d.attribute("deterministic", &AttentionFwd::deterministic, false,
                "the backward gives the same bits every time");
    d.input("rotary_cos", &AttentionFwd::rotary_cos, "P[M, R]",
            "cosines by position: q and k are rotated first, key j by position j, query i by "
            "i + Lk - Lq; 2R <= D")
        .optional();
    d.input("rotary_sin", &AttentionFwd::rotary_sin, "P[M, R]", "sines by position").optional();
    d.group("rotary", {"rotary_cos", "rotary_sin"});
    d.attribute("rotary_interleaved", &AttentionFwd::rotary_interleaved, false,
                "rotated pairs are neighbours, not halves");
    d.input("q_scale", &AttentionFwd::q_scale, "F[H | B, H]",
            "what 8-bit queries are multiplied by; None: 1")
        .optional()
        .own_form()
        .with_float8();
    d.input("k_scale", &AttentionFwd::k_scale, "F[G | B, G]", "the same for keys")
        .optional()
        .own_form()
        .with_float8();
    d.input("v_scale", &AttentionFwd::v_scale, "F[G | B, G]", "the same for values")
        .optional()
        .own_form()
        .with_float8();
    d.output("out", &AttentionFwd::out, "T[B, Lq, H, E | Tq, H, E]", "the weighted values");
    d.output("lse", &AttentionFwd::lse, "F[B, H, Lq | H, Tq]", "log of the softmax's denominator")
        .saved_unless("return_lse");
  }

  static Status validate(const AttentionFwd& a);
};

struct AttentionBwd {
  static constexpr const char* kName = "attention_bwd";
  static constexpr const char* kDoc = "Gradients of attention.";
  Tensor dout, dlse, q, k, v, out, lse;
  Tensor alibi_slopes, sinks, bias, cu_seqlens_q, cu_seqlens_k, rotary_cos, rotary_sin;
  Tensor dq, dk, dv, dsinks, dbias;
  int64_t window_left = -1, window_right = -1;
  double scale = 0, softcap = 0;
  bool causal = false, deterministic = false, rotary_interleaved = false;

  static void declare(Declaration<AttentionBwd>& d) {
    d.multiplies();
    d.batch({"B"});
    d.input("dout", &AttentionBwd::dout, "T[B, Lq, H, E | Tq, H, E]", "gradient of out");
    d.input("dlse", &AttentionBwd::dlse, "F[B, H, Lq | H, Tq]", "gradient of lse").optional();
    d.input("q", &AttentionBwd::q, "T[B, Lq, H, D | Tq, H, D]", "as in the forward");
    d.input("k", &AttentionBwd::k, "T[B, Lk, G, D | Tk, G, D]", "as in the forward");
    d.input("v", &AttentionBwd::v, "T[B, Lk, G, E | Tk, G, E]", "as in the forward");
    d.input("out", &AttentionBwd::out, "T[B, Lq, H, E | Tq, H, E]", "from the forward");
    d.input("lse", &AttentionBwd::lse, "F[B, H, Lq | H, Tq]", "from the forward");
    d.attribute("causal", &AttentionBwd::causal, false, "as in the forward");
    d.attribute("window_left", &AttentionBwd::window_left, -1, "as in the forward").at_least(-1);
    d.attribute("window_right", &AttentionBwd::window_right, -1, "as in the forward").at_least(-1);
    d.attribute("scale", &AttentionBwd::scale, kLeftOut, "as in the forward");
    d.attribute("softcap", &AttentionBwd::softcap, 0.0, "as in the forward").at_least(0);
    d.input("alibi_slopes", &AttentionBwd::alibi_slopes, "P[H | B, H]", "as in the forward")
        .optional()
        .own_form();
    d.input("sinks", &AttentionBwd::sinks, "P[H]", "as in the forward").optional();
    d.input("bias", &AttentionBwd::bias, "P[B?, H?, Lq?, Lk? | H?, Lq?, Lk? | Lq?, Lk? | Lk?]",
            "as in the forward")
        .optional()
        .own_form();
    d.input("cu_seqlens_q", &AttentionBwd::cu_seqlens_q, "J[S+1]", "as in the forward")
        .optional()
        .rises_to("Tq");
    d.input("cu_seqlens_k", &AttentionBwd::cu_seqlens_k, "J[S+1]", "as in the forward")
        .optional()
        .rises_to("Tk");
    d.attribute("deterministic", &AttentionBwd::deterministic, false, "the same bits every time");
    d.input("rotary_cos", &AttentionBwd::rotary_cos, "P[M, R]", "as in the forward").optional();
    d.input("rotary_sin", &AttentionBwd::rotary_sin, "P[M, R]", "as in the forward").optional();
    d.attribute("rotary_interleaved", &AttentionBwd::rotary_interleaved, false,
                "as in the forward");
    d.output("dq", &AttentionBwd::dq, "T[B, Lq, H, D | Tq, H, D]", "gradient of q");
    d.output("dk", &AttentionBwd::dk, "T[B, Lk, G, D | Tk, G, D]", "gradient of k");
    d.output("dv", &AttentionBwd::dv, "T[B, Lk, G, E | Tk, G, E]", "gradient of v");
    d.output("dsinks", &AttentionBwd::dsinks, "@sinks[H]", "gradient of sinks").when("sinks");
    d.output("dbias", &AttentionBwd::dbias, "@bias", "gradient of bias").when("bias");
  }

  static Status validate(const AttentionBwd& a);
};

namespace reference {
Status run(const AttentionFwd& a, const Exec& exec);
Status run(const AttentionBwd& a, const Exec& exec);
}  // namespace reference

namespace cpu {
Status run(const AttentionFwd& a, const Exec& exec);
Status run(const AttentionBwd& a, const Exec& exec);
size_t workspace(const AttentionFwd& a);
size_t workspace(const AttentionBwd& a);
}  // namespace cpu

// These run on any GPU from Turing on.
namespace cuda {
Status run(const AttentionFwd& a, const Exec& exec);
Status run(const AttentionBwd& a, const Exec& exec);
size_t workspace(const AttentionFwd& a);
size_t workspace(const AttentionBwd& a);
}  // namespace cuda

// These are the kernels for Hopper. Elements of 16 bits share one; float32 and 8-bit floats have
// their own. `takes` says whether a kernel takes a call, as far as that can be said before the
// addresses of its tensors are known; `aligned` says the rest.
namespace cuda_sm90 {
bool takes(const AttentionFwd& a);
bool takes(const AttentionBwd& a);
bool aligned(const AttentionFwd& a);
bool aligned(const AttentionBwd& a);
Status run(const AttentionFwd& a, const Exec& exec);
Status run(const AttentionBwd& a, const Exec& exec);
size_t workspace(const AttentionFwd& a);
size_t workspace(const AttentionBwd& a);
bool accepts_float32(const AttentionFwd& a);
Status run_float32(const AttentionFwd& a, const Exec& exec);
bool takes_float8(const AttentionFwd& a);
Status run_float8(const AttentionFwd& a, const Exec& exec);
size_t float8_workspace(const AttentionFwd& a);
}  // namespace cuda_sm90

}  // namespace fk
