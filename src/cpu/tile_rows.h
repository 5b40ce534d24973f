// This file describes the part of a tensor that cpu/simd_tiles.h loads or stores as a tile.
#pragma once

#include "core/sequences.h"
#include "core/tensor.h"

namespace fk::cpu {

constexpr int64_t kMaxLanes = 16;  // the most lanes that a vector of floats has

// Describes rows of channels, one for each step. `data` points to the first row's first entry.
struct TileRows {
  void* data;
  DType dtype;
  int64_t step, channel;  // the strides between steps and between channels, in elements

  // Returns the rows that begin `offset` elements further.
  TileRows at(int64_t offset) const {
    return {static_cast<char*>(data) + offset * size_of(dtype), dtype, step, channel};
  }
};

// Returns the rows of a tensor (B, L, D) from one step and one channel on.
inline TileRows tile_rows(const StepView& v, int64_t batch, int64_t step, int64_t channel) {
  const TileRows rows{v.data, v.dtype, v.step, v.channel};
  return rows.at(batch * v.batch + step * v.step + channel * v.channel);
}

}  // namespace fk::cpu
