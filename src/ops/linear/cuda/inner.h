// What linear's CUDA backwards share: the elementwise part, ahead of the products.
#pragma once

#include <algorithm>

#include "core/workspace.h"
#include "cuda/launch.h"
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

// A tensor's rows as a matrix of `dtype` whose rows are padded(columns) long.
Status copy_matrix(const Tensor& from, DType dtype, void* to, cudaStream_t stream);

}  // namespace fk::cuda::linear
