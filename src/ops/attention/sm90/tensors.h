// This file says what attention on Hopper asks of a call's tensors, and how the copy engine sees
// them.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "cuda/tma.h"
#include "ops/attention/problem.h"

namespace fk::cuda_sm90 {

constexpr int64_t kMaxLength = int64_t{1} << 28;  // positions and their differences are ints

inline bool copy_engine_takes(const Tensor& t) {
  if (t.stride(-1) != 1 && t.size(-1) != 1) return false;
  for (int i = 0; i + 1 < t.ndim; ++i) {
    if (!cuda::tensor_map_takes(t.shape[i], t.strides[i] * size_of(t.dtype))) return false;
  }
  return true;
}

inline bool copy_engine_takes(const AttentionFwd& a) {
  return copy_engine_takes(a.q) && copy_engine_takes(a.k) && copy_engine_takes(a.v) &&
         (!a.out || copy_engine_takes(a.out));
}

// Returns whether each of these tensors begins where accesses of 16 bytes may.
inline bool all_aligned(std::initializer_list<const Tensor*> tensors) {
  for (const Tensor* t : tensors) {
    if (reinterpret_cast<uintptr_t>(t->data) % 16 != 0) return false;
  }
  return true;
}

// Describes a tensor as (D, rows, heads, batch), in boxes of 128 bytes and `rows` rows.
inline Status make_map(CUtensorMap* map, const Tensor& t, int rows) {
  const attention::View view = attention::view(t);
  const int64_t bytes = size_of(t.dtype);
  cuda::TensorMapShape shape;
  shape.dims = 4;
  const int64_t sizes[] = {t.size(-1), t.size(-3), t.size(-2), t.ndim == 4 ? t.size(0) : 1};
  const int64_t strides[] = {0, view.row * bytes, view.head * bytes, view.batch * bytes};
  const int box[] = {static_cast<int>(128 / bytes), rows, 1, 1};
  std::copy(sizes, sizes + 4, shape.sizes);
  std::copy(strides, strides + 4, shape.strides);
  std::copy(box, box + 4, shape.box);
  return cuda::make_tensor_map(map, t.data, t.dtype, shape);
}

inline Tensor without_gaps(const Tensor& like, void* data) {
  Tensor t = like;
  t.data = data;
  int64_t stride = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    t.strides[i] = stride;
    stride *= t.shape[i];
  }
  return t;
}

inline int limit(int64_t window) { return static_cast<int>(std::min(window, 2 * kMaxLength)); }

}  // namespace fk::cuda_sm90
