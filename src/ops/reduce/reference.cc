// This file computes sum and max in double precision, one entry at a time.
#include <cmath>
#include <limits>

#include "core/access.h"
#include "core/rows.h"
#include "ops/reduce/reduce.h"

namespace fk {
namespace reference {

Status run(const SumFwd& a, const Exec&) {
  if (!a.y) return {};
  const Rows x_rows = rows_of(a.x), y_rows = rows_of(a.y, 0);
  for (int64_t r = 0; r < x_rows.count; ++r) {
    double sum = 0;
    for (int64_t i = 0; i < a.x.size(-1); ++i) {
      sum += load(a.x, x_rows.offset(r) + i * a.x.stride(-1));
    }
    store(a.y, y_rows.offset(r), sum);
  }
  return {};
}

Status run(const SumBwd& a, const Exec&) {
  if (!a.dx) return {};
  const Rows dy_rows = rows_of(a.dy, 0), dx_rows = rows_of(a.dx);
  for (int64_t r = 0; r < dx_rows.count; ++r) {
    const double g = load(a.dy, dy_rows.offset(r));
    for (int64_t i = 0; i < a.dx.size(-1); ++i) {
      store(a.dx, dx_rows.offset(r) + i * a.dx.stride(-1), g);
    }
  }
  return {};
}

Status run(const MaxFwd& a, const Exec&) {
  if (!a.y) return {};
  const Rows x_rows = rows_of(a.x), y_rows = rows_of(a.y, 0);
  for (int64_t r = 0; r < x_rows.count; ++r) {
    double max = -std::numeric_limits<double>::infinity();
    for (int64_t i = 0; i < a.x.size(-1); ++i) {
      const double v = load(a.x, x_rows.offset(r) + i * a.x.stride(-1));
      if (v > max || std::isnan(v)) max = v;
    }
    store(a.y, y_rows.offset(r), max);
  }
  return {};
}

Status run(const MaxBwd& a, const Exec&) {
  if (!a.dx) return {};
  const Rows x_rows = rows_of(a.x), dx_rows = rows_of(a.dx);
  const Rows y_rows = rows_of(a.y, 0), dy_rows = rows_of(a.dy, 0);
  for (int64_t r = 0; r < x_rows.count; ++r) {
    const int64_t x = x_rows.offset(r), dx = dx_rows.offset(r);
    const double y = load(a.y, y_rows.offset(r)), g = load(a.dy, dy_rows.offset(r));
    // If the largest is NaN, it came from the NaNs.
    const auto is_largest = [&](int64_t i) {
      const double v = load(a.x, x + i * a.x.stride(-1));
      return v == y || (std::isnan(v) && std::isnan(y));
    };
    int64_t count = 0;
    for (int64_t i = 0; i < a.x.size(-1); ++i) count += is_largest(i);
    for (int64_t i = 0; i < a.x.size(-1); ++i) {
      store(a.dx, dx + i * a.dx.stride(-1), is_largest(i) ? g / count : 0);
    }
  }
  return {};
}

}  // namespace reference
}  // namespace fk
