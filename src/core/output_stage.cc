// The checks and the definition of the output stage.
#include "core/output_stage.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/access.h"

namespace fk {

namespace {

// Checks the parameters of a forward's stage or of its gradient's.
template <class Stage>
Status check_parameters(const Stage& a) {
  if (a.norm_bias && !a.norm_weight) {
    return invalid("norm_bias: expected none without norm_weight, got a tensor");
  }
  if (a.norm_bias && !a.is_layer()) {
    return invalid("norm_bias: expected none with norm=\"rms\", got a tensor");
  }
  if (a.is_layer() && !a.norm_weight) {
    return invalid("norm_weight: expected a tensor with norm=\"layer\", got none");
  }
  return {};
}

}  // namespace

Status check_stage(const OutputStage& a) {
  if ((a.normed || a.norm_stats) && !a.norm_weight) {
    return invalid(std::string(a.normed ? "normed" : "norm_stats") +
                   ": expected none without norm_weight, got a tensor");
  }
  return check_parameters(a);
}

Status check_stage(const OutputStageGradient& a) {
  FK_RETURN_IF_ERROR(check_parameters(a));
  if (a.dnormed && !a.norm_weight) {
    return invalid("dnormed: expected none without norm_weight, got a tensor");
  }
  if (!a.dnormed) return {};
  if (!a.sum) return invalid("sum: expected the forward's y with dnormed, got none");
  if (!a.norm_stats) {
    return invalid("norm_stats: expected what the forward keeps with dnormed, got none");
  }
  return {};
}

Tensor rows_like(const Tensor& like, DType dtype, int64_t columns, int64_t width, void* data) {
  Tensor t = like;
  t.dtype = dtype;
  t.data = data;
  t.shape[t.ndim - 1] = columns;
  t.strides[t.ndim - 1] = 1;
  int64_t stride = width;
  for (int i = t.ndim - 2; i >= 0; --i) {
    t.strides[i] = stride;
    stride *= t.shape[i];
  }
  return t;
}

namespace reference {

void write_norm(const OutputStage& a, int64_t row, const double* y, int64_t columns) {
  if (!a.normed && !a.norm_stats) return;
  double mean = 0, square = 0;
  for (int64_t n = 0; n < columns && a.is_layer(); ++n) mean += y[n];
  if (a.is_layer()) mean /= static_cast<double>(columns);
  for (int64_t n = 0; n < columns; ++n) square += (y[n] - mean) * (y[n] - mean);
  const double scale = 1 / std::sqrt(square / static_cast<double>(columns) + a.norm_eps);
  if (a.norm_stats) {
    const int64_t at = rows_of(a.norm_stats).offset(row);
    store(a.norm_stats, at, mean);
    store(a.norm_stats, at + a.norm_stats.stride(-1), scale);
  }
  if (!a.normed) return;
  const int64_t at = rows_of(a.normed).offset(row);
  for (int64_t n = 0; n < columns; ++n) {
    double value = (y[n] - mean) * scale * load(a.norm_weight, n * a.norm_weight.stride(0));
    if (a.norm_bias) value += load(a.norm_bias, n * a.norm_bias.stride(0));
    store(a.normed, at + n * a.normed.stride(-1), value);
  }
}

void finish_rows(const OutputStage& a, const Tensor& y, DType dtype, int64_t columns,
                 const std::vector<double>& values) {
  const Rows y_rows = rows_of(y), residual = rows_of(a.residual);
  std::vector<double> row(static_cast<size_t>(columns));
  const Tensor& like = y ? y : a.normed ? a.normed : a.norm_stats;
  const int64_t rows = like ? rows_of(like).count : 0;
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = 0; n < columns; ++n) {
      double value = values[static_cast<size_t>(m * columns + n)];
      if (a.residual) value += load(a.residual, residual.offset(m) + n * a.residual.stride(-1));
      if (y) store(y, y_rows.offset(m) + n * y.stride(-1), value);
      row[static_cast<size_t>(n)] = round_to(dtype, value);
    }
    write_norm(a, m, row.data(), columns);
  }
}

StageGradient::StageGradient(const OutputStageGradient& a, const Tensor& dy)
    : rows_(rows_of(dy).count), columns_(dy.size(-1)) {
  const Rows dy_rows = rows_of(dy), out_rows = rows_of(a.dresidual);
  for (int64_t m = 0; m < rows_; ++m) {
    for (int64_t n = 0; n < columns_; ++n) {
      values_.push_back(load(dy, dy_rows.offset(m) + n * dy.stride(-1)));
    }
  }
  if (a.norm_weight) go_through_norm(a);
  for (int64_t m = 0; a.dresidual && m < rows_; ++m) {
    for (int64_t n = 0; n < columns_; ++n) {
      store(a.dresidual, out_rows.offset(m) + n * a.dresidual.stride(-1), at(m, n));
    }
  }
}

void StageGradient::go_through_norm(const OutputStageGradient& a) {
  std::vector<double> to_weight(static_cast<size_t>(columns_)), to_bias(to_weight), g(to_weight),
      normal(to_weight);
  const Rows dnormed = rows_of(a.dnormed), y = rows_of(a.sum), stats = rows_of(a.norm_stats);
  for (int64_t m = 0; a.dnormed && m < rows_; ++m) {
    const double mean = load(a.norm_stats, stats.offset(m));
    const double scale = load(a.norm_stats, stats.offset(m) + a.norm_stats.stride(-1));
    double along = 0, level = 0;  // the means of g times the normalised row, and of g
    for (int64_t n = 0; n < columns_; ++n) {
      const auto i = static_cast<size_t>(n);
      const double d = load(a.dnormed, dnormed.offset(m) + n * a.dnormed.stride(-1));
      normal[i] = (load(a.sum, y.offset(m) + n * a.sum.stride(-1)) - mean) * scale;
      g[i] = d * load(a.norm_weight, n * a.norm_weight.stride(0));
      to_weight[i] += d * normal[i];
      to_bias[i] += d;
      along += g[i] * normal[i] / static_cast<double>(columns_);
      if (a.is_layer()) level += g[i] / static_cast<double>(columns_);
    }
    for (size_t i = 0; i < g.size(); ++i) {
      double& value = values_[static_cast<size_t>(m) * g.size() + i];
      value += (g[i] - level - normal[i] * along) * scale;
    }
  }
  for (int64_t n = 0; n < columns_; ++n) {
    const auto i = static_cast<size_t>(n);
    if (a.dnorm_weight) store(a.dnorm_weight, n * a.dnorm_weight.stride(0), to_weight[i]);
    if (a.dnorm_bias) store(a.dnorm_bias, n * a.dnorm_bias.stride(0), to_bias[i]);
  }
}

}  // namespace reference

}  // namespace fk
