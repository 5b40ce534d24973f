// Calls of Hopper's matrix product (sm90_product.cuh) by rooms that have no kernels of it of their
// own: they are compiled once, where linear's are (ops/linear/sm90).
#pragma once

#include "core/status.h"
#include "core/tensor.h"
#include "cuda/launch.h"

namespace fk::cuda_sm90 {

// out[m, n] = sum over k of A[m, k] B[n, k] + bias[n]. A's rows are m, or, where they are not
// `outer`, k; so are B's n or k. A must not have m along its rows where B has n across them.
struct MatrixProduct {
  Tensor a, b, bias, out;  // bias may be undefined
  bool a_rows_are_outer = true, b_rows_are_outer = true;
  float* partials = nullptr;  // of matrix_partial_floats

  int64_t rows() const;
  int64_t columns() const;
  int64_t depth() const;
};

// Tells whether the product runs there: 16-bit operands of one dtype that the copy engine can fetch
// as they lie. It depends on addresses, so a workspace is asked for before it is known.
bool takes(const MatrixProduct& p);

// Returns how many floats of workspace a product takes for parts of K; 0 where the device is no
// Hopper.
int64_t matrix_partial_floats(int64_t rows, int64_t columns, int64_t depth, int device);

Status multiply(const MatrixProduct& p, cudaStream_t stream);

}  // namespace fk::cuda_sm90
