// Tensor maps: how the copy engine sees a tensor in global memory. Encoded on the host at each
// call and passed to the kernel by value, as `const __grid_constant__ CUtensorMap`.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/status.h"
#include "core/tensor.h"

namespace fk::cuda {

// A view of at most five dimensions, the fastest first. Its elements are contiguous along the
// fastest; the other strides, in bytes, are multiples of 16, and so is the address.
struct TensorMapShape {
  int dims = 0;
  int64_t sizes[5] = {};
  int64_t strides[5] = {};  // in bytes; [0] is not looked at, nor that of a dimension of size 1
  int box[5] = {};          // what one copy moves; along the fastest at most 128 bytes if swizzled
};

// Whether a tensor can be described so: `stride` is in bytes, of a dimension of `size`.
inline bool tensor_map_takes(int64_t size, int64_t stride) {
  return size <= 1 || (stride > 0 && stride % 16 == 0 && stride < (int64_t{1} << 40));
}

// `swizzle`: 128-byte rows are stored in shared memory with their 16-byte pieces permuted (piece
// index xor row % 8), as the warpgroup's multiplications expect them. What a load reads outside the
// tensor is 0; stores there do nothing.
Status make_tensor_map(CUtensorMap* map, const void* data, DType dtype, const TensorMapShape& shape,
                       bool swizzle = true);

}  // namespace fk::cuda
