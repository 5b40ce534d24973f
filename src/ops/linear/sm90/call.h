// Calls of Hopper's matrix product (cuda/gemm/sm90_product.cuh) by linear's ops: operands that the
// copy engine can fetch, and which tile and how many parts of K a product takes.
#pragma once

#include "core/rows.h"
#include "core/workspace.h"
#include "cuda/gemm/epilogue.cuh"
#include "cuda/major.h"
#include "cuda/tma.h"
#include "ops/linear/cuda/inner.h"

namespace fk::cuda_sm90 {

// A tensor's rows as one matrix whose rows the copy engine can fetch, in place or, where strides or
// dtype do not allow that, copied into the workspace.
struct Matrix {
  void* data = nullptr;
  int64_t rows = 0, columns = 0, stride = 0;
  bool copied = false;

  Matrix() = default;
  Matrix(const Tensor& t, DType dtype, WorkspaceParts& parts) {
    const Rows r = rows_of(t);
    data = t.data;
    rows = r.count;
    columns = t.size(-1);
    stride = r.last_stride;
    copied = t.dtype != dtype || r.ndim > 1 || (t.stride(-1) != 1 && columns != 1) ||
             !cuda::tensor_map_takes(rows, stride * size_of(dtype));
    if (!copied) return;
    stride = cuda::linear::padded(columns);
    data = parts.take<char>(rows * stride * size_of(dtype));
  }
};

// A product of two operands, to which one of a second pair may be added.
struct Product {
  Matrix a, b;
  // Where there are gates, second_b is the other weight, and `b` theirs; columns then count those
  // of one of them. Else, where there is a second_a, K goes on in both.
  Matrix second_a, second_b;
  cuda::Major a_major = cuda::Major::kK, b_major = cuda::Major::kK;
  bool gated = false;
  int64_t rows = 0, columns = 0, depth = 0;  // depth: of each pair
  DType dtype = DType::kBFloat16;
  Tensor out, before, before_up, residual;
  cuda::Epilogue epilogue;
  float* partials = nullptr;  // of partial_floats
};

// How many floats of workspace a product takes for parts of K, which share the multiprocessors
// where its tiles are few.
int64_t partial_floats(int64_t rows, int64_t columns, int64_t depth, bool gated, int pairs,
                       int device);

Status multiply(const Product& p, int device, cudaStream_t stream);

// Tells the kernel about a product's results and its residual.
struct ProductArguments;
Status set_results(ProductArguments* f, const Product& p);

// Whether a result, or a residual, goes through the copy engine. It stores whole units of 16 bytes,
// also where a row ends inside one and what follows belongs to somebody else.
bool engine_takes(const Tensor& t, DType dtype);

// Whether Hopper's kernel can multiply x by this weight, and by its transpose.
bool takes(const Tensor& x, const Tensor& weight);

// Whether rows along K are read in vectors of 16 bytes where the tensor's address allows it. An
// implementation is chosen, and asked for its workspace, before addresses are known.
bool in_vectors_but_for_address(Tensor t, DType dtype);
bool few_rows(const Tensor& x);

// One row after another, as the threads' stores need them.
inline bool in_even_rows(const Tensor& t) { return !t || rows_of(t).ndim <= 1; }

inline bool aligned(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data) % 16 == 0; }

inline Status copy_if_needed(const Matrix& m, const Tensor& from, DType dtype,
                             cudaStream_t stream) {
  return m.copied ? cuda::linear::copy_matrix(from, dtype, m.data, stream) : Status();
}

}  // namespace fk::cuda_sm90
