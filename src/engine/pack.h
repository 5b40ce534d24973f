// Packs the weights of model files for products on the CPU (cpu/gemm/blocks.h).
#pragma once

#include <cstdint>

#include "cpu/gemm/blocks.h"
#include "model/decoder.h"

namespace fk::engine {

using cpu::block_bytes;
using cpu::group_bytes;
using cpu::is_float;
using cpu::kGroupRows;
using cpu::PackedMatrix;
using cpu::Packing;
using cpu::padded;
using cpu::super_bytes;

// Returns how a weight is to be packed: as it is stored, or as `quantize` where that is not null
// and the matrix allows it (it is stored as float, and its rows are whole blocks of that type).
Packing packing_of(const model::Weight& weight, const model::WeightType* quantize);

// Packs groups [begin, end) of a weight into out.group(begin) and those after it.
void pack_groups(const model::Weight& weight, const PackedMatrix& out, int64_t begin, int64_t end);

}  // namespace fk::engine
