// This file declares the copies of the copy engine into shared memory.
#pragma once

#include "exec/machine.h"

namespace fk::softgpu {

// Finishes the copies under way that complete on a barrier of the block.
void finish_loads(Block& block, uint32_t barrier);

}  // namespace fk::softgpu
