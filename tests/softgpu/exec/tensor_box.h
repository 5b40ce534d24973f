// This file describes the box of a tensor that one copy moves: its pieces in global and in shared
// memory.
#pragma once

#include <cstdint>
#include <vector>

#include "softgpu.h"

namespace fk::softgpu {

struct BoxPiece {
  uint64_t global = 0;  // 0: outside of the tensor
  uint32_t shared = 0;
  uint32_t bytes = 0;
};
// `coordinates` are those of the box's first element, the fastest dimension first; `shared` is
// where the box lies. Pieces come in the order of shared memory before it is swizzled.
std::vector<BoxPiece> pieces_of_box(const TensorMap& map, const int32_t* coordinates,
                                    uint32_t shared);
uint32_t bytes_of_box(const TensorMap& map);

}  // namespace fk::softgpu
