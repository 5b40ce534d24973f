// Rows of a tensor that cpu/simd_tiles.h loads and stores.
#pragma once

#include "core/tensor.h"

namespace fk::cpu {

constexpr int64_t kMaxLanes = 16;  // of a vector of float

// `data` is the first row's first entry; strides are in elements.
struct TileRows {
  void* data;
  DType dtype;
  int64_t step, channel;

  TileRows at(int64_t offset) const {
    return {static_cast<char*>(data) + offset * size_of(dtype), dtype, step, channel};
  }
};

}  // namespace fk::cpu
