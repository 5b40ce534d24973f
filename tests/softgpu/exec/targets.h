// The instruction sets of the host that the interpreter is compiled for.
#pragma once

#include "exec/operations.h"

namespace fk::softgpu {

namespace base {
void make_interpreter(Interpreter* to);
}
#if defined(SOFTGPU_X86)
namespace v3 {
void make_interpreter(Interpreter* to);
}
namespace v4 {
void make_interpreter(Interpreter* to);
}
#endif

// What is executed alike on all of them, since it takes no time.
void add_control_operations(Operations& table);
void add_async_operations(Operations& table);
void add_lane_copies(Operations& table);
void add_memory_barriers(Operations& table);
void add_bulk_copies(Operations& table);

}  // namespace fk::softgpu
