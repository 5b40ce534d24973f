// How the norms' host code turns tensors into what their kernels take.
#pragma once

#include <algorithm>

#include "core/integers.h"
#include "cuda/launch.h"
#include "cuda/norm/backward.cuh"

namespace fk::cuda::norm {

constexpr int kLoopedBlocksPerMultiprocessor = 2;

inline UntypedRows view_of(const Tensor& t, int inner_dims) {
  UntypedRows view;
  if (!t) return view;
  view.data = t.data;
  view.rows = rows_of(t, inner_dims);
  if (inner_dims > 0) view.column_stride = t.stride(-1);
  return view;
}

// Returns whether every row of `t` can be read in 16-byte vectors.
inline bool vectorised(const Tensor& t) {
  if (!t) return true;
  if (t.stride(-1) != 1 || reinterpret_cast<uintptr_t>(t.data) % 16 != 0) return false;
  for (int i = 0; i < t.ndim - 1; ++i) {
    if (t.shape[i] > 1 && t.strides[i] * size_of(t.dtype) % 16 != 0) return false;
  }
  return t.size(-1) * size_of(t.dtype) % 16 == 0;
}

template <class... Tensors>
inline bool all_vectorised(const Tensors&... tensors) {
  return (vectorised(tensors) && ...);
}

inline int looped_backward_blocks(const Tensor& x, int64_t rows) {
  return static_cast<int>(std::min<int64_t>(
      rows, kLoopedBlocksPerMultiprocessor * device_properties(x.device_id).multiprocessors));
}

inline Gradient gradient_of(const Tensor& t, const float* partials) {
  Gradient gradient;
  gradient.partials = partials;
  gradient.out = t.data;
  gradient.stride = t.stride(-1);
  gradient.dtype = t.dtype;
  return gradient;
}

inline Status launch_add_partials(const Gradients& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(p.columns, kGradientColumns)),
                  p.gradients[1].out != nullptr ? 2 : 1);
  return launch_early(add_partials, "norm add_partials", {grid, kGradientThreads}, stream, p);
}

}  // namespace fk::cuda::norm
