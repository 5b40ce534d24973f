// This file says who adds which instructions to the table of all of them.
#pragma once

#include "exec/operations.h"

namespace fk::softgpu {

void add_integer_operations(Operations& table);
void add_float_operations(Operations& table);
void add_memory_operations(Operations& table);
void add_warp_operations(Operations& table);
void add_matrix_operations(Operations& table);
void add_wgmma_operations(Operations& table);
void add_control_operations(Operations& table);
void add_async_operations(Operations& table);
void add_lane_copies(Operations& table);
void add_memory_barriers(Operations& table);
void add_bulk_loads(Operations& table);
void add_bulk_stores(Operations& table);

}  // namespace fk::softgpu
