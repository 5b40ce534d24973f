// What linear's CUDA backwards share: the elementwise part, ahead of the products.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "core/workspace.h"
#include "cuda/launch.h"
#include "ops/linear/gated_linear.h"
#include "ops/linear/linear.h"

namespace fk::cuda::linear {

constexpr int64_t padded(int64_t columns) { return (columns + 7) / 8 * 8; }

// Pieces of rows whose sums for the bias are kept apart; by the shape alone, so that sums are the
// same everywhere.
inline int64_t bias_pieces(int64_t rows, int64_t columns) {
  const int64_t blocks = (columns + 255) / 256;
  return std::max<int64_t>(1, std::min((rows + 31) / 32, 512 / std::max<int64_t>(blocks, 1)));
}

// The gradient of what the activation was given, dy act'(before), into `inner` (rows of
// padded(columns), x's dtype) unless that is null, and from it dbias, by way of `sums` (a row of
// padded(columns) floats for each of bias_pieces); and dresidual.
Status make_inner(const LinearBwd& a, void* inner, float* sums, cudaStream_t stream);

// The gradients of gate and up, dy up act'(gate) and dy act(gate): the first columns of rows
// that are `width` long, and those from up_column on. They are of x's dtype.
struct GatedInner {
  void* data = nullptr;
  int64_t width = 0, up_column = 0;
};
Status make_gated_inner(const GatedLinearBwd& a, const Tensor& gate, const Tensor& up,
                        const GatedInner& inner, cudaStream_t stream);

// Room for the partial sums of products, one after another; null where none has any.
inline float* take_partials(WorkspaceParts* parts, std::initializer_list<int64_t> floats) {
  const int64_t most = std::max(floats);
  return most == 0 ? nullptr : parts->take(most);
}

// The matrix of `columns` at `data`, like `like` in all else.
inline Tensor matrix_like(const Tensor& like, void* data, int64_t rows, int64_t columns,
                          int64_t width) {
  Tensor t = like;
  t.data = data;
  t.ndim = 2;
  t.shape[0] = rows;
  t.shape[1] = columns;
  t.strides[0] = width;
  t.strides[1] = 1;
  return t;
}

// A tensor's rows as a matrix of `dtype` whose rows are padded(columns) long.
Status copy_matrix(const Tensor& from, DType dtype, void* to, cudaStream_t stream);

}  // namespace fk::cuda::linear
