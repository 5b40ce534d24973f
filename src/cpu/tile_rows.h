// The part of a tensor that cpu/simd_tiles.h loads or stores as a tile.
#pragma once

#include "core/tensor.h"

namespace fk::cpu {

constexpr int64_t kMaxLanes = 16;  // the most lanes that a vector of floats has

// Rows of channels, one for each step. `data` points to the first row's first entry.
struct TileRows {
  void* data;
  DType dtype;
  int64_t step, channel;  // the strides between steps and between channels, in elements

  // The rows that begin `offset` elements further.
  TileRows at(int64_t offset) const {
    return {static_cast<char*>(data) + offset * size_of(dtype), dtype, step, channel};
  }
};

}  // namespace fk::cpu
