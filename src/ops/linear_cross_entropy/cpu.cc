// This file computes linear_cross_entropy on the CPU.
//
// Floor: one product of 2 N V K operations in the forward and three in the backward, which computes
// the logits again. Exponentials are 1 in 2 K of that.
//
// The forward turns each block of logits, while it is in the second-level cache, into three numbers
// a row: the largest, the sum of exponentials, the sum of logits. They are merged in order, so that
// the number of threads does not show. The backward takes a chunk of the classes at a time: all
// rows' logits of the chunk become their gradients on the way to memory, and from there give the
// chunk's rows of dweight, whole, and a part of dx. A chunk of rows instead would have to add to
// all of dweight each time.

#ifndef FK_OPS_LINEAR_CROSS_ENTROPY_CPU_JOBS_
#define FK_OPS_LINEAR_CROSS_ENTROPY_CPU_JOBS_

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/access.h"
#include "cpu/gemm/multiply.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"

namespace fk::cpu {

// Holds the statistics of a row's logits in one block of columns.
struct LogitStatistics {
  float max, sum, total;  // sum of exp(z - shift), and of z - shift: see shift_of

  // Returns what is subtracted: the largest logit, where that is a number.
  static float shift_of(float max) { return std::isfinite(max) ? max : 0.0f; }
};

struct HeadForward {
  const LinearCrossEntropyFwd& a;
  int64_t first_row;             // of the chunk of rows
  int64_t column_block, blocks;  // columns of a block, and how many blocks there are
  LogitStatistics* statistics;   // of each row of the chunk, `blocks` of them
  float* at_target;              // of each row of the chunk: the target's logit
};

// Holds what the gradient of a row's logits is made of: probability softmax(z) - everywhere, and
// less at_target for the target.
struct HeadRow {
  float shift, log_sum, probability, everywhere, at_target;
  int64_t target;  // -1: none

  bool empty() const { return probability == 0 && everywhere == 0 && at_target == 0; }
};

struct HeadBackward {
  const LinearCrossEntropyBwd& a;
  const HeadRow* rows;
  int64_t first_class;  // of the chunk
  MatrixView gradient;  // of the chunk's logits
  float* dbias;         // for each block of rows, the chunk's columns; NULL: not wanted
  int64_t row_block, width;
};

}  // namespace fk::cpu

#endif  // FK_OPS_LINEAR_CROSS_ENTROPY_CPU_JOBS_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/linear_cross_entropy/cpu.cc"
#include "cpu/foreach_target.h"
#include "cpu/gemm/elements.h"
#include "cpu/simd_activations.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

// Turns sums into logits, in place.
HWY_INLINE void to_logits(float* z, int64_t columns, const float* bias, float softcap) {
  const F32 d;
  const auto cap = hn::Set(d, softcap), inverse = hn::Set(d, 1.0f / softcap);
  for_vectors(columns, [&](int64_t c, int64_t) HWY_ATTR {
    auto v = hn::Add(hn::LoadU(d, z + c), hn::Load(d, bias + c));
    if (softcap > 0) v = hn::Mul(cap, Tanh(d, hn::Mul(v, inverse)));
    hn::StoreU(v, d, z + c);
  });
}

HWY_INLINE LogitStatistics statistics_of(float* z, int64_t columns, bool wants_total) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  // Entries behind the last column count for nothing.
  const int64_t end = (columns + lanes - 1) / lanes * lanes;
  for (int64_t c = columns; c < end; ++c) z[c] = -std::numeric_limits<float>::infinity();
  auto max0 = hn::LoadU(d, z), max1 = max0;
  int64_t c = lanes;
  for (; c + 2 * lanes <= end; c += 2 * lanes) {
    max0 = hn::Max(max0, hn::LoadU(d, z + c));
    max1 = hn::Max(max1, hn::LoadU(d, z + c + lanes));
  }
  if (c < end) max0 = hn::Max(max0, hn::LoadU(d, z + c));
  LogitStatistics s{ReduceMax(d, hn::Max(max0, max1)), 0, 0};
  const float shift = LogitStatistics::shift_of(s.max);
  const auto vshift = hn::Set(d, shift);
  auto sum = hn::Zero(d);
  for (c = 0; c < end; c += lanes) {
    sum = hn::Add(sum, Exp(d, hn::Sub(hn::LoadU(d, z + c), vshift)));
  }
  s.sum = ReduceSum(d, sum);
  if (wants_total) {
    double total = 0;
    for (c = 0; c < columns; ++c) total += z[c] - shift;
    s.total = static_cast<float>(total);
  }
  return s;
}

// Turns logits into their gradients, in place.
HWY_INLINE void to_gradient(float* z, int64_t columns, int64_t first_column, const HeadRow& row,
                            float softcap) {
  const F32 d;
  const auto shift = hn::Set(d, row.shift), log_sum = hn::Set(d, row.log_sum);
  const auto probability = hn::Set(d, row.probability), everywhere = hn::Set(d, row.everywhere);
  const auto inverse = hn::Set(d, 1.0f / softcap), one = hn::Set(d, 1.0f);
  const int64_t target = row.target - first_column;
  const bool hit = target >= 0 && target < columns;
  const float at_target = hit ? z[target] : 0.0f;
  for_vectors(columns, [&](int64_t c, int64_t) HWY_ATTR {
    const auto v = hn::LoadU(d, z + c);
    const auto p = Exp(d, hn::Sub(hn::Sub(v, shift), log_sum));
    auto g = hn::MulSub(p, probability, everywhere);
    if (softcap > 0) {
      const auto t = hn::Mul(v, inverse);
      g = hn::Mul(g, hn::NegMulAdd(t, t, one));
    }
    hn::StoreU(g, d, z + c);
  });
  if (!hit) return;
  const float t = softcap > 0 ? at_target / softcap : 0.0f;
  z[target] -= row.at_target * (1.0f - t * t);
}

}  // namespace

void head_finish_forward(const void* opaque, const SumsBlock& block) {
  const auto& job = *static_cast<const HeadForward*>(opaque);
  const LinearCrossEntropyFwd& a = job.a;
  alignas(64) float bias[kColumnBlock];
  by_type(a.x.dtype, [&](auto t) HWY_ATTR {
    load_bias<decltype(t)>(a.bias, block.first_column, block.columns, bias);
  });
  for (int64_t r = 0; r < block.rows; ++r) {
    float* const z = block.sums + r * block.stride;
    const int64_t row = block.first_row + r;
    to_logits(z, block.columns, bias, static_cast<float>(a.softcap));
    const int64_t target =
        load_index(a.targets, (job.first_row + row) * a.targets.stride(0)) - block.first_column;
    if (target >= 0 && target < block.columns) job.at_target[row] = z[target];
    job.statistics[row * job.blocks + block.first_column / job.column_block] =
        statistics_of(z, block.columns, a.label_smoothing > 0);
  }
}

void head_finish_backward(const void* opaque, const SumsBlock& block) {
  const auto& job = *static_cast<const HeadBackward*>(opaque);
  const LinearCrossEntropyBwd& a = job.a;
  const F32 d;
  const int64_t first_class = job.first_class + block.first_column;
  alignas(64) float bias[kColumnBlock];
  alignas(64) float sums[kColumnBlock] = {};
  by_type(a.x.dtype, [&](auto t) HWY_ATTR {
    load_bias<decltype(t)>(a.bias, first_class, block.columns, bias);
  });
  by_type(job.gradient.dtype, [&](auto t) HWY_ATTR {
    using T = decltype(t);
    for (int64_t r = 0; r < block.rows; ++r) {
      float* const z = block.sums + r * block.stride;
      const HeadRow& row = job.rows[block.first_row + r];
      if (row.empty()) {
        std::fill_n(z, block.columns, 0.0f);
      } else {
        to_logits(z, block.columns, bias, static_cast<float>(a.softcap));
        to_gradient(z, block.columns, first_class, row, static_cast<float>(a.softcap));
      }
      T* const to =
          static_cast<T*>(job.gradient.from(block.first_row + r, block.first_column).data);
      for_vectors(block.columns, [&](int64_t c, int64_t n) HWY_ATTR {
        const auto g = hn::LoadU(d, z + c);
        store_vector(to + c, n, g);
        if (job.dbias != nullptr) hn::Store(hn::Add(hn::Load(d, sums + c), g), d, sums + c);
      });
    }
  });
  if (job.dbias == nullptr) return;
  float* const to = job.dbias + block.first_row / job.row_block * job.width + block.first_column;
  std::copy_n(sums, block.columns, to);
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace fk::cpu {

FK_CPU_EXPORT(head_finish_forward);
FK_CPU_EXPORT(head_finish_backward);

namespace {

// The statistics of a chunk of rows, and the gradients of a chunk of classes, take no more than
// this.
constexpr int64_t kStatisticsBytes = int64_t{16} << 20, kGradientBytes = int64_t{32} << 20;

// Logits are computed from the weight as it is: the backward has them once more, and a small
// softcap makes much of a small difference.
constexpr bool kRoundsWeight = false;

// Returns how many of `count` items, of `bytes` each, make a chunk: as many as fit `most_bytes`, in
// multiples of `block`, and at least a block or all of them.
int64_t chunk_of(int64_t count, int64_t bytes, int64_t most_bytes, int64_t block) {
  const int64_t fit = most_bytes / std::max<int64_t>(bytes, 1) / block * block;
  return std::clamp<int64_t>(fit, std::min(block, std::max<int64_t>(count, 1)),
                             std::max<int64_t>(count, 1));
}

struct HeadForwardParts {
  WorkspaceParts parts;
  Product product;  // of a chunk of rows; the last one has fewer
  int64_t chunk;
  LogitStatistics* statistics;
  float *at_target, *losses, *scratch;

  HeadForwardParts(const LinearCrossEntropyFwd& a, void* memory) : parts(memory) {
    const int64_t rows = a.x.size(0), columns = a.weight.size(0);
    product = {matrix_view(a.x), transposed(matrix_view(a.weight)), rows, columns, a.x.size(1),
               kRoundsWeight};
    const int64_t row_bytes = blocks_of(columns, kColumnBlock) * sizeof(LogitStatistics);
    chunk = chunk_of(rows, row_bytes, kStatisticsBytes, kRowBlock);
    product.rows = std::min(chunk, rows);
    // The last chunk may have fewer rows, and blocks of its own.
    Product last = product;
    last.rows = rows % chunk;
    int64_t most = 0;
    for (const Product& p : {product, last}) {
      most = std::max(most, p.rows * blocks_of(columns, columns_at_once(p)));
    }
    statistics = parts.take<LogitStatistics>(most);
    at_target = parts.take(chunk);
    losses = parts.take(rows);
    scratch = parts.take(std::max(product_scratch(product), product_scratch(last)));
  }
};

// Merges the statistics of a row, and makes of them what the call returns.
void finish_row(const HeadForward& job, int64_t columns, int64_t r, float* losses) {
  const LinearCrossEntropyFwd& a = job.a;
  const LogitStatistics* const parts = job.statistics + r * job.blocks;
  const int64_t row = job.first_row + r;
  float max = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < job.blocks; ++i) max = std::max(max, parts[i].max);
  double sum = 0, total = 0;
  for (int64_t i = 0; i < job.blocks; ++i) {
    const float shift = LogitStatistics::shift_of(parts[i].max);
    sum += static_cast<double>(parts[i].sum) * std::exp(shift - max);
    const int64_t width = std::min(job.column_block, columns - i * job.column_block);
    total += parts[i].total + static_cast<double>(width) * shift;
  }
  double shift = max, log_sum = std::log(sum);
  // A row that holds NaN or +inf, or nothing but -inf, is no distribution.
  if (!std::isfinite(max) || std::isnan(log_sum)) {
    shift = 0;
    log_sum = std::numeric_limits<double>::quiet_NaN();
  }
  double loss = 0;
  if (load_index(a.targets, row * a.targets.stride(0)) != a.ignore_index) {
    const double s = a.label_smoothing, at_target = job.at_target[r];
    const double reference = std::isfinite(at_target) ? at_target : 0;
    // The large terms come first: near the maximum they cancel.
    loss = (shift - reference) + log_sum - (1 - s) * (at_target - reference);
    if (s > 0) loss -= s * (total / static_cast<double>(columns) - reference);
  }
  losses[row] = static_cast<float>(loss);
  if (a.losses) store(a.losses, row * a.losses.stride(0), loss);
  if (a.lse) store(a.lse, row * a.lse.stride(0), shift + log_sum);
  if (a.shift) store(a.shift, row * a.shift.stride(0), shift);
  if (a.log_sum) store(a.log_sum, row * a.log_sum.stride(0), log_sum);
}

struct HeadBackwardParts {
  WorkspaceParts parts;
  int64_t rows, columns, depth, chunk;
  HeadRow* head_rows;
  MatrixView gradient;
  float* dbias = nullptr;
  Tensor dx;  // in float, where dx itself is not
  float* scratch;

  HeadBackwardParts(const LinearCrossEntropyBwd& a, void* memory)
      : parts(memory), rows(a.x.size(0)), columns(a.weight.size(0)), depth(a.x.size(1)) {
    // As torch has them; in float16 they could be too small.
    const DType dtype = a.x.dtype == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat32;
    chunk = chunk_of(columns, rows * size_of(dtype), kGradientBytes, kColumnBlock);
    head_rows = parts.take<HeadRow>(rows);
    // The stride is no power of two: rows of one column would share a few sets of the cache.
    const int64_t stride = (chunk + 255) / 256 * 256 + 64;
    gradient = {parts.take<char>(rows * stride * size_of(dtype)), dtype, stride, 1};
    if (a.dbias) dbias = parts.take(blocks_of(rows, kFewRows) * chunk);
    dx = a.dx;
    if (a.dx && a.dx.dtype != DType::kFloat32 && chunk < columns) {
      dx.dtype = DType::kFloat32;
      dx.data = parts.take(rows * depth);
      dx.strides[0] = depth;
      dx.strides[1] = 1;
    }
    int64_t most = 0;
    for (const int64_t classes : {chunk, columns % chunk}) {
      for (const Product& p : {logits(a, 0, classes), to_weight(a, classes), to_x(a, 0, classes)}) {
        most = std::max(most, product_scratch(p));
      }
    }
    scratch = parts.take(most);
  }
  Product logits(const LinearCrossEntropyBwd& a, int64_t first, int64_t classes) const {
    return {matrix_view(a.x), transposed(matrix_view(a.weight).from(first)), rows, classes, depth,
            kRoundsWeight};
  }
  Product to_weight(const LinearCrossEntropyBwd& a, int64_t classes) const {
    return {transposed(gradient), matrix_view(a.x), classes, depth, rows};
  }
  Product to_x(const LinearCrossEntropyBwd& a, int64_t first, int64_t classes) const {
    return {gradient, matrix_view(a.weight).from(first), rows, depth, classes};
  }
};

HeadRow head_row(const LinearCrossEntropyBwd& a, int64_t i) {
  const auto at = [&](const Tensor& t) { return static_cast<float>(load(t, i * t.stride(0))); };
  HeadRow row{at(a.shift), at(a.log_sum), 0, 0, 0, -1};
  const int64_t target = load_index(a.targets, i * a.targets.stride(0));
  if (target != a.ignore_index && (a.dlosses || a.dloss)) {
    const float s = static_cast<float>(a.label_smoothing);
    float g = a.reduction == kNone ? at(a.dlosses) : *a.dloss.ptr<const float>();
    if (a.reduction == kMean) g /= *a.count.ptr<const float>();
    row.probability = g;
    row.everywhere = g * s / static_cast<float>(a.weight.size(0));
    row.at_target = g * (1 - s);
    row.target = target;
  }
  if (a.dlse) row.probability += at(a.dlse);
  return row;
}

// Returns the rows [first, first + count) of a tensor.
Tensor rows_from(const Tensor& t, int64_t first, int64_t count) {
  Tensor part = t;
  part.data = t.ptr<char>() + first * t.stride(0) * size_of(t.dtype);
  part.shape[0] = count;
  return part;
}

}  // namespace

size_t workspace(const LinearCrossEntropyFwd& a) {
  return HeadForwardParts(a, nullptr).parts.bytes();
}
size_t workspace(const LinearCrossEntropyBwd& a) {
  return HeadBackwardParts(a, nullptr).parts.bytes();
}

Status run(const LinearCrossEntropyFwd& a, const Exec& exec) {
  const HeadForwardParts parts(a, exec.workspace());
  const int64_t rows = a.x.size(0), columns = a.weight.size(0);
  for (int64_t first = 0; first < rows; first += parts.chunk) {
    Product p = parts.product;
    p.a = p.a.from(first);
    p.rows = std::min(parts.chunk, rows - first);
    const int64_t block = columns_at_once(p);
    const HeadForward job{
        a, first, block, blocks_of(columns, block), parts.statistics, parts.at_target};
    multiply(p, parts.scratch, FK_CPU_DISPATCH(head_finish_forward), &job, exec);
    exec.parallel_for(p.rows, std::max<int64_t>(1, 4096 / (job.blocks + 1)),
                      [&](int64_t begin, int64_t end) {
                        for (int64_t r = begin; r < end; ++r) {
                          finish_row(job, columns, r, parts.losses);
                        }
                      });
  }
  double total = 0;
  int64_t count = 0;
  for (int64_t r = 0; r < rows; ++r) {
    total += parts.losses[r];
    count += load_index(a.targets, r * a.targets.stride(0)) != a.ignore_index;
  }
  if (a.count) store(a.count, 0, static_cast<double>(count));
  if (a.loss) store(a.loss, 0, a.reduction == kMean ? total / static_cast<double>(count) : total);
  return {};
}

Status run(const LinearCrossEntropyBwd& a, const Exec& exec) {
  if (!a.dx && !a.dweight && !a.dbias) return {};
  const HeadBackwardParts parts(a, exec.workspace());
  for (int64_t i = 0; i < parts.rows; ++i) parts.head_rows[i] = head_row(a, i);
  if (a.dx && parts.columns == 0) {
    multiply(parts.to_x(a, 0, 0), parts.scratch, {a.dx, {}}, exec);
  }
  for (int64_t first = 0; first < parts.columns; first += parts.chunk) {
    const int64_t classes = std::min(parts.chunk, parts.columns - first);
    const Product logits = parts.logits(a, first, classes);
    const HeadBackward job{a,           parts.head_rows,      first,      parts.gradient,
                           parts.dbias, rows_at_once(logits), parts.chunk};
    multiply(logits, parts.scratch, FK_CPU_DISPATCH(head_finish_backward), &job, exec);
    for (int64_t c = 0; a.dbias && c < classes; ++c) {
      double sum = 0;
      for (int64_t i = 0; i < blocks_of(parts.rows, job.row_block); ++i) {
        sum += parts.dbias[i * parts.chunk + c];
      }
      store(a.dbias, (first + c) * a.dbias.stride(0), sum);
    }
    if (a.dweight) {
      multiply(parts.to_weight(a, classes), parts.scratch,
               {rows_from(a.dweight, first, classes), {}}, exec);
    }
    if (a.dx) {
      const bool last = first + classes == parts.columns;
      multiply(parts.to_x(a, first, classes), parts.scratch,
               {last ? a.dx : parts.dx, first > 0 ? parts.dx : Tensor()}, exec);
    }
  }
  return {};
}

}  // namespace fk::cpu

#endif  // HWY_ONCE
