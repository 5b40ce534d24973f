// This file says what happens to asynchronous work when its threads end.
#pragma once

#include "exec/machine.h"

namespace fk::softgpu {

// The lanes end: copies out of shared memory that they started are finished now.
void finish_lanes(Warp& warp, uint32_t lanes);
// All threads of the block have ended: nothing may still be under way into it.
void finish_block(Block& block);

}  // namespace fk::softgpu
