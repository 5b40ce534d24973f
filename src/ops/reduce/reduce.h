// This file declares sum and max along one axis or over everything.
#pragma once

#include "core/op.h"
#include "core/rows.h"

namespace fk {

struct SumFwd {
  static constexpr const char* kName = "sum_fwd";
  static constexpr const char* kDoc =
      "Sum along an axis, or of everything (axis=None), accumulated in float32.";
  Tensor x, y;
  int64_t axis = -1;

  static void declare(Declaration<SumFwd>& d) {
    d.autocast(Autocast::kFloat32OnGpu);
    d.batch({"..."});
    d.reduced({"N"});
    d.input("x", &SumFwd::x, "T[..., N]", "what to add up");
    d.axis("axis", &SumFwd::axis, -1, true, {"x"}, "the axis to reduce; None: all of them");
    d.output("y", &SumFwd::y, "T[...]", "the sums");
  }
};

struct SumBwd {
  static constexpr const char* kName = "sum_bwd";
  static constexpr const char* kDoc = "Gradient of sum: dy repeated along the axis.";
  Tensor dy, dx;
  int64_t axis = -1, n = 0;

  static void declare(Declaration<SumBwd>& d) {
    d.batch({"..."});
    d.independent({"N"});
    d.input("dy", &SumBwd::dy, "T[...]", "gradient of y");
    d.attribute("N", &SumBwd::n, 0, "size of the reduced axis").at_least(0);
    d.axis("axis", &SumBwd::axis, -1, true, {"dx"}, "as in the forward");
    d.output("dx", &SumBwd::dx, "T[..., N]", "gradient of x").repeats("dy");
  }
};

struct MaxFwd {
  static constexpr const char* kName = "max_fwd";
  static constexpr const char* kDoc =
      "Largest entry along an axis, or of everything (axis=None). NaN wins over any number.";
  Tensor x, y;
  int64_t axis = -1;

  static void declare(Declaration<MaxFwd>& d) {
    d.batch({"..."});
    d.input("x", &MaxFwd::x, "T[..., N]", "where to look");
    d.axis("axis", &MaxFwd::axis, -1, true, {"x"}, "the axis to reduce; None: all of them");
    d.output("y", &MaxFwd::y, "T[...]", "the largest entries");
  }

  static Status validate(const MaxFwd& a) {
    if (a.x.size(-1) == 0 && rows_of(a.x).count > 0) {
      return invalid("x: expected at least 1 entry along the reduced axis, got 0");
    }
    return {};
  }
};

struct MaxBwd {
  static constexpr const char* kName = "max_bwd";
  static constexpr const char* kDoc =
      "Gradient of max: dy shared evenly by the entries that equal the largest one.";
  Tensor dy, x, y, dx;
  int64_t axis = -1;

  static void declare(Declaration<MaxBwd>& d) {
    d.batch({"..."});
    d.input("dy", &MaxBwd::dy, "T[...]", "gradient of y");
    d.input("x", &MaxBwd::x, "T[..., N]", "as in the forward");
    d.input("y", &MaxBwd::y, "T[...]", "from the forward");
    d.axis("axis", &MaxBwd::axis, -1, true, {"x", "dx"}, "as in the forward");
    d.output("dx", &MaxBwd::dx, "T[..., N]", "gradient of x");
  }
};

namespace reference {
Status run(const SumFwd& a, const Exec& exec);
Status run(const SumBwd& a, const Exec& exec);
Status run(const MaxFwd& a, const Exec& exec);
Status run(const MaxBwd& a, const Exec& exec);
}  // namespace reference

namespace cpu {
Status run(const SumFwd& a, const Exec& exec);
Status run(const SumBwd& a, const Exec& exec);
Status run(const MaxFwd& a, const Exec& exec);
Status run(const MaxBwd& a, const Exec& exec);
size_t workspace(const SumFwd& a);
size_t workspace(const MaxFwd& a);
}  // namespace cpu

namespace cuda {
Status run(const SumFwd& a, const Exec& exec);
Status run(const SumBwd& a, const Exec& exec);
Status run(const MaxFwd& a, const Exec& exec);
Status run(const MaxBwd& a, const Exec& exec);
size_t workspace(const SumFwd& a);
size_t workspace(const MaxFwd& a);
size_t workspace(const MaxBwd& a);
}  // namespace cuda

}  // namespace fk
