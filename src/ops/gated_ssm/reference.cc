// This file computes gated_ssm in double precision, token by token: y = x k with k = g s (1 + (1 -
// g) w_t).
#include <cmath>

#include "core/access.h"
#include "ops/gated_ssm/gated_ssm.h"
#include "ops/gated_ssm/weights.h"

namespace fk {
namespace reference {
namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

double at(const Tensor& t, int64_t b, int64_t l, int64_t i) {
  return load(t, b * t.stride(0) + l * t.stride(1) + i * t.stride(2));
}
void put(const Tensor& t, int64_t b, int64_t l, int64_t i, double value) {
  if (t) store(t, b * t.stride(0) + l * t.stride(1) + i * t.stride(2), value);
}

}  // namespace

Status run(const GatedSsmFwd& a, const Exec&) {
  const int64_t length = a.x.size(1), channels = a.x.size(2);
  for (int64_t b = 0; b < a.x.size(0); ++b) {
    for (int64_t l = 0; l < length; ++l) {
      double mean = 0, sum = 0;
      for (int64_t d = 0; d < channels; ++d) mean += at(a.dt, b, l, d) / channels;
      for (int64_t n = 0; n < a.B.size(2); ++n) sum += at(a.B, b, l, n) * at(a.C, b, l, n);
      const double g = sigmoid(mean), s = sigmoid(sum), w = gated_ssm::step_weight(l, length);
      for (int64_t d = 0; d < channels; ++d) {
        const double u = g * s * at(a.x, b, l, d);
        put(a.y, b, l, d, u + (1 - g) * u * w);
      }
      if (a.g) store(a.g, b * a.g.stride(0) + l * a.g.stride(1), g);
      if (a.s) store(a.s, b * a.s.stride(0) + l * a.s.stride(1), s);
    }
  }
  return {};
}

Status run(const GatedSsmBwd& a, const Exec&) {
  const int64_t length = a.x.size(1), channels = a.x.size(2);
  for (int64_t b = 0; b < a.x.size(0); ++b) {
    for (int64_t l = 0; l < length; ++l) {
      const double g = load(a.g, b * a.g.stride(0) + l * a.g.stride(1));
      const double s = load(a.s, b * a.s.stride(0) + l * a.s.stride(1));
      const double w = gated_ssm::step_weight(l, length);
      double dk = 0;  // of the factor that x is multiplied by
      for (int64_t d = 0; d < channels; ++d) dk += at(a.dy, b, l, d) * at(a.x, b, l, d);
      const double dg = dk * s * (1 + (1 - 2 * g) * w), ds = dk * g * (1 + (1 - g) * w);
      const double dmean = dg * g * (1 - g), dsum = ds * s * (1 - s);
      for (int64_t d = 0; d < channels; ++d) {
        put(a.dx, b, l, d, at(a.dy, b, l, d) * g * s * (1 + (1 - g) * w));
        put(a.ddt, b, l, d, dmean / channels);
      }
      for (int64_t n = 0; n < a.B.size(2); ++n) {
        put(a.dB, b, l, n, dsum * at(a.C, b, l, n));
        put(a.dC, b, l, n, dsum * at(a.B, b, l, n));
      }
    }
  }
  return {};
}

}  // namespace reference
}  // namespace fk
