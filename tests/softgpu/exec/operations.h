// The table of all instructions: by mnemonic, what its operands are and who executes it.
#pragma once

#include <string>
#include <unordered_map>

#include "program/instruction.h"

namespace fk::softgpu {

struct Operation {
  // What the operands are, one word each, in the order of the text; each takes one of
  // Instruction::at. A letter: r a register of up to 32 bits, h one of 16, q one of 64,
  // p a predicate, v a vector of registers (in the list), a an address, i a number, n one of four
  // bits that is added to those before it and takes no place, t a branch
  // target, m the lanes that must meet, c a tensor map with coordinates (in the list), - none.
  // Ahead of it = where it is written, + where it is read and written while others run; behind it
  // ? where it may be missing, | where a predicate may follow (in the last place).
  std::string operands;
  Execute execute = nullptr;
  Class kind = Class::kOther;
  Control control = Control::kNone;
};

using Operations = std::unordered_map<std::string, Operation>;

// What the host's best instruction set executes, and the loop that calls it.
struct Interpreter {
  Operations operations;
  uint64_t (*run)(Warp& warp, uint64_t budget) = nullptr;
};
// Made once; the choice of instruction set can be forced by SOFTGPU_TARGET=v3 or v4.
const Interpreter& interpreter();

}  // namespace fk::softgpu
