// This file compiles the matrix product of cpu/gemm/product.h, once for all ops.

#ifndef FK_CPU_GEMM_MULTIPLY_JOBS_
#define FK_CPU_GEMM_MULTIPLY_JOBS_

#include "cpu/gemm/multiply.h"

namespace fk::cpu {

struct ProductJob {
  Product product;
  ProductBlocks blocks;
  float* scratch;  // of all workers; of products of few rows A as floats
  FinishBlock finish;
  const void* finish_job;
};

struct ProductToTensor {
  Tensor out, add;
  Rows out_rows, add_rows;
};

// Describes a product of few steps of K, whose operands are packed, and the tensor that it becomes.
struct FewStepsJob {
  const Product& product;
  const Tensor& out;
  int64_t out_row;  // stride of its rows
  float *a, *b;
};

// Describes the rows of any matrix, and where they are copied to as floats without gaps.
struct RowsCopy {
  const Tensor& from;
  Rows rows;
  float* out;
};

// Describes the rows of any matrix, and where they are copied to as bfloat16 without gaps.
struct PairRowsCopy {
  const Tensor& from;
  Rows rows;
  uint16_t* out;
  int64_t width;
};

struct RowsQuantization {
  const Tensor& from;
  Rows rows;
  QuantizedRows out;
  float* row;  // of each worker: out.stride floats
};

}  // namespace fk::cpu

#endif  // FK_CPU_GEMM_MULTIPLY_JOBS_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/gemm/multiply.cc"
#include "cpu/foreach_target.h"
#include "cpu/gemm/elements.h"
#include "cpu/gemm/product.h"
#include "cpu/gemm/product_bfloat16.h"
#include "cpu/gemm/product_int8.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {

void product_block(const ProductJob& job, int64_t worker, int64_t item) {
  const ProductScratch scratch(job.scratch, worker);
  const auto finish = [&](const SumsBlock& block) { job.finish(job.finish_job, block); };
  if (job.product.panels != nullptr && job.product.panels->dtype == DType::kInt8) {
    return multiply_block_of_quads(job.product, job.blocks, scratch, item, finish);
  }
#if FK_CPU_BFLOAT16_TARGET
  if (takes_pairs(job.product)) {
    return multiply_block_of_pairs(job.product, job.blocks, scratch, item, finish);
  }
#endif
  multiply_block(job.product, job.blocks, scratch, item, finish);
}

void product_of_few_rows(const ProductJob& job, int64_t item) {
  const auto finish = [&](const SumsBlock& block) { job.finish(job.finish_job, block); };
#if FK_CPU_BFLOAT16_TARGET
  if (few_rows_take_pairs(job.product)) {
    return multiply_few_rows_of_pairs(job.product, reinterpret_cast<const uint16_t*>(job.scratch),
                                      item, finish);
  }
#endif
  multiply_few_rows(job.product, job.scratch, item, finish);
}

// Computes one part of a product of one row: job.scratch holds the row, then the parts' sums.
void product_part_of_row(const ProductJob& job, int64_t part) {
  const Product& p = job.product;
  const RowParts parts = row_parts(p);
  const int64_t first = part * parts.depth, depth = std::min(parts.depth, p.depth - first);
  float* const sums = job.scratch + padded_columns(p.depth) + part * padded_columns(p.columns);
  by_type(p.b.dtype, [&](auto t) HWY_ATTR {
    const auto* b = static_cast<const decltype(t)*>(p.b.data) + first * p.b.row;
    detail::sum_rows(job.scratch + first, b, p.b.row, depth, p.columns, sums);
  });
}

// Adds up the parts, and finishes the row a block of columns at a time.
void product_finish_row(const ProductJob& job) {
  const Product& p = job.product;
  const F32 d;
  const int64_t width = padded_columns(p.columns), count = row_parts(p).count;
  float* const sums = job.scratch + padded_columns(p.depth);
  if (count == 0) std::fill_n(sums, width, 0.0f);
  for_vectors(width, [&](int64_t c, int64_t) HWY_ATTR {
    for (int64_t i = 1; i < count; ++i) {
      const auto sum = hn::Add(hn::LoadU(d, sums + c), hn::LoadU(d, sums + i * width + c));
      hn::StoreU(sum, d, sums + c);
    }
  });
  for (int64_t c = 0; c < p.columns; c += kColumnBlock) {
    const int64_t columns = std::min(kColumnBlock, p.columns - c);
    job.finish(job.finish_job, SumsBlock{sums + c, width, 0, 1, c, columns});
  }
}

void product_few_steps_operands(const FewStepsJob& job) {
  const Product& p = job.product;
#if FK_CPU_BFLOAT16_TARGET
  if (few_steps_take_pairs(p)) {
    return pack_few_steps_of_pairs(p, reinterpret_cast<uint32_t*>(job.a),
                                   reinterpret_cast<uint32_t*>(job.b));
  }
#endif
  const MatrixView turned{p.a.data, p.a.dtype, p.a.column, p.a.row};
  pack_rows(turned, p.depth, p.rows, job.a, padded_columns(p.rows));
  pack_rows(p.b, p.depth, p.columns, job.b, padded_columns(p.columns));
}

void product_of_few_steps(const FewStepsJob& job, int64_t begin, int64_t end) {
  by_type(job.out.dtype, [&](auto t) HWY_ATTR {
#if FK_CPU_BFLOAT16_TARGET
    if (few_steps_take_pairs(job.product)) {
      return multiply_few_steps_of_pairs(job.product, reinterpret_cast<const uint32_t*>(job.a),
                                         reinterpret_cast<const uint32_t*>(job.b), begin, end,
                                         static_cast<decltype(t)*>(job.out.data), job.out_row);
    }
#endif
    multiply_few_steps(job.product, job.a, job.b, begin, end,
                       static_cast<decltype(t)*>(job.out.data), job.out_row);
  });
}

void product_few_rows_of_a(const ProductJob& job) {
  const Product& p = job.product;
#if FK_CPU_BFLOAT16_TARGET
  if (few_rows_take_pairs(p)) {
    return pack_few_rows_of_pairs(p, reinterpret_cast<uint16_t*>(job.scratch));
  }
#endif
  pack_rows(p.a, p.rows, p.depth, job.scratch, padded_columns(p.depth));
}

void product_to_tensor(const void* opaque, const SumsBlock& block) {
  const auto& job = *static_cast<const ProductToTensor*>(opaque);
  const F32 d;
  by_type(job.out.dtype, [&](auto t) HWY_ATTR {
    for (int64_t r = 0; r < block.rows; ++r) {
      const int64_t out = job.out_rows.offset(block.first_row + r);
      const int64_t add = job.add ? job.add_rows.offset(block.first_row + r) : 0;
      for_vectors(block.columns, [&](int64_t c, int64_t n) HWY_ATTR {
        auto v = hn::LoadU(d, block.sums + r * block.stride + c);
        if (job.add) v = hn::Add(v, load_some<float>(job.add, add, block.first_column + c, n));
        store_some<decltype(t)>(job.out, out, block.first_column + c, n, v);
      });
    }
  });
}

void product_copy(const RowsCopy& job, int64_t begin, int64_t end) {
  const int64_t columns = job.from.size(-1), width = padded_columns(columns);
  for (int64_t r = begin; r < end; ++r) {
    const MatrixView start{job.from.data, job.from.dtype, 1, job.from.stride(-1)};
    pack_rows(start.from(job.rows.offset(r)), 1, columns, job.out + r * width, width);
  }
}

void product_copy_pairs(const PairRowsCopy& job, int64_t begin, int64_t end) {
  const F32 d;
  const int64_t columns = job.from.size(-1);
  by_type(job.from.dtype, [&](auto t) HWY_ATTR {
    for (int64_t r = begin; r < end; ++r) {
      auto* const to = reinterpret_cast<bfloat16_t*>(job.out + r * job.width);
      for_vectors(columns, [&](int64_t c, int64_t n) HWY_ATTR {
        StoreF32(d, load_some<decltype(t)>(job.from, job.rows.offset(r), c, n), to + c);
      });
      const int64_t lanes = hn::Lanes(d);
      for (int64_t c = (columns + lanes - 1) / lanes * lanes; c < job.width; ++c) {
        job.out[r * job.width + c] = 0;
      }
    }
  });
}

void product_quantize(const RowsQuantization& job, int64_t worker, int64_t row) {
  const int64_t columns = job.from.size(-1);
  float* const values = job.row + worker * job.out.stride;
  const MatrixView start{job.from.data, job.from.dtype, 1, job.from.stride(-1)};
  pack_rows(start.from(job.rows.offset(row)), 1, columns, values, job.out.stride);
  quantize_row(values, columns, job.out, row);
}

int64_t product_panel_columns() { return detail::tile_columns(); }

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace fk::cpu {

FK_CPU_EXPORT(product_block);
FK_CPU_EXPORT(product_of_few_rows);
FK_CPU_EXPORT(product_few_rows_of_a);
FK_CPU_EXPORT(product_part_of_row);
FK_CPU_EXPORT(product_finish_row);
FK_CPU_EXPORT(product_few_steps_operands);
FK_CPU_EXPORT(product_of_few_steps);
FK_CPU_EXPORT(product_to_tensor);
FK_CPU_EXPORT(product_copy);
FK_CPU_EXPORT(product_copy_pairs);
FK_CPU_EXPORT(product_quantize);
FK_CPU_EXPORT(product_panel_columns);

void multiply(const Product& p, float* scratch, FinishBlock finish, const void* finish_job,
              const Exec& exec) {
  const ProductJob job{p, product_blocks(p), scratch, finish, finish_job};
  if (takes_one_row(p)) {
    FK_CPU_DISPATCH(product_few_rows_of_a)(job);
    const auto kernel = FK_CPU_DISPATCH(product_part_of_row);
    const RowParts parts = row_parts(p);
    const int64_t grain = std::max<int64_t>(1, (1 << 17) / (parts.depth * p.columns + 1));
    exec.parallel_for(parts.count, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) kernel(job, i);
    });
    FK_CPU_DISPATCH(product_finish_row)(job);
    return;
  }
  if (!takes_few_rows(p)) {
    const auto kernel = FK_CPU_DISPATCH(product_block);
    run_on_workers(exec, worker_limit(), job.blocks.count(),
                   [&](int64_t worker, int64_t item) { kernel(job, worker, item); });
    return;
  }
  FK_CPU_DISPATCH(product_few_rows_of_a)(job);
  const auto kernel = FK_CPU_DISPATCH(product_of_few_rows);
  // These are enough columns for a thread to be worth waking.
  const int64_t grain = std::max<int64_t>(1, (1 << 17) / (p.depth * p.rows * kFewColumns + 1));
  exec.parallel_for(blocks_of(p.columns, kFewColumns), grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) kernel(job, i);
  });
}

void multiply(const Product& p, float* scratch, const ProductTensor& to, const Exec& exec) {
  const ProductToTensor job{to.out, to.add, rows_of(to.out), rows_of(to.add)};
  if (takes_few_steps(p) && !to.add && job.out_rows.ndim <= 1 && to.out.stride(-1) == 1) {
    float* const b = scratch + p.depth * padded_columns(p.rows);
    const FewStepsJob few{p, to.out, job.out_rows.last_stride, scratch, b};
    FK_CPU_DISPATCH(product_few_steps_operands)(few);
    // A piece of work is whole tiles of 4 or of 6 rows, and enough of them for a thread to be
    // worth waking.
    constexpr int64_t kRows = 12;
    const int64_t grain = std::max<int64_t>(1, (1 << 15) / (kRows * p.depth * p.columns + 1));
    exec.parallel_for(blocks_of(p.rows, kRows), grain, [&](int64_t begin, int64_t end) {
      FK_CPU_DISPATCH(product_of_few_steps)(few, kRows * begin, std::min(kRows * end, p.rows));
    });
    return;
  }
  multiply(p, scratch, FK_CPU_DISPATCH(product_to_tensor), &job, exec);
}

int64_t panel_columns() { return FK_CPU_DISPATCH(product_panel_columns)(); }

void copy_rows(const Tensor& t, float* out) {
  const RowsCopy job{t, rows_of(t), out};
  FK_CPU_DISPATCH(product_copy)(job, 0, job.rows.count);
}

LeftOperand::LeftOperand(const Tensor& t, const Panels& panels, WorkspaceParts& parts)
    : tensor_(t), panels_(panels), rows_(t, parts) {
  const int64_t rows = rows_of(t).count;
  if (panels.dtype == DType::kInt8) {
    const int64_t stride = (panels.depth + 63) / 64 * 64;
    quantized_ = {parts.take<int8_t>(rows * stride), stride, parts.take(rows),
                  parts.take<int32_t>(rows)};
    row_ = parts.take(worker_limit() * stride);
  } else if (panels.dtype == DType::kBFloat16 && multiplies_bfloat16() &&
             (t.dtype != DType::kBFloat16 || rows_of(t).ndim > 1)) {
    pairs_ = parts.take<uint16_t>(rows * padded_columns(panels.depth));
    rounds_ = true;
  }
}

Product LeftOperand::product() const {
  Product p{rows_.view(), {}, rows_of(tensor_).count, panels_.columns, panels_.depth};
  if (rounds_) p.a = {pairs_, DType::kBFloat16, padded_columns(panels_.depth), 1};
  p.panels = &panels_;
  p.quantized = quantized_;
  return p;
}

void LeftOperand::prepare(const Exec& exec) const {
  const Rows rows = rows_of(tensor_);
  if (quantized_.codes != nullptr) {
    const RowsQuantization job{tensor_, rows, quantized_, row_};
    const auto kernel = FK_CPU_DISPATCH(product_quantize);
    run_on_workers(exec, worker_limit(), rows.count,
                   [&](int64_t worker, int64_t row) { kernel(job, worker, row); });
  } else if (rounds_) {
    const PairRowsCopy job{tensor_, rows, pairs_, padded_columns(panels_.depth)};
    exec.parallel_for(rows.count, 16, [&](int64_t begin, int64_t end) {
      FK_CPU_DISPATCH(product_copy_pairs)(job, begin, end);
    });
  } else {
    rows_.prepare(exec);
  }
}

void RowsMatrix::prepare(const Exec& exec) const {
  if (rows_.ndim <= 1) return;
  const RowsCopy job{tensor_, rows_, copy_};
  exec.parallel_for(rows_.count, 64, [&](int64_t begin, int64_t end) {
    FK_CPU_DISPATCH(product_copy)(job, begin, end);
  });
}

}  // namespace fk::cpu

#endif  // HWY_ONCE
