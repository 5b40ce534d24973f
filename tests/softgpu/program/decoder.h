// Turns the text of a kernel into a Program.
#pragma once

#include <functional>
#include <memory>

#include "program/instruction.h"
#include "ptx/syntax.h"

namespace fk::softgpu {

// Returns the address of a variable of the module in global or constant memory, or 0 where there is
// none.
using FindVariable = std::function<uint64_t(std::string_view name)>;

// Throws ParseError where an instruction or an operand is not known.
std::unique_ptr<Program> decode(const ModuleText& module, const KernelText& kernel,
                                const FindVariable& find_variable);

}  // namespace fk::softgpu
