// The interpreter for one instruction set of the host, which the build names as SOFTGPU_TARGET.
#include "exec/float.h"
#include "exec/integer.h"
#include "exec/interpret.h"
#include "exec/matrix.h"
#include "exec/memory_ops.h"
#include "exec/targets.h"
#include "exec/warp_ops.h"
#include "exec/wgmma.h"

namespace fk::softgpu::SOFTGPU_TARGET {

void make_interpreter(Interpreter* to) {
  add_integer_operations(to->operations);
  add_float_operations(to->operations);
  add_memory_operations(to->operations);
  add_warp_operations(to->operations);
  add_matrix_operations(to->operations);
  add_wgmma_operations(to->operations);
  to->run = run_warp;
}

}  // namespace fk::softgpu::SOFTGPU_TARGET
