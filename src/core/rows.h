// Finds where row r of a tensor of type [..., N] starts, for any strides of the leading dims. CPU
// and CUDA kernels share it. Leading dims are merged where their strides allow, so that the common
// case (contiguous, or a slice of a contiguous tensor) is one multiplication.
#pragma once

#include "core/host_device.h"
#include "core/tensor.h"

namespace fk {

struct Rows {
  int64_t count = 1;        // product of the leading sizes
  int64_t last_stride = 0;  // stride of the innermost leading dim, after merging
  int32_t ndim = 0;         // leading dims after merging; 0: a single row
  int64_t sizes[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};

  FK_HOST_DEVICE int64_t offset(int64_t row) const {
    if (ndim <= 1) return row * last_stride;
    int64_t result = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll 1  // the divisions are much code, and rarely run
#endif
    for (int i = ndim - 1; i > 0; --i) {
      const int64_t quotient = row / sizes[i];
      result += (row - quotient * sizes[i]) * strides[i];
      row = quotient;
    }
    return result + row * strides[0];
  }
};

// Gives the rows of `t`, whose last `inner_dims` dims belong to a row.
inline Rows rows_of(const Tensor& t, int inner_dims = 1) {
  Rows rows;
  for (int i = 0; i < t.ndim - inner_dims; ++i) {
    rows.count *= t.shape[i];
    if (t.shape[i] == 1) continue;
    if (rows.ndim > 0 && rows.strides[rows.ndim - 1] == t.strides[i] * t.shape[i]) {
      rows.sizes[rows.ndim - 1] *= t.shape[i];
      rows.strides[rows.ndim - 1] = t.strides[i];
    } else {
      rows.sizes[rows.ndim] = t.shape[i];
      rows.strides[rows.ndim] = t.strides[i];
      ++rows.ndim;
    }
  }
  if (rows.ndim > 0) rows.last_stride = rows.strides[rows.ndim - 1];
  return rows;
}

}  // namespace fk
