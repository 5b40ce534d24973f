// This file computes softmax, log_softmax and logsumexp as one would write them on a blackboard, in
// double precision.
#include <cmath>
#include <limits>

#include "core/access.h"
#include "core/rows.h"
#include "ops/softmax/softmax.h"

namespace fk {
namespace reference {
namespace {

struct Row {
  double max;  // -inf for an empty row; NaN if the row holds one
  double sum;  // of exp(x - max)
};

Row statistics(const Tensor& x, int64_t start) {
  const int64_t n = x.size(-1);
  Row row{-std::numeric_limits<double>::infinity(), 0};
  for (int64_t i = 0; i < n; ++i) {
    const double v = load(x, start + i * x.stride(-1));
    if (v > row.max || std::isnan(v)) row.max = v;
  }
  for (int64_t i = 0; i < n; ++i) row.sum += std::exp(load(x, start + i * x.stride(-1)) - row.max);
  return row;
}

}  // namespace

Status run(const SoftmaxFwd& a, const Exec&) {
  if (!a.y) return {};
  const Rows x_rows = rows_of(a.x), y_rows = rows_of(a.y);
  for (int64_t r = 0; r < x_rows.count; ++r) {
    const int64_t x = x_rows.offset(r), y = y_rows.offset(r);
    const Row row = statistics(a.x, x);
    for (int64_t i = 0; i < a.x.size(-1); ++i) {
      const double v = load(a.x, x + i * a.x.stride(-1));
      store(a.y, y + i * a.y.stride(-1), std::exp(v - row.max) / row.sum);
    }
  }
  return {};
}

Status run(const SoftmaxBwd& a, const Exec&) {
  if (!a.dx) return {};
  const Rows dy_rows = rows_of(a.dy), y_rows = rows_of(a.y), dx_rows = rows_of(a.dx);
  for (int64_t r = 0; r < y_rows.count; ++r) {
    const int64_t dy = dy_rows.offset(r), y = y_rows.offset(r), dx = dx_rows.offset(r);
    double dot = 0;
    for (int64_t i = 0; i < a.y.size(-1); ++i) {
      dot += load(a.dy, dy + i * a.dy.stride(-1)) * load(a.y, y + i * a.y.stride(-1));
    }
    for (int64_t i = 0; i < a.y.size(-1); ++i) {
      const double g = load(a.dy, dy + i * a.dy.stride(-1));
      store(a.dx, dx + i * a.dx.stride(-1), load(a.y, y + i * a.y.stride(-1)) * (g - dot));
    }
  }
  return {};
}

Status run(const LogSoftmaxFwd& a, const Exec&) {
  if (!a.y) return {};
  const Rows x_rows = rows_of(a.x), y_rows = rows_of(a.y);
  for (int64_t r = 0; r < x_rows.count; ++r) {
    const int64_t x = x_rows.offset(r), y = y_rows.offset(r);
    const Row row = statistics(a.x, x);
    for (int64_t i = 0; i < a.x.size(-1); ++i) {
      const double v = load(a.x, x + i * a.x.stride(-1));
      store(a.y, y + i * a.y.stride(-1), v - row.max - std::log(row.sum));
    }
  }
  return {};
}

Status run(const LogSoftmaxBwd& a, const Exec&) {
  if (!a.dx) return {};
  const Rows dy_rows = rows_of(a.dy), y_rows = rows_of(a.y), dx_rows = rows_of(a.dx);
  for (int64_t r = 0; r < y_rows.count; ++r) {
    const int64_t dy = dy_rows.offset(r), y = y_rows.offset(r), dx = dx_rows.offset(r);
    double sum = 0;
    for (int64_t i = 0; i < a.y.size(-1); ++i) sum += load(a.dy, dy + i * a.dy.stride(-1));
    for (int64_t i = 0; i < a.y.size(-1); ++i) {
      const double p = std::exp(load(a.y, y + i * a.y.stride(-1)));
      store(a.dx, dx + i * a.dx.stride(-1), load(a.dy, dy + i * a.dy.stride(-1)) - p * sum);
    }
  }
  return {};
}

Status run(const LogSumExpFwd& a, const Exec&) {
  if (!a.lse) return {};
  const Rows x_rows = rows_of(a.x), lse_rows = rows_of(a.lse, 0);
  for (int64_t r = 0; r < x_rows.count; ++r) {
    const Row row = statistics(a.x, x_rows.offset(r));
    // exp(inf - inf) is NaN, but the limit is clear.
    store(a.lse, lse_rows.offset(r), std::isinf(row.max) ? row.max : row.max + std::log(row.sum));
  }
  return {};
}

Status run(const LogSumExpBwd& a, const Exec&) {
  if (!a.dx) return {};
  const Rows x_rows = rows_of(a.x), dx_rows = rows_of(a.dx);
  const Rows lse_rows = rows_of(a.lse, 0), dlse_rows = rows_of(a.dlse, 0);
  for (int64_t r = 0; r < x_rows.count; ++r) {
    const int64_t x = x_rows.offset(r), dx = dx_rows.offset(r);
    const double lse = load(a.lse, lse_rows.offset(r)), dlse = load(a.dlse, dlse_rows.offset(r));
    for (int64_t i = 0; i < a.x.size(-1); ++i) {
      const double p = std::exp(load(a.x, x + i * a.x.stride(-1)) - lse);
      const bool no_mass = lse == -std::numeric_limits<double>::infinity();
      store(a.dx, dx + i * a.dx.stride(-1), no_mass ? 0 : dlse * p);
    }
  }
  return {};
}

}  // namespace reference
}  // namespace fk
