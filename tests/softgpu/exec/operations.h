// This file declares the table of all instructions: by mnemonic, what its operands are and who
// executes it.
#pragma once

#include <string>
#include <unordered_map>

#include "program/instruction.h"

namespace fk::softgpu {

struct Operation {
  // Says what the operands are, one word each, in the order of the text; each takes one of
  // Instruction::at. A letter: r a register of up to 32 bits, h one of 16, q one of 64, p a
  // predicate, v a vector of registers (in the list), a an address, i a number, n one of four bits
  // that is added to those before it and takes no place, t a branch target, m the lanes that must
  // meet, c a tensor map with coordinates (in the list), - none. Ahead of it = where it is written,
  // + where it is read and written while others run; behind it ? where it may be missing, | where a
  // predicate may follow (in the last place).
  std::string operands;
  Execute execute = nullptr;
  Class kind = Class::kOther;
  Control control = Control::kNone;
};

using Operations = std::unordered_map<std::string, Operation>;

// Returns all of them, which are made once.
const Operations& operations();

}  // namespace fk::softgpu
