// rope is the rotary position embedding. Pair k of a head is (x[k], x[k + R]) or, interleaved,
// (x[2k], x[2k+1]); it is turned by the angle whose cosine and sine stand in the tables at the
// token's position. With 2R < D the last D - 2R entries pass through.
#pragma once

#include "core/op.h"

namespace fk {

struct RopeFwd {
  static constexpr const char* kName = "rope_fwd";
  static constexpr const char* kDoc =
      "Rotates the first 2R entries of each head by the tables' angle at the token's position.";
  Tensor x, cos, sin, positions, y;
  bool interleaved = false;

  static void declare(Declaration<RopeFwd>& d) {
    d.batch({"B"});
    d.independent({"H"});
    d.input("x", &RopeFwd::x, "T[B, L, H, D]", "queries or keys");
    d.input("cos", &RopeFwd::cos, "P[M, R]", "cosines by position; 2R <= D");
    d.input("sin", &RopeFwd::sin, "P[M, R]", "sines by position");
    d.keyword_only();
    d.input("positions", &RopeFwd::positions, "I[L | B, L]",
            "row of the tables for each token; "
            "None: 0 to L-1")
        .optional()
        .own_form()
        .below("M");
    d.attribute("interleaved", &RopeFwd::interleaved, false, "pairs are neighbours, not halves");
    d.output("y", &RopeFwd::y, "T[B, L, H, D]", "rotated x").may_alias("x");
  }

  static Status validate(const RopeFwd& a);
};

struct RopeBwd {
  static constexpr const char* kName = "rope_bwd";
  static constexpr const char* kDoc = "Gradient of rope: the rotation the other way round.";
  Tensor dy, cos, sin, positions, dx;
  bool interleaved = false;

  static void declare(Declaration<RopeBwd>& d) {
    d.batch({"B"});
    d.independent({"H"});
    d.input("dy", &RopeBwd::dy, "T[B, L, H, D]", "gradient of y");
    d.input("cos", &RopeBwd::cos, "P[M, R]", "as in the forward");
    d.input("sin", &RopeBwd::sin, "P[M, R]", "as in the forward");
    d.input("positions", &RopeBwd::positions, "I[L | B, L]", "as in the forward")
        .optional()
        .own_form()
        .below("M");
    d.attribute("interleaved", &RopeBwd::interleaved, false, "as in the forward");
    d.output("dx", &RopeBwd::dx, "T[B, L, H, D]", "gradient of x");
  }

  static Status validate(const RopeBwd& a);
};

namespace reference {
Status run(const RopeFwd& a, const Exec& exec);
Status run(const RopeBwd& a, const Exec& exec);
}  // namespace reference

namespace cpu {
Status run(const RopeFwd& a, const Exec& exec);
Status run(const RopeBwd& a, const Exec& exec);
}  // namespace cpu

namespace cuda {
Status run(const RopeFwd& a, const Exec& exec);
Status run(const RopeBwd& a, const Exec& exec);
}  // namespace cuda

}  // namespace fk
