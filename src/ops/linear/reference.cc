// linear and gated_linear, as they are defined.
#include <algorithm>
#include <vector>

#include "core/access.h"
#include "core/rows.h"
#include "ops/linear/gated_linear.h"
#include "ops/linear/linear.h"
#include "ops/linear/scaled_linear.h"

namespace fk {
namespace reference {

namespace {

// A number with its derivative; what an activation makes of it.
struct Point {
  double value, slope;
};

double logistic(double x) { return 1 / (1 + std::exp(-x)); }

Point activated(Activation activation, double x) {
  constexpr double kPi = 3.14159265358979323846;
  switch (activation) {
    case Activation::kGeluTanh: {
      const double c = std::sqrt(2 / kPi);
      const double t = std::tanh(c * (x + 0.044715 * x * x * x));
      const double inner = c * (1 + 3 * 0.044715 * x * x);
      return {0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner};
    }
    case Activation::kGelu: {
      const double part = 0.5 * (1 + std::erf(x / std::sqrt(2.0)));
      return {x * part, part + x * std::exp(-0.5 * x * x) / std::sqrt(2 * kPi)};
    }
    case Activation::kSilu: {
      const double s = logistic(x);
      return {x * s, s * (1 + x * (1 - s))};
    }
    case Activation::kRelu:
      return {x < 0 ? 0 : x, x > 0 ? 1.0 : 0.0};
    case Activation::kRelu2:
      return {x < 0 ? 0 : x * x, x > 0 ? 2 * x : 0.0};
    case Activation::kTanh: {
      const double t = std::tanh(x);
      return {t, 1 - t * t};
    }
    case Activation::kSigmoid: {
      const double s = logistic(x);
      return {s, s * (1 - s)};
    }
    case Activation::kNone:
      break;
  }
  return {x, 1};
}

// The element at a row and column of a tensor whose rows `rows` are.
double at(const Tensor& t, const Rows& rows, int64_t row, int64_t column) {
  return load(t, rows.offset(row) + column * t.stride(-1));
}

double weight_at(const Tensor& weight, int64_t n, int64_t k) {
  return load(weight, n * weight.stride(0) + k * weight.stride(1));
}

}  // namespace

Status run(const LinearFwd& a, const Exec&) {
  const auto activation = static_cast<Activation>(a.activation);
  const Rows x = rows_of(a.x), residual = rows_of(a.residual), y = rows_of(a.y);
  const Rows before = rows_of(a.before);
  const int64_t columns = a.weight.size(0);
  std::vector<double> row(static_cast<size_t>(columns));
  for (int64_t m = 0; m < x.count; ++m) {
    for (int64_t n = 0; n < columns; ++n) {
      double sum = a.bias ? load(a.bias, n * a.bias.stride(0)) : 0;
      for (int64_t k = 0; k < a.weight.size(1); ++k) {
        sum += at(a.x, x, m, k) * weight_at(a.weight, n, k);
      }
      if (a.before) store(a.before, before.offset(m) + n * a.before.stride(-1), sum);
      double out = activated(activation, sum).value;
      if (a.residual) out += at(a.residual, residual, m, n);
      if (a.y) store(a.y, y.offset(m) + n * a.y.stride(-1), out);
      row[static_cast<size_t>(n)] = round_to(a.x.dtype, out);
    }
    write_norm(a, m, row.data(), columns);
  }
  return {};
}

Status run(const LinearBwd& a, const Exec&) {
  const auto activation = static_cast<Activation>(a.activation);
  const Rows x = rows_of(a.x), before = rows_of(a.before);
  const int64_t rows = x.count, columns = a.weight.size(0), depth = a.weight.size(1);
  const StageGradient dy(a, a.dy);
  // The gradient of what the activation is given.
  const auto inner = [&](int64_t m, int64_t n) {
    const double g = dy.at(m, n);
    if (activation == Activation::kNone) return g;
    return g * activated(activation, at(a.before, before, m, n)).slope;
  };
  if (a.dx) {
    const Rows dx = rows_of(a.dx);
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t k = 0; k < depth; ++k) {
        double sum = 0;
        for (int64_t n = 0; n < columns; ++n) sum += inner(m, n) * weight_at(a.weight, n, k);
        store(a.dx, dx.offset(m) + k * a.dx.stride(-1), sum);
      }
    }
  }
  if (a.dweight) {
    for (int64_t n = 0; n < columns; ++n) {
      for (int64_t k = 0; k < depth; ++k) {
        double sum = 0;
        for (int64_t m = 0; m < rows; ++m) sum += inner(m, n) * at(a.x, x, m, k);
        store(a.dweight, n * a.dweight.stride(0) + k * a.dweight.stride(1), sum);
      }
    }
  }
  if (a.dbias) {
    for (int64_t n = 0; n < columns; ++n) {
      double sum = 0;
      for (int64_t m = 0; m < rows; ++m) sum += inner(m, n);
      store(a.dbias, n * a.dbias.stride(0), sum);
    }
  }
  return {};
}

namespace {

// The product of row m of x and row n of a weight.
double product_at(const Tensor& x, const Rows& rows, const Tensor& weight, int64_t m, int64_t n) {
  double sum = 0;
  for (int64_t k = 0; k < weight.size(1); ++k) sum += at(x, rows, m, k) * weight_at(weight, n, k);
  return sum;
}

}  // namespace

Status run(const GatedLinearFwd& a, const Exec&) {
  const auto activation = static_cast<Activation>(a.activation);
  const GatedWeights weights(a.w_gate, a.w_up, !a.w_up);
  const Rows x = rows_of(a.x), y = rows_of(a.y), kept_gate = rows_of(a.gate);
  const Rows kept_up = rows_of(a.up);
  for (int64_t m = 0; m < x.count; ++m) {
    for (int64_t n = 0; n < weights.gate.size(0); ++n) {
      const double gate = product_at(a.x, x, weights.gate, m, n);
      const double up = product_at(a.x, x, weights.up, m, n);
      if (a.gate) store(a.gate, kept_gate.offset(m) + n * a.gate.stride(-1), gate);
      if (a.up) store(a.up, kept_up.offset(m) + n * a.up.stride(-1), up);
      if (!a.y) continue;
      store(a.y, y.offset(m) + n * a.y.stride(-1), activated(activation, gate).value * up);
    }
  }
  return {};
}

Status run(const GatedLinearBwd& a, const Exec&) {
  const auto activation = static_cast<Activation>(a.activation);
  const GatedWeights weights(a.w_gate, a.w_up, !a.w_up);
  const Rows x = rows_of(a.x), dy = rows_of(a.dy), kept_gate = rows_of(a.gate);
  const Rows kept_up = rows_of(a.up);
  const int64_t rows = x.count, columns = weights.gate.size(0), depth = a.w_gate.size(1);
  // The gradients of gate and up at a place.
  struct Gradients {
    double gate, up;
  };
  const auto inner = [&](int64_t m, int64_t n) -> Gradients {
    const double g = at(a.dy, dy, m, n);
    const double gate =
        a.gate ? at(a.gate, kept_gate, m, n) : product_at(a.x, x, weights.gate, m, n);
    const double up = a.up ? at(a.up, kept_up, m, n) : product_at(a.x, x, weights.up, m, n);
    const Point point = activated(activation, gate);
    return {g * up * point.slope, g * point.value};
  };
  if (a.dx) {
    const Rows dx = rows_of(a.dx);
    std::vector<double> sums(depth);
    for (int64_t m = 0; m < rows; ++m) {
      std::fill(sums.begin(), sums.end(), 0.0);
      for (int64_t n = 0; n < columns; ++n) {
        const Gradients g = inner(m, n);
        for (int64_t k = 0; k < depth; ++k) {
          sums[k] += g.gate * weight_at(weights.gate, n, k) + g.up * weight_at(weights.up, n, k);
        }
      }
      for (int64_t k = 0; k < depth; ++k) {
        store(a.dx, dx.offset(m) + k * a.dx.stride(-1), sums[k]);
      }
    }
  }
  if (!a.dw_gate && !a.dw_up) return {};
  // Where the weights are one matrix, so are their gradients.
  const GatedWeights gradients(a.dw_gate, a.dw_up, !a.w_up);
  std::vector<double> to_gate(depth), to_up(depth);
  for (int64_t n = 0; n < columns; ++n) {
    std::fill(to_gate.begin(), to_gate.end(), 0.0);
    std::fill(to_up.begin(), to_up.end(), 0.0);
    for (int64_t m = 0; m < rows; ++m) {
      const Gradients g = inner(m, n);
      for (int64_t k = 0; k < depth; ++k) {
        to_gate[k] += g.gate * at(a.x, x, m, k);
        to_up[k] += g.up * at(a.x, x, m, k);
      }
    }
    const auto put = [&](const Tensor& to, const std::vector<double>& from) {
      for (int64_t k = 0; to && k < depth; ++k) {
        store(to, n * to.stride(0) + k * to.stride(1), from[k]);
      }
    };
    put(gradients.gate, to_gate);
    put(gradients.up, to_up);
  }
  return {};
}

Status run(const ScaledLinearFwd& a, const Exec&) {
  if (!a.y) return {};
  const auto activation = static_cast<Activation>(a.activation);
  const Rows x = rows_of(a.x), residual = rows_of(a.residual), y = rows_of(a.y);
  const Scales x_scale = x_scales(a), weight_scale = weight_scales(a);
  for (int64_t m = 0; m < x.count; ++m) {
    for (int64_t n = 0; n < a.weight.size(0); ++n) {
      double sum = a.bias ? load(a.bias, n * a.bias.stride(0)) : 0;
      for (int64_t k = 0; k < a.weight.size(1); ++k) {
        const double left = at(a.x, x, m, k) * x_scale.at(m, k);
        sum += left * (weight_at(a.weight, n, k) * weight_scale.at(n, k));
      }
      double value = activated(activation, sum).value;
      if (a.residual) value += at(a.residual, residual, m, n);
      store(a.y, y.offset(m) + n * a.y.stride(-1), value);
    }
  }
  return {};
}

}  // namespace reference
}  // namespace fk
