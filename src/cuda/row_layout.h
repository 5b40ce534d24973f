// Describes how the rows of a [..., N] tensor lie in memory. The host decides it once per call, so
// that the kernels in row_reduce.cuh, row_map.cuh and row_in_registers.cuh know which elements one
// access can cover. There are two layouts:
//   rows      the row itself is the fastest dimension (or no dimension is): threads walk along the
//             row, 16 bytes at a time where its elements are neighbours;
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

#include "core/integers.h"
#include "core/rows.h"
#include "core/status.h"
#include "core/tensor.h"

namespace fk::cuda {

// Carries a type as a value, so that a function can receive it: decltype(tag)::type.
template <class T>
struct Tag {
  using type = T;
};

// Calls body(Tag<T>()) with the element type T of a float dtype, and returns its Status.
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

// The type by which kernels point to elements of type T: T*, except for Any (any_element.cuh).
template <class T>
struct Pointer {
  using type = T*;
  FK_HOST_DEVICE static type to(void* data, DType) { return static_cast<T*>(data); }
};

// A [..., N] tensor as kernels see it: its rows, and the step along a row. A [...] tensor of one
// value per row is a view with step 0.
template <class T>
struct RowView {
  using Data = typename Pointer<T>::type;
  Data data = {};
  Rows rows;
  int64_t step = 0;  // from one element of a row to the next, in elements

#if defined(__CUDACC__)
  __device__ __forceinline__ Data row(int64_t r) const { return data + rows.offset(r); }
#endif
};

// Returns the view of a [..., N] tensor.
template <class T>
RowView<T> rows_view(const Tensor& t) {
  return {Pointer<T>::to(t.data, t.dtype), rows_of(t), t.stride(-1)};
}

// The view of a [...] tensor, which has one value per row; empty if the tensor is not given.
template <class T>
RowView<T> scalars_view(const Tensor& t) {
  if (!t) return {};
  return {Pointer<T>::to(t.data, t.dtype), rows_of(t, 0), 0};
}

// Puts the leading dims of all tensors into the order in which they lie in the first one, slowest
// first. The kernels may take rows in any order, and this one lets dims merge and brings the
// fastest dim last. The tensors of `scalars` have only leading dims. Tensors that are not given are
// left alone.
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
  // x itself comes last, because the order is read from its strides.
  for (Tensor* t : scalars) apply(t);
  for (auto t = full.end(); t != full.begin();) apply(*--t);
}

struct RowLayout {
  int64_t rows = 0;
  int64_t n = 0;  // elements in a row
  // Above 1 in the columns layout: this many consecutive rows are neighbours in every tensor.
  int64_t inner = 1;
  // Whether 16-byte accesses can be used: along rows, where the elements before the first 16-byte
  // border and after the last one are single accesses, or across columns. Unlike the fields above,
  // this depends on the data pointers, so a workspace query must not use it.
  bool vectors = false;
  bool aligned = false;  // `vectors`, and every row begins at a 16-byte border

  bool columns() const { return inner > 1; }
};

// Finds the layout that [..., N] tensors of one shape and dtype have in common. Their leading dims
// are already sorted (sort_leading_dims).
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

// The smallest power of two that is at least `value`.
inline int power_of_two_at_least(int64_t value) {
  int result = 1;
  while (result < value) result *= 2;
  return result;
}

// Returns how many threads should share a row of `items` accesses: part of a warp (a power of two),
// a warp, or a block (above 32, whole warps). It aims at about `items_per_thread` accesses for each
// thread, because a thread keeps several in flight and one that does more pays less for its start
// and its end, and at no more than `most` threads. It takes more threads where the rows alone would
// not fill a large GPU, and at least 8 where there is work for them, so that neighbours share a
// cache line.
inline int threads_per_row(int64_t items, int64_t rows, int64_t items_per_thread, int64_t most) {
  constexpr int64_t kFill = 1 << 17;
  const int64_t wanted =
      std::max(std::min(ceil_div(items, items_per_thread), most), ceil_div(kFill, rows));
  const int64_t threads =
      std::max(std::min(wanted, ceil_div(items, 4)), std::min<int64_t>(items, 8));
  if (threads <= 32) return power_of_two_at_least(threads);
  return static_cast<int>(std::min<int64_t>(512, ceil_div(threads, 32) * 32));
}

constexpr int kWarpRowsBlock = 128;  // threads in a block that several rows share

}  // namespace fk::cuda
