// This file describes a matrix inside a tensor, for cpu/gemm/pack.h, and lists of rows to prefetch.
#pragma once

#include <cstdint>

#include "core/tensor.h"

namespace fk::cpu {

// Returns how many columns a packed matrix of n columns has: it is rounded up to 16, which are
// whole vectors of any instruction set and whole cache lines.
constexpr int64_t padded_columns(int64_t n) { return (n + 15) / 16 * 16; }

// Describes a matrix of any float dtype inside a tensor, which it does not own.
struct MatrixView {
  void* data;
  DType dtype;
  int64_t row, column;  // strides, in elements

  // Returns the matrix that begins at this row and column.
  MatrixView from(int64_t first_row, int64_t first_column = 0) const {
    return {static_cast<char*>(data) + (first_row * row + first_column * column) * size_of(dtype),
            dtype, row, column};
  }
};

// Lists cache lines in memory, `stride` bytes apart.
struct Lines {
  const char* data;
  int64_t stride;
};

// Lists up to eight matrices whose rows will be read or written soon. Products bring them into the
// second-level cache, a line in each step of K: often enough to be in time, and not so often that
// other loads have to queue.
class RowsAhead {
 public:
  // Adds a matrix; it is left out if it has no data or its rows are not contiguous.
  void add(const MatrixView& x, int64_t rows, int64_t columns) {
    if (x.data == nullptr || x.column != 1 || rows <= 0) return;
    const int64_t size = size_of(x.dtype);
    pieces_[count_++] = {static_cast<const char*>(x.data), x.row * size, rows, 0, columns * size};
  }
  bool empty() const { return count_ == 0; }
  // Returns the next `n` lines to prefetch, each of another row, and moves on. They may reach past
  // the last row, which a prefetch does not mind. The list must not be empty.
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
    const char* data;      // this column of cache lines in the first row
    int64_t stride, rows;  // between rows, in bytes; number of rows
    int64_t row, bytes;    // the next row; bytes of a row from this column on
  };
  Rows pieces_[8];
  int count_ = 0;
};

}  // namespace fk::cpu
