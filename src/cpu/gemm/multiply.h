// This file declares the matrix product that every op on the CPU shares, with an epilogue that the
// op brings.
#pragma once

#include "core/exec.h"
#include "core/rows.h"
#include "core/tensor.h"
#include "core/workspace.h"
#include "cpu/gemm/plan.h"

namespace fk::cpu {

// Describes a block of a product, which lies in a cache: rows of float sums. Whoever finishes it
// may overwrite them, as well as what lies between `columns` and the next multiple of 16 in each
// row.
struct SumsBlock {
  float* sums;
  int64_t stride;
  int64_t first_row, rows, first_column, columns;
  float* twin = nullptr;  // the same block of the twin, where the product has one
};

// Says what becomes of a block; `job` is the op's own. Blocks are finished on several threads at
// once, and all of them have as many columns as columns_at_once says, but the last of a row.
using FinishBlock = void (*)(const void* job, const SumsBlock& block);

// `scratch` has product_scratch(p) floats.
void multiply(const Product& p, float* scratch, FinishBlock finish, const void* job,
              const Exec& exec);

// Names the tensors of a product that becomes a tensor as it is, after `add` was added to it where
// that is defined. Both have as many rows as the product, whatever their strides; they may be the
// same memory.
struct ProductTensor {
  Tensor out, add;
};
void multiply(const Product& p, float* scratch, const ProductTensor& to, const Exec& exec);

// Holds the rows of a tensor as one matrix, in floats of their own if their strides do not allow
// that.
class RowsMatrix {
 public:
  RowsMatrix(const Tensor& t, WorkspaceParts& parts) : tensor_(t), rows_(rows_of(t)) {
    if (rows_.ndim > 1) copy_ = parts.take(rows_.count * padded_columns(t.size(-1)));
  }
  MatrixView view() const {
    if (rows_.ndim > 1) return {copy_, DType::kFloat32, padded_columns(tensor_.size(-1)), 1};
    return {tensor_.data, tensor_.dtype, rows_.last_stride, tensor_.stride(-1)};
  }
  // Copies the rows where that is needed, before a product reads them.
  void prepare(const Exec& exec) const;

 private:
  const Tensor& tensor_;
  Rows rows_;
  float* copy_ = nullptr;
};

// Copies the rows of a tensor as floats, padded_columns(its last size) apart, on this thread.
void copy_rows(const Tensor& t, float* out);

// Holds the rows of a tensor as the left operand of a product with packed panels: they are
// quantized for int8, rounded to bfloat16 where the processor multiplies that.
class LeftOperand {
 public:
  LeftOperand(const Tensor& t, const Panels& panels, WorkspaceParts& parts);
  // Returns a product of these rows with the panels.
  Product product() const;
  // Makes the operand, before a product reads it.
  void prepare(const Exec& exec) const;

 private:
  const Tensor& tensor_;
  const Panels& panels_;
  RowsMatrix rows_;
  QuantizedRows quantized_{};
  float* row_ = nullptr;
  uint16_t* pairs_ = nullptr;
  bool rounds_ = false;
};

}  // namespace fk::cpu
