// This file declares what copies need to know of mbarriers.
#pragma once

#include "exec/machine.h"

namespace fk::softgpu {

bool has_barrier(const Block& block, uint32_t offset);
// A copy has written `bytes`, for which the barrier waits. `warp` is for reports.
void complete_bytes(Warp& warp, Block& block, uint32_t offset, uint32_t bytes);

}  // namespace fk::softgpu
