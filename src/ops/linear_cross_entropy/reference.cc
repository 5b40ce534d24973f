// This file computes linear_cross_entropy as it is defined: one row of logits at a time, in double
// precision.
#include <cmath>
#include <limits>
#include <vector>

#include "core/access.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"

namespace fk {
namespace reference {
namespace {

// Computes the logits of a row of x.
template <class Args>
void row_of_logits(const Args& a, int64_t row, std::vector<double>* logits) {
  for (int64_t v = 0; v < a.weight.size(0); ++v) {
    double z = a.bias ? load(a.bias, v * a.bias.stride(0)) : 0;
    for (int64_t k = 0; k < a.x.size(1); ++k) {
      z += load(a.x, row * a.x.stride(0) + k * a.x.stride(1)) *
           load(a.weight, v * a.weight.stride(0) + k * a.weight.stride(1));
    }
    (*logits)[v] = a.softcap > 0 ? a.softcap * std::tanh(z / a.softcap) : z;
  }
}

struct RowStatistics {
  double shift, log_sum;  // logsumexp is shift + log_sum
};

// A row that holds +inf or NaN, or nothing but -inf, is no distribution: its log_sum is NaN, and so
// its loss.
RowStatistics statistics(const std::vector<double>& logits) {
  double max = -std::numeric_limits<double>::infinity(), sum = 0;
  for (const double z : logits) {
    if (z > max || std::isnan(z)) max = z;
  }
  if (!std::isfinite(max)) return {0, std::numeric_limits<double>::quiet_NaN()};
  for (const double z : logits) sum += std::exp(z - max);
  return {max, std::log(sum)};
}

// Stores a gradient, held in double until all rows were in.
void store_all(const Tensor& t, int64_t rows, int64_t columns, const std::vector<double>& values) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t at = t.ndim == 1 ? c * t.stride(0) : r * t.stride(0) + c * t.stride(1);
      store(t, at, values[r * columns + c]);
    }
  }
}

}  // namespace

Status run(const LinearCrossEntropyFwd& a, const Exec&) {
  const int64_t rows = a.x.size(0), columns = a.weight.size(0);
  const double s = a.label_smoothing;
  std::vector<double> logits(columns);
  double total = 0;
  int64_t count = 0;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t target = load_index(a.targets, i * a.targets.stride(0));
    row_of_logits(a, i, &logits);
    const auto [shift, log_sum] = statistics(logits);
    double loss = 0;
    if (target != a.ignore_index) {
      loss = shift + log_sum - (1 - s) * logits[target];
      // Apart, so that without smoothing a logit of -inf does no harm.
      if (s > 0) {
        double sum = 0;
        for (const double z : logits) sum += z;
        loss -= s * sum / columns;
      }
      ++count;
    }
    total += loss;
    if (a.losses) store(a.losses, i * a.losses.stride(0), loss);
    if (a.lse) store(a.lse, i * a.lse.stride(0), shift + log_sum);
    if (a.shift) store(a.shift, i * a.shift.stride(0), shift);
    if (a.log_sum) store(a.log_sum, i * a.log_sum.stride(0), log_sum);
  }
  if (a.count) store(a.count, 0, count);
  if (a.loss) store(a.loss, 0, a.reduction == kMean ? total / count : total);
  return {};
}

Status run(const LinearCrossEntropyBwd& a, const Exec&) {
  const int64_t rows = a.x.size(0), columns = a.weight.size(0), depth = a.x.size(1);
  const double s = a.label_smoothing;
  std::vector<double> logits(columns), dx(rows * depth), dweight(columns * depth), dbias(columns);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t target = load_index(a.targets, i * a.targets.stride(0));
    const double shift = load(a.shift, i * a.shift.stride(0));
    const double log_sum = load(a.log_sum, i * a.log_sum.stride(0));
    double g = 0;
    if (a.dlosses) g = load(a.dlosses, i * a.dlosses.stride(0));
    if (a.dloss) g = load(a.dloss, 0);
    if (a.reduction == kMean) g /= load(a.count, 0);
    if (target == a.ignore_index) g = 0;
    const double to_lse = a.dlse ? load(a.dlse, i * a.dlse.stride(0)) : 0;
    if (g == 0 && to_lse == 0) continue;
    row_of_logits(a, i, &logits);
    for (int64_t v = 0; v < columns; ++v) {
      const double z = logits[v], p = std::exp((z - shift) - log_sum);
      const double wanted = (v == target ? 1 - s : 0) + s / columns;
      double dz = g * (p - wanted) + to_lse * p;
      if (a.softcap > 0) dz *= 1 - (z / a.softcap) * (z / a.softcap);
      dbias[v] += dz;
      for (int64_t k = 0; k < depth; ++k) {
        dx[i * depth + k] += dz * load(a.weight, v * a.weight.stride(0) + k * a.weight.stride(1));
        dweight[v * depth + k] += dz * load(a.x, i * a.x.stride(0) + k * a.x.stride(1));
      }
    }
  }
  if (a.dx) store_all(a.dx, rows, depth, dx);
  if (a.dweight) store_all(a.dweight, columns, depth, dweight);
  if (a.dbias) store_all(a.dbias, 1, columns, dbias);
  return {};
}

}  // namespace reference
}  // namespace fk
