// This file computes selective_state_update in double precision.
#include <algorithm>
#include <cmath>

#include "core/access.h"
#include "ops/selective_state_update/heads.h"

namespace fk {
namespace reference {
namespace {

double get(const Tensor& t, int64_t offset) { return t ? load(t, offset) : 0; }

}  // namespace

Status run(const SelectiveStateUpdateFwd& a, const Exec&) {
  const state_update::Problem p = state_update::problem_of(a);
  for (int64_t i = 0; i < p.batch * p.heads * p.channels; ++i) {
    const int64_t c = i % p.channels, h = i / p.channels % p.heads, b = i / p.channels / p.heads;
    const int64_t group = p.group(h, c);
    const double x = get(a.x, p.x.offset(b, h, c));
    double dt = get(a.dt, p.dt.offset(b, h, c)) + get(a.dt_bias, p.dt_bias.offset(b, h, c));
    if (a.dt_softplus) dt = std::max(dt, 0.0) + std::log1p(std::exp(-std::fabs(dt)));
    double y = get(a.D, p.D.offset(b, h, c)) * x;
    for (int64_t n = 0; n < p.states; ++n) {
      const double A = get(a.A, p.A.offset(b, h, c) + n * p.A.state);
      const double B = get(a.B, b * p.B.batch + group * p.B.head + n * p.B.state);
      const double C = get(a.C, b * p.C.batch + group * p.C.head + n * p.C.state);
      const double before = get(a.state, p.state.offset(b, h, c) + n * p.state.state);
      const double after = std::exp(dt * A) * before + dt * B * x;
      y += C * after;
      const int64_t place = p.new_state.offset(b, h, c) + n * p.new_state.state;
      if (a.new_state) store(a.new_state, place, after);
    }
    if (a.z) {
      const double z = get(a.z, p.z.offset(b, h, c));
      y *= z / (1 + std::exp(-z));
    }
    if (a.y) store(a.y, p.y.offset(b, h, c), y);
  }
  return {};
}

}  // namespace reference
}  // namespace fk
