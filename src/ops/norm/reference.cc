// rms_norm and layer_norm in double precision. The gradients come from writing the forward as
// y = xhat * w + b with xhat = (s - mean) * rstd: both statistics depend on s, which takes from the
// gradient of xhat its component along xhat (through rstd) and, in layer_norm, its mean (through
// mean).
#include <cmath>
#include <vector>

#include "core/access.h"
#include "core/rows.h"
#include "ops/norm/norm.h"

namespace fk {
namespace reference {
namespace {

// Returns entry i of the row that starts at `start`.
double at(const Tensor& t, int64_t start, int64_t i) { return load(t, start + i * t.stride(-1)); }

void put(const Tensor& t, int64_t start, int64_t i, double value) {
  store(t, start + i * t.stride(-1), value);
}

double silu(double z) { return z / (1 + std::exp(-z)); }

double silu_slope(double z) {
  const double sigmoid = 1 / (1 + std::exp(-z));
  return sigmoid * (1 + z * (1 - sigmoid));
}

double weight_at(const Tensor& weight, int64_t i) { return weight ? at(weight, 0, i) : 1; }

// Calls `each_row(r, s)` with s(i) the value that is normalised: x, or x + residual as it is
// stored. Writes `sum` on the way.
template <class Args, class EachRow>
void for_each_row(const Args& a, const EachRow& each_row) {
  const Rows x_rows = rows_of(a.x);
  const Rows residual_rows = a.residual ? rows_of(a.residual) : Rows();
  const Rows sum_rows = a.sum ? rows_of(a.sum) : Rows();
  for (int64_t r = 0; r < x_rows.count; ++r) {
    const int64_t x = x_rows.offset(r), residual = residual_rows.offset(r);
    const auto s = [&](int64_t i) {
      if (!a.residual) return at(a.x, x, i);
      return round_to(a.x.dtype, at(a.x, x, i) + at(a.residual, residual, i));
    };
    each_row(r, s);
    if (!a.sum) continue;
    for (int64_t i = 0; i < a.x.size(-1); ++i) put(a.sum, sum_rows.offset(r), i, s(i));
  }
}

}  // namespace

Status run(const RmsNormFwd& a, const Exec&) {
  const int64_t n = a.x.size(-1), group = a.group_size > 0 && n > 0 ? a.group_size : n;
  const Rows y_rows = a.y ? rows_of(a.y) : Rows();
  const Rows gate_rows = a.gate ? rows_of(a.gate) : Rows();
  const Rows rstd_rows = a.rstd ? rows_of(a.rstd, 0) : Rows();
  for_each_row(a, [&](int64_t r, const auto& s) {
    const auto gate = [&](int64_t i) { return silu(at(a.gate, gate_rows.offset(r), i)); };
    const auto v = [&](int64_t i) { return a.gate && !a.norm_before_gate ? s(i) * gate(i) : s(i); };
    int64_t begin = 0;
    do {
      double square = 0;
      for (int64_t i = begin; i < begin + group; ++i) square += v(i) * v(i);
      const double rstd = 1 / std::sqrt(square / group + a.eps);
      if (a.rstd && begin == 0) store(a.rstd, rstd_rows.offset(r), rstd);
      for (int64_t i = begin; a.y && i < begin + group; ++i) {
        const double w = a.weight ? weight_at(a.weight, i) + a.weight_offset : 1;
        const double after = a.gate && a.norm_before_gate ? gate(i) : 1;
        put(a.y, y_rows.offset(r), i, v(i) * rstd * w * after);
      }
      begin += group;
    } while (begin < n);
  });
  return {};
}

Status run(const LayerNormFwd& a, const Exec&) {
  const int64_t n = a.x.size(-1);
  const Rows y_rows = a.y ? rows_of(a.y) : Rows();
  const Rows mean_rows = a.mean ? rows_of(a.mean, 0) : Rows();
  const Rows rstd_rows = a.rstd ? rows_of(a.rstd, 0) : Rows();
  for_each_row(a, [&](int64_t r, const auto& s) {
    double total = 0, square = 0;
    for (int64_t i = 0; i < n; ++i) total += s(i);
    const double mean = total / n;
    for (int64_t i = 0; i < n; ++i) square += (s(i) - mean) * (s(i) - mean);
    const double rstd = 1 / std::sqrt(square / n + a.eps);
    if (a.mean) store(a.mean, mean_rows.offset(r), mean);
    if (a.rstd) store(a.rstd, rstd_rows.offset(r), rstd);
    if (!a.y) return;
    for (int64_t i = 0; i < n; ++i) {
      const double b = a.bias ? at(a.bias, 0, i) : 0;
      put(a.y, y_rows.offset(r), i, (s(i) - mean) * rstd * weight_at(a.weight, i) + b);
    }
  });
  return {};
}

Status run(const RmsNormBwd& a, const Exec&) {
  const int64_t n = a.x.size(-1), group = a.group_size > 0 && n > 0 ? a.group_size : n;
  const Rows dy_rows = rows_of(a.dy), x_rows = rows_of(a.x), rstd_rows = rows_of(a.rstd, 0);
  const Rows dsum_rows = a.dsum ? rows_of(a.dsum) : Rows();
  const Rows gate_rows = a.gate ? rows_of(a.gate) : Rows();
  const Rows dx_rows = a.dx ? rows_of(a.dx) : Rows();
  const Rows dgate_rows = a.dgate ? rows_of(a.dgate) : Rows();
  const bool gates_x = a.gate && !a.norm_before_gate, gates_y = a.gate && a.norm_before_gate;
  std::vector<double> dweight(n);
  for (int64_t r = 0; n > 0 && r < x_rows.count; ++r) {
    const auto x = [&](int64_t i) { return at(a.x, x_rows.offset(r), i); };
    const auto z = [&](int64_t i) { return at(a.gate, gate_rows.offset(r), i); };
    const auto v = [&](int64_t i) { return gates_x ? x(i) * silu(z(i)) : x(i); };
    const auto weight = [&](int64_t i) {
      return a.weight ? weight_at(a.weight, i) + a.weight_offset : 1;
    };
    // The gradient of what the norm gives, before the weight.
    const auto dnorm = [&](int64_t i) {
      return at(a.dy, dy_rows.offset(r), i) * (gates_y ? silu(z(i)) : 1);
    };
    for (int64_t begin = 0; begin < n; begin += group) {
      double square = 0;
      for (int64_t i = begin; i < begin + group; ++i) square += v(i) * v(i);
      const double rstd =
          is_gated(a) ? 1 / std::sqrt(square / group + a.eps) : load(a.rstd, rstd_rows.offset(r));
      double along = 0;
      for (int64_t i = begin; i < begin + group; ++i) along += dnorm(i) * weight(i) * v(i) * rstd;
      for (int64_t i = begin; i < begin + group; ++i) {
        const double xhat = v(i) * rstd;
        const double dv = (dnorm(i) * weight(i) - xhat * along / group) * rstd;
        const double dsum = a.dsum ? at(a.dsum, dsum_rows.offset(r), i) : 0;
        if (a.dx) put(a.dx, dx_rows.offset(r), i, dv * (gates_x ? silu(z(i)) : 1) + dsum);
        if (a.dgate) {
          const double outer =
              gates_x ? dv * x(i) : at(a.dy, dy_rows.offset(r), i) * xhat * weight(i);
          put(a.dgate, dgate_rows.offset(r), i, outer * silu_slope(z(i)));
        }
        dweight[i] += dnorm(i) * xhat;
      }
    }
  }
  for (int64_t i = 0; a.dweight && i < n; ++i) put(a.dweight, 0, i, dweight[i]);
  return {};
}

Status run(const LayerNormBwd& a, const Exec&) {
  const int64_t n = a.x.size(-1);
  const Rows dy_rows = rows_of(a.dy), x_rows = rows_of(a.x);
  const Rows mean_rows = rows_of(a.mean, 0), rstd_rows = rows_of(a.rstd, 0);
  const Rows dsum_rows = a.dsum ? rows_of(a.dsum) : Rows();
  const Rows dx_rows = a.dx ? rows_of(a.dx) : Rows();
  const auto dy = [&](int64_t r, int64_t i) { return at(a.dy, dy_rows.offset(r), i); };
  const auto xhat = [&](int64_t r, int64_t i) {
    const double mean = load(a.mean, mean_rows.offset(r)), rstd = load(a.rstd, rstd_rows.offset(r));
    return (at(a.x, x_rows.offset(r), i) - mean) * rstd;
  };
  for (int64_t r = 0; a.dx && r < x_rows.count; ++r) {
    const double rstd = load(a.rstd, rstd_rows.offset(r));
    double along = 0, total = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double dxhat = dy(r, i) * weight_at(a.weight, i);
      along += dxhat * xhat(r, i);
      total += dxhat;
    }
    for (int64_t i = 0; i < n; ++i) {
      const double dxhat = dy(r, i) * weight_at(a.weight, i);
      const double dsum = a.dsum ? at(a.dsum, dsum_rows.offset(r), i) : 0;
      put(a.dx, dx_rows.offset(r), i, (dxhat - (total + xhat(r, i) * along) / n) * rstd + dsum);
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    double dweight = 0, dbias = 0;
    for (int64_t r = 0; r < x_rows.count; ++r) {
      dweight += dy(r, i) * xhat(r, i);
      dbias += dy(r, i);
    }
    if (a.dweight) put(a.dweight, 0, i, dweight);
    if (a.dbias) put(a.dbias, 0, i, dbias);
  }
  return {};
}

}  // namespace reference
}  // namespace fk
