// A matrix inside a tensor, for cpu/matrix_pack.h.
#pragma once

#include <cstdint>

#include "core/tensor.h"

namespace fk::cpu {

// Columns as a packed matrix has them: whole vectors of any instruction set, whole cache lines.
constexpr int64_t padded_columns(int64_t n) { return (n + 15) / 16 * 16; }

struct MatrixView {
  void* data;
  DType dtype;
  int64_t row, column;  // strides, in elements

  MatrixView from(int64_t first_row, int64_t first_column = 0) const {
    return {static_cast<char*>(data) + (first_row * row + first_column * column) * size_of(dtype),
            dtype, row, column};
  }
};

}  // namespace fk::cpu
