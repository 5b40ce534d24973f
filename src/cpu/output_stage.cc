#include "cpu/output_stage.h"

#include <algorithm>
#include <memory>

#include "core/access.h"
#include "core/integers.h"

namespace fk::cpu {

namespace {

// Returns one of the two numbers that the norm keeps for each row.
Matrix statistic(const Tensor& stats, int which) {
  Matrix m(stats);
  if (m.data != nullptr) m.data = static_cast<float*>(m.data) + which * stats.stride(-1);
  return m;
}

}  // namespace

OutputNorm::OutputNorm(const OutputStage& a, const Tensor& y, DType dtype, int64_t columns,
                       int64_t block_rows, WorkspaceParts& parts)
    : y_(y), block_rows_(block_rows) {
  if (!a.normed && !a.norm_stats) return;
  if (!y_) y_ = a.normed;
  if (!y_) {
    const int64_t rows = rows_of(a.norm_stats).count;
    y_ = rows_like(a.norm_stats, dtype, columns, columns,
                   parts.take<char>(rows * columns * size_of(dtype)));
  }
  rows_ = rows_of(y_).count;
  stored_ = parts.take<std::atomic<int64_t>>(ceil_div(rows_, block_rows_));
  job_.emplace(NormForward{Matrix(y_), Matrix(Tensor()), Matrix(a.normed), Matrix(Tensor()),
                           statistic(a.norm_stats, 0), statistic(a.norm_stats, 1),
                           Parameter(a.norm_weight), Parameter(a.norm_bias), columns,
                           static_cast<float>(a.norm_eps), 0.0f});
  job_->block = block_of(columns, all_unit(job_->x, job_->y, job_->weight, job_->bias));
  kernel_ = norm_forward(dtype, a.is_layer());
}

void OutputNorm::begin() const {
  if (!job_) return;
  std::uninitialized_fill_n(stored_, ceil_div(rows_, block_rows_), 0);
  // Nobody stores a part of rows without columns.
  if (job_->columns == 0) kernel_(*job_, 0, rows_);
}

void OutputNorm::stored(int64_t first_row, int64_t rows, int64_t columns) const {
  for (int64_t row = first_row, next; row < first_row + rows; row = next) {
    const int64_t block = row / block_rows_, begin = block * block_rows_;
    const int64_t end = std::min(begin + block_rows_, rows_);
    next = std::min(first_row + rows, end);
    const int64_t elements = (next - row) * columns;
    // Acquires what the others stored before they counted their parts.
    const int64_t before = stored_[block].fetch_add(elements, std::memory_order_acq_rel);
    if (before + elements == (end - begin) * job_->columns) kernel_(*job_, begin, end);
  }
}

OutputGradient::OutputGradient(const OutputStageGradient& a, const Tensor& dy, int64_t pieces,
                               const MatrixView& place, WorkspaceParts& parts)
    : a_(a), dy_(dy), gradient_(dy), sums_width_(norm_sums_width(dy.size(-1))) {
  if (!a.goes_through_norm()) return;
  const int64_t columns = dy.size(-1);
  if (a.dresidual) {
    gradient_ = a.dresidual;
  } else if (place.row != 0) {
    gradient_ = rows_like(dy, dy.dtype, columns, place.row, place.data);
  } else {
    const int64_t width = padded_columns(columns);
    char* const data = parts.take<char>(rows_of(dy).count * width * size_of(dy.dtype));
    gradient_ = rows_like(dy, dy.dtype, columns, width, data);
  }
  if (a.dnorm_weight) weight_sums_ = parts.take(pieces * sums_width_);
  if (a.dnorm_bias) bias_sums_ = parts.take(pieces * sums_width_);
  job_.emplace(NormBackward{Matrix(a.dnormed), Matrix(dy), Matrix(a.sum),
                            a.is_layer() ? statistic(a.norm_stats, 0) : Matrix(Tensor()),
                            statistic(a.norm_stats, 1), Matrix(gradient_), Parameter(a.norm_weight),
                            columns, 0.0f});
  job_->unit = all_unit(job_->dy, job_->dsum, job_->x, job_->dx, job_->weight);
  job_->block = block_of(columns, job_->unit);
  kernel_ = norm_backward(dy.dtype, a.is_layer());
}

void OutputGradient::rows(int64_t piece, int64_t begin, int64_t end, bool first) const {
  const auto sums = [&](float* of_all) {
    return of_all == nullptr ? of_all : of_all + piece * sums_width_;
  };
  kernel_(*job_, begin, end, {sums(weight_sums_), sums(bias_sums_), first});
}

void OutputGradient::finish(int64_t pieces) const {
  if (!job_) pieces = 0;
  if (a_.dnorm_weight) add_pieces(weight_sums_, pieces, sums_width_, a_.dnorm_weight);
  if (a_.dnorm_bias) add_pieces(bias_sums_, pieces, sums_width_, a_.dnorm_bias);
}

namespace {

// Copies the rows [begin, end) of elements of T.
template <class T>
void copy_rows(const Tensor& from, const Tensor& to, int64_t begin, int64_t end) {
  const Rows from_rows = rows_of(from), to_rows = rows_of(to);
  for (int64_t m = begin; m < end; ++m) {
    const T* const source = from.ptr<const T>() + from_rows.offset(m);
    T* const target = to.ptr<T>() + to_rows.offset(m);
    for (int64_t n = 0; n < from.size(-1); ++n) {
      target[n * to.stride(-1)] = source[n * from.stride(-1)];
    }
  }
}

}  // namespace

void OutputGradient::run(const Exec& exec) const {
  const int64_t rows_count = rows_of(dy_).count, piece = gradient_piece(rows_count);
  const int64_t pieces = gradient_pieces(rows_count);
  if (job_ || a_.dresidual) {
    exec.parallel_for(pieces, 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const int64_t begin = i * piece, end = std::min(begin + piece, rows_count);
        if (job_) {
          rows(i, begin, end, true);
        } else if (size_of(dy_.dtype) == 4) {
          copy_rows<float>(dy_, a_.dresidual, begin, end);
        } else {
          copy_rows<uint16_t>(dy_, a_.dresidual, begin, end);
        }
      }
    });
  }
  finish(pieces);
}

Status Stage::forward(const OutputStage& a, const Tensor& made, const Tensor& y, bool adds,
                      const Exec& exec) {
  const Tensor none;
  const int64_t columns = made.size(-1);
  // The norm's kernel adds the residual as well where no norm is wanted.
  NormForward job{Matrix(made),
                  Matrix(adds ? a.residual : none),
                  Matrix(a.normed),
                  Matrix(adds ? y : none),
                  statistic(a.norm_stats, 0),
                  statistic(a.norm_stats, 1),
                  Parameter(a.norm_weight),
                  Parameter(a.norm_bias),
                  columns,
                  static_cast<float>(a.norm_eps),
                  0.0f};
  job.block =
      block_of(columns, all_unit(job.x, job.residual, job.y, job.sum, job.weight, job.bias));
  const NormForwardRows kernel = norm_forward(made.dtype, a.is_layer());
  constexpr int64_t kLeastElements = 4096;  // for which it is worth to wake a thread
  const int64_t grain = std::max<int64_t>(1, kLeastElements / std::max<int64_t>(1, columns));
  exec.parallel_for(rows_of(made).count, grain,
                    [&](int64_t begin, int64_t end) { kernel(job, begin, end); });
  return {};
}

namespace {

OutputGradient stage_gradient(const OutputStageGradient& a, const Tensor& dy, const Tensor& total,
                              WorkspaceParts& parts) {
  const MatrixView place = {total.data, total.dtype, total.size(-1), 1};
  return {a, dy, gradient_pieces(rows_of(dy).count), place, parts};
}

}  // namespace

size_t Stage::backward_bytes(const OutputStageGradient& a, const Tensor& dy) {
  WorkspaceParts parts;
  stage_gradient(a, dy, dy, parts);
  return parts.bytes();
}

Status Stage::backward(const OutputStageGradient& a, const Tensor& dy, const Tensor& total,
                       const Tensor&, void* memory, const Exec& exec) {
  WorkspaceParts parts(memory);
  // What is to be a copy of dy is made with the rest, as dresidual.
  stage_gradient(a, dy, total, parts).run(exec);
  return {};
}

void add_pieces(const float* sums, int64_t pieces, int64_t width, const Tensor& out) {
  constexpr int64_t kTogether = 64;
  for (int64_t first = 0; first < out.size(0); first += kTogether) {
    const int64_t count = std::min(kTogether, out.size(0) - first);
    double total[kTogether] = {};
    for (int64_t i = 0; i < pieces; ++i) {
      const float* const from = sums + i * width + first;
      for (int64_t n = 0; n < count; ++n) total[n] += from[n];
    }
    for (int64_t n = 0; n < count; ++n) store(out, (first + n) * out.stride(0), total[n]);
  }
}

}  // namespace fk::cpu
