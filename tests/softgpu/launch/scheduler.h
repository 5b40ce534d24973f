// Runs the blocks of a launch: each in turns, as many at once as fit on the chip.
#pragma once

#include "exec/machine.h"

namespace fk::softgpu {

// Throws Abandoned where a report ends the launch. `resident` clusters may be under way at once.
void run_blocks(Run* run, uint64_t resident);

}  // namespace fk::softgpu
