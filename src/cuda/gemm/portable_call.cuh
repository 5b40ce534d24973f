// Calls of the matrix product for any architecture, cuda/gemm/portable_product.cuh, which is
// compiled once for all ops.
#pragma once

#include "core/rows.h"
#include "cuda/gemm/epilogue.cuh"
#include "cuda/launch.h"

namespace fk::cuda {

// A or B as it lies: rows of a tensor. Either these are the outer dimension (M or N) and K runs
// along them, or the other way round.
struct ProductOperand {
  const void* data = nullptr;
  bool is_float = false;  // else of the product's type
  bool rows_are_outer = true;
  Rows rows;
  int64_t column = 0;  // stride

  __device__ __forceinline__ int64_t place(int64_t outer, int64_t k) const {
    return rows_are_outer ? rows.offset(outer) + k * column : rows.offset(k) + outer * column;
  }
};

// A matrix of results, or of what is added to them. The rows may be those of any tensor.
struct ProductResult {
  void* data = nullptr;  // null: not there
  bool is_float = false;
  Rows rows;
  int64_t column = 0;
};

struct PortableArguments {
  ProductOperand a, b;
  ProductResult out, before, residual;
  int64_t rows, columns, depth;
  Epilogue epilogue;
};

// A tensor's rows as an operand or a result.
ProductOperand operand(const Tensor& t, bool rows_are_outer);
ProductResult result(const Tensor& t);

// Whether all of an operand may be read in vectors of 16 bytes of `dtype`.
bool in_vectors(const Tensor& t, DType dtype);

// C = A B^T with its epilogue. Operands are multiplied as `dtype`; `vectors`: both are in_vectors.
Status multiply(const PortableArguments& f, DType dtype, bool vectors, int device,
                cudaStream_t stream);

}  // namespace fk::cuda
