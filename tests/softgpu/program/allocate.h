// Gives registers places: thousands of names share a few hundred, as far as their lifetimes allow,
// so that the registers of a warp stay in the host's caches.
#pragma once

#include <cstdint>
#include <vector>

#include "program/instruction.h"
#include "ptx/syntax.h"

namespace fk::softgpu {

// Names a register that an instruction reads, writes, or both.
struct RegisterUse {
  int instruction = 0;
  int number = 0;
  bool read = false;
  bool written = false;
};

struct Allocation {
  std::vector<Place> places;  // by register; kNoPlace for those that are never used
  size_t bytes = 0;
};

// `uses` are sorted by instruction. Registers in `alone` share with nobody: asynchronous work
// writes them. Places begin at `first_byte`.
Allocation allocate_registers(const std::vector<Instruction>& code,
                              const std::vector<RegisterUse>& uses,
                              const std::vector<RegisterBytes>& registers,
                              const std::vector<bool>& alone, size_t first_byte);

}  // namespace fk::softgpu
