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

// Places in memory, `stride` bytes apart.
struct Lines {
  const char* data;
  int64_t stride;
};

// Rows that will be read or written soon. Products bring them into the second-level cache, a line
// for each step of K: often enough to be in time, and not so often that other loads have to queue.
class RowsAhead {
 public:
  void add(const MatrixView& x, int64_t rows, int64_t columns) {
    if (x.data == nullptr || x.column != 1 || rows <= 0) return;
    const int64_t size = size_of(x.dtype);
    pieces_[count_++] = {static_cast<const char*>(x.data), x.row * size, rows, 0, columns * size};
  }
  bool empty() const { return count_ == 0; }
  // The next `n` lines, of a row each.
  Lines next(int64_t n) {
    constexpr int64_t kLine = 64;
    Rows& x = pieces_[count_ - 1];
    const Lines lines{x.data + x.row * x.stride, x.stride};
    x.row += n;
    if (x.row >= x.rows) {
      x.row = 0;
      x.data += kLine;
      x.bytes -= kLine;
      if (x.bytes <= 0) --count_;
    }
    return lines;
  }

 private:
  struct Rows {
    const char* data;
    int64_t stride, rows, row, bytes;
  };
  Rows pieces_[8];
  int count_ = 0;
};

}  // namespace fk::cpu
