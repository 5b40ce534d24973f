// How the rows of a [..., N] tensor lie in memory, decided once on the host, so that the kernels in
// row_reduce.cuh and row_map.cuh know which accesses neighbours can share:
//   rows      the row itself is the fastest dimension (or nothing is): threads walk along it,
//             16 bytes at a time where the rows' elements are neighbours;
//   columns   another dimension is the fastest (an axis in the middle was moved last): neighbouring
//             threads take neighbouring rows, and each walks along its own.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <limits>

#include "core/rows.h"
#include "core/status.h"
#include "core/tensor.h"

namespace fk::cuda {

template <class T>
struct Tag {
  using type = T;
};

// body(Tag<T>()) for the activations' dtype T.
template <class Body>
Status for_dtype(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(Tag<float>());
    case DType::kFloat16:
      return body(Tag<__half>());
    case DType::kBFloat16:
      return body(Tag<__nv_bfloat16>());
    default:
      return {FK_INTERNAL, "no CUDA kernel for this dtype"};
  }
}

// How kernels point to elements of type T.
template <class T>
struct Pointer {
  using type = T*;
  FK_HOST_DEVICE static type to(void* data, DType) { return static_cast<T*>(data); }
};

// A [..., N] tensor, or with step 0 a [...] one, as kernels see it.
template <class T>
struct RowView {
  using Data = typename Pointer<T>::type;
  Data data = {};
  Rows rows;
  int64_t step = 0;  // from one element of a row to the next

#if defined(__CUDACC__)
  __device__ __forceinline__ Data row(int64_t r) const { return data + rows.offset(r); }
#endif
};

template <class T>
RowView<T> rows_view(const Tensor& t) {
  return {Pointer<T>::to(t.data, t.dtype), rows_of(t), t.stride(-1)};
}

// One value per row.
template <class T>
RowView<T> scalars_view(const Tensor& t) {
  if (!t) return {};
  return {Pointer<T>::to(t.data, t.dtype), rows_of(t, 0), 0};
}

// Puts the leading dims of all tensors into the order in which they lie in the first one, slowest
// first: the order of rows is free, and this lets dims merge and brings the fastest dim last. The
// tensors of `scalars` have no row dim. Tensors that are not defined are left alone.
inline void sort_leading_dims(std::initializer_list<Tensor*> full,
                              std::initializer_list<Tensor*> scalars = {}) {
  const Tensor& x = **full.begin();
  const int leading = x.ndim - 1;
  int order[kMaxDims] = {};
  for (int i = 0; i < leading; ++i) order[i] = i;
  const int64_t* strides = x.strides;
  std::stable_sort(order, order + leading,
                   [strides](int a, int b) { return std::abs(strides[a]) > std::abs(strides[b]); });
  const auto apply = [&](Tensor* t) {
    if (!*t) return;
    const Tensor old = *t;
    for (int i = 0; i < leading; ++i) {
      t->shape[i] = old.shape[order[i]];
      t->strides[i] = old.strides[order[i]];
    }
  };
  // x itself last: the order is read from it.
  for (Tensor* t : scalars) apply(t);
  for (auto t = full.end(); t != full.begin();) apply(*--t);
}

struct RowLayout {
  int64_t rows = 0;
  int64_t n = 0;      // elements in a row
  int64_t inner = 1;  // above 1: columns; so many consecutive rows are neighbours in every tensor
  // Whether 16-byte accesses serve: along rows, whose ragged ends are then single elements, or
  // across columns. Depends on the data pointers, unlike the above.
  bool vectors = false;
  bool aligned = false;  // and every row begins at a 16-byte border

  bool columns() const { return inner > 1; }
};

// The common layout of [..., N] tensors of one shape and dtype, leading dims sorted.
inline RowLayout layout_of(std::initializer_list<const Tensor*> tensors) {
  const Tensor& x = **tensors.begin();
  const int64_t width = 16 / size_of(x.dtype);
  RowLayout layout;
  layout.rows = rows_of(x).count;
  layout.n = x.size(-1);

  bool along_rows = true, any_along_row = false;
  int64_t inner = std::numeric_limits<int64_t>::max();
  for (const Tensor* t : tensors) {
    const Rows rows = rows_of(*t);
    along_rows = along_rows && t->stride(-1) == 1;
    any_along_row = any_along_row || (t->stride(-1) == 1 && layout.n > 1);
    inner = std::min(inner, rows.ndim > 0 && rows.last_stride == 1 ? rows.sizes[rows.ndim - 1] : 1);
  }
  // Merged sizes are products of trailing dims, so the smallest one divides the others.
  layout.inner = any_along_row ? 1 : inner;

  const auto phase = [width](int64_t elements) { return ((elements % width) + width) % width; };
  const auto phase_of = [&](const Tensor& t) {
    return phase(static_cast<int64_t>(reinterpret_cast<uintptr_t>(t.data)) / size_of(t.dtype));
  };
  layout.vectors = layout.columns() ? layout.inner % width == 0 : along_rows;
  layout.aligned = phase_of(x) == 0;
  for (const Tensor* t : tensors) {
    if (layout.columns()) {
      // Every vector across columns has to be aligned.
      const Rows rows = rows_of(*t);
      layout.vectors =
          layout.vectors && phase_of(*t) == 0 && (layout.n == 1 || phase(t->stride(-1)) == 0);
      for (int i = 0; i + 1 < rows.ndim; ++i) {
        layout.vectors = layout.vectors && phase(rows.strides[i]) == 0;
      }
    } else {
      // A row may start anywhere, but at the same place between two 16-byte borders in all tensors.
      layout.vectors = layout.vectors && phase_of(*t) == phase_of(x);
      for (int i = 0; i + 1 < t->ndim; ++i) {
        layout.vectors =
            layout.vectors && (t->shape[i] == 1 || phase(t->strides[i]) == phase(x.strides[i]));
        layout.aligned = layout.aligned && (t->shape[i] == 1 || phase(t->strides[i]) == 0);
      }
    }
  }
  layout.aligned = layout.aligned && layout.vectors;
  return layout;
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int power_of_two_at_least(int64_t value) {
  int result = 1;
  while (result < value) result *= 2;
  return result;
}

// Threads that share a row of `items` accesses: part of a warp (a power of two), a warp, or a block
// (above 32). About `items_per_thread` accesses each are best, for a thread has some of them in
// flight at a time, and one that stays longer pays less for its start and its end; `most` threads
// are enough. But neighbours should share a cache line, and all rows together fill a large GPU.
inline int threads_per_row(int64_t items, int64_t rows, int64_t items_per_thread, int64_t most) {
  constexpr int64_t kFill = 1 << 17;
  const int64_t wanted =
      std::max(std::min(ceil_div(items, items_per_thread), most), ceil_div(kFill, rows));
  const int64_t threads =
      std::max(std::min(wanted, ceil_div(items, 4)), std::min<int64_t>(items, 8));
  if (threads <= 32) return power_of_two_at_least(threads);
  return static_cast<int>(std::min<int64_t>(512, ceil_div(threads, 32) * 32));
}

constexpr int kWarpRowsBlock = 128;  // block size where several rows share a block

}  // namespace fk::cuda
