// This file holds what the copies of the copy engine have in common: what their operands name, and
// whether it is there.
#pragma once

#include "exec/machine.h"

namespace fk::softgpu {

// Returns an operand's value, of 32 or 64 bits.
uint64_t value_in(const Warp& warp, const Instruction& i, int operand, int lane);

// Returns whether all of the global memory is there that a copy reads or writes.
bool global_there(Warp& warp, int lane, uint64_t address, uint64_t bytes, bool write,
                  const char* what);
// Finds a range of shared memory of some block of the cluster. Returns nullptr where there is none.
Block* shared_there(Warp& warp, int lane, uint32_t* address, uint32_t bytes, uint32_t align);

// Returns how many sectors of global memory a piece of a copy touches that the piece before did
// not: where copies are swizzled, a piece is half a sector. `last` is the last sector's number plus
// one.
uint64_t sectors_after(uint64_t* last, uint64_t address, uint64_t bytes);

// Reads the tensor map at an address, and the coordinates that stand behind it in the instruction.
// Returns false, with a report, where there is none of this rank.
bool tensor_operands(Warp& warp, const Instruction& i, int lane, uint64_t address, TensorMap* map,
                     int32_t* coordinates);
// Returns what the place of a box in shared memory is a multiple of.
uint32_t box_align(const TensorMap& map);

}  // namespace fk::softgpu
