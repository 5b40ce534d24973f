// This file computes cross_entropy from logits in double precision.
#include <cmath>
#include <limits>

#include "core/access.h"
#include "ops/cross_entropy/cross_entropy.h"

namespace fk {
namespace reference {
namespace {

struct RowStatistics {
  double shift, log_sum;  // logsumexp is shift + log_sum
};

// A row that holds +inf, or nothing but -inf, is no distribution: its log_sum is NaN, and so its
// loss.
RowStatistics statistics(const Tensor& logits, int64_t row) {
  const int64_t start = row * logits.stride(0), step = logits.stride(1), n = logits.size(1);
  double max = -std::numeric_limits<double>::infinity(), sum = 0;
  for (int64_t j = 0; j < n; ++j) {
    const double v = load(logits, start + j * step);
    if (v > max || std::isnan(v)) max = v;
  }
  if (!std::isfinite(max)) return {0, std::numeric_limits<double>::quiet_NaN()};
  for (int64_t j = 0; j < n; ++j) sum += std::exp(load(logits, start + j * step) - max);
  return {max, std::log(sum)};
}

}  // namespace

Status run(const CrossEntropyFwd& a, const Exec&) {
  const int64_t rows = a.logits.size(0), columns = a.logits.size(1);
  const double s = a.label_smoothing;
  double total = 0;
  int64_t count = 0;
  for (int64_t i = 0; i < rows; ++i) {
    const auto logit = [&](int64_t j) {
      return load(a.logits, i * a.logits.stride(0) + j * a.logits.stride(1));
    };
    const int64_t target = load_index(a.targets, i * a.targets.stride(0));
    const auto [shift, log_sum] = statistics(a.logits, i);
    double loss = 0;
    if (target != a.ignore_index) {
      loss = shift + log_sum - (1 - s) * logit(target);
      // This is added apart, so that without smoothing a logit of -inf does no harm.
      if (s > 0) {
        double sum = 0;
        for (int64_t j = 0; j < columns; ++j) sum += logit(j);
        loss -= s * sum / columns;
      }
      ++count;
    }
    total += loss;
    if (a.losses) store(a.losses, i * a.losses.stride(0), loss);
    if (a.shift) store(a.shift, i * a.shift.stride(0), shift);
    if (a.log_sum) store(a.log_sum, i * a.log_sum.stride(0), log_sum);
  }
  if (a.count) store(a.count, 0, count);
  if (a.loss) store(a.loss, 0, a.reduction == kMean ? total / count : total);
  return {};
}

Status run(const CrossEntropyBwd& a, const Exec&) {
  if (!a.dlogits) return {};
  const int64_t rows = a.logits.size(0), columns = a.logits.size(1);
  const double s = a.label_smoothing;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t target = load_index(a.targets, i * a.targets.stride(0));
    const double shift = load(a.shift, i * a.shift.stride(0));
    const double log_sum = load(a.log_sum, i * a.log_sum.stride(0));
    double g = a.reduction == kNone ? load(a.dlosses, i * a.dlosses.stride(0)) : load(a.dloss, 0);
    if (a.reduction == kMean) g /= load(a.count, 0);
    for (int64_t j = 0; j < columns; ++j) {
      const double v = load(a.logits, i * a.logits.stride(0) + j * a.logits.stride(1));
      const double wanted = (j == target ? 1 - s : 0) + s / columns;
      const double dlogit =
          target == a.ignore_index ? 0 : g * (std::exp((v - shift) - log_sum) - wanted);
      store(a.dlogits, i * a.dlogits.stride(0) + j * a.dlogits.stride(1), dlogit);
    }
  }
  return {};
}

}  // namespace reference
}  // namespace fk
