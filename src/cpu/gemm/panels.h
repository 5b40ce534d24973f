// This file brings the right operand of products beforehand into the form in which the register
// tiles read it, for weights that are used often.
//
// B is cut into panels of columns, and a panel is a stream of rows: every row has a cell of four
// bytes for each of its columns. A cell is a float, or two bfloat16 neighbours along K, or four
// codes of int8 neighbours along K. So a product of one row reads B in order, from end to end.
#pragma once

#include <cstdint>

#include "core/exec.h"
#include "core/tensor.h"
#include "cpu/gemm/view.h"

namespace fk::cpu {

struct Panels {
  DType dtype = DType::kFloat32;  // float32, bfloat16 or int8
  int64_t depth = 0, columns = 0;
  int64_t panel = 0;  // columns of a panel; the last one has fewer, filled up to a multiple of 16
  void* cells = nullptr;
  // Only int8 has scales: a number is its code - 128, times the scale of its column.
  float* scales = nullptr;

  // Returns how many elements along K a cell holds.
  static constexpr int64_t in_cell(DType dtype) { return 4 / size_of(dtype); }
  int64_t rows() const { return (depth + in_cell(dtype) - 1) / in_cell(dtype); }
  int64_t width_of(int64_t first_column) const {
    const int64_t left = padded_columns(columns) - first_column;
    return left < panel ? left : panel;
  }
  // Returns where a row of a panel begins, given the panel's first column.
  const uint32_t* at(int64_t first_column, int64_t row) const {
    return static_cast<const uint32_t*>(cells) + first_column * rows() +
           row * width_of(first_column);
  }
  int64_t cell_bytes() const { return padded_columns(columns) * rows() * 4; }
  int64_t scale_bytes() const { return dtype == DType::kInt8 ? padded_columns(columns) * 4 : 0; }
};

// Returns the width of panels that the tiles of the active target like best.
int64_t panel_columns();

// Fills cells and scales, for which there is room, from a matrix of rows of `depth`, one for each
// column of B, as a weight (out, in) has them. Returns false if a number for int8 is not finite.
bool pack_panels(const Tensor& weight, const Panels& out, const Exec& exec);

// Holds the left operand of int8 products, made from rows of any float type: rows of codes from
// -127 to 127, and of each row its scale and minus 128 times the sum of its codes. A row with a
// number that is not finite gets the scale NaN.
struct QuantizedRows {
  int8_t* codes;
  int64_t stride;  // a multiple of 64; what lies beyond the last column is 0
  float* scales;
  int32_t* offsets;
};

}  // namespace fk::cpu
