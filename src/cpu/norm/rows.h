// Tensors as the CPU kernels of the norms see them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/rows.h"
#include "core/tensor.h"
#include "cpu/cache.h"

namespace fk::cpu {

// A [..., N] tensor as rows of columns; data is NULL where the tensor was not given.
struct Matrix {
  void* data = nullptr;
  int64_t column_stride = 1;
  int64_t row_stride = 0;  // where one stride does for all rows
  bool even = true;        // it does
  Rows rows;

  explicit Matrix(const Tensor& t, int inner_dims = 1) {
    if (!t) return;
    data = t.data;
    rows = rows_of(t, inner_dims);
    even = rows.ndim <= 1;
    row_stride = rows.last_stride;
    if (inner_dims == 1 && t.size(-1) > 1) column_stride = t.stride(-1);
  }
  // Returns NULL where there is no tensor.
  template <class T>
  T* row(int64_t r) const {
    return static_cast<T*>(data) + (even ? r * row_stride : uneven_offset(r));
  }

  // Returns whether StreamF32 may write it.
  bool streams(int64_t element_bytes) const {
    return data == nullptr || (even && streamable(data, row_stride * element_bytes));
  }

 private:
  // This is not inlined, because it is rare and its divisions would crowd every caller.
  __attribute__((noinline, pure)) int64_t uneven_offset(int64_t r) const { return rows.offset(r); }
};

// A [N] tensor in float32 or the activations' dtype.
struct Parameter {
  const void* data = nullptr;
  bool is_float = true;
  int64_t column_stride = 1;

  explicit Parameter(const Tensor& t) {
    if (!t) return;
    data = t.data;
    is_float = t.dtype == DType::kFloat32;
    if (t.size(0) > 1) column_stride = t.stride(0);
  }
};

// So many columns are copied at a time where a stride is not 1.
constexpr int64_t kCopied = 256;

template <class... Views>
bool all_unit(const Views&... views) {
  return ((views.column_stride == 1) && ...);
}

// Returns how many columns to work on at a time: all of them, or few enough to be copied.
inline int64_t block_of(int64_t columns, bool unit) {
  return unit ? std::max<int64_t>(1, columns) : kCopied;
}

}  // namespace fk::cpu
