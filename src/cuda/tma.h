// Tensor maps, which tell the copy engine (TMA) how a tensor lies in global memory. The host
// encodes them at each call and passes them to the kernel by value, as `const __grid_constant__
// CUtensorMap`.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/status.h"
#include "core/tensor.h"

namespace fk::cuda {

// A tensor of at most five dimensions, the fastest first. Its elements are contiguous along the
// fastest dimension; the other strides, in bytes, are multiples of 16, and so is the address.
struct TensorMapShape {
  int dims = 0;
  int64_t sizes[5] = {};
  int64_t strides[5] = {};  // in bytes; ignored for [0] and for dimensions of size 1
  int box[5] = {};          // what one copy moves; if swizzled, [0] is at most 128 bytes
};

// Whether a tensor map can describe a dimension (not the fastest) of this size and stride in bytes.
inline bool tensor_map_takes(int64_t size, int64_t stride) {
  return size <= 1 || (stride > 0 && stride % 16 == 0 && stride < (int64_t{1} << 40));
}

// Encodes the map of the tensor at `data`. With `swizzle`, 128-byte rows are stored in shared
// memory with their 16-byte pieces permuted (piece index xor row % 8), as the warpgroup's
// multiplications expect them. Loads give 0 for what lies outside of the tensor; stores there do
// nothing.
Status make_tensor_map(CUtensorMap* map, const void* data, DType dtype, const TensorMapShape& shape,
                       bool swizzle = true);

}  // namespace fk::cuda
