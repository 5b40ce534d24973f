// This file says how a matrix product on the CPU is cut into work, and how much scratch memory it
// takes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/exec.h"
#include "core/workspace.h"
#include "cpu/gemm/panels.h"
#include "cpu/gemm/view.h"
#include "cpu/workers.h"

namespace fk::cpu {

// Describes the product C[rows, columns] = A[rows, depth] B[depth, columns], of any float types and
// strides.
struct Product {
  MatrixView a, b;
  int64_t rows, columns, depth;
  bool rounds_b = true;  // whether a float B may be rounded to the dtype of A
  // With `twin` there is a second product of the same sizes, A twin_b, and the blocks of both are
  // finished together.
  bool twin = false;
  MatrixView twin_b{};
  // With `sum` a product of the same sizes, sum_a sum_b, is added to A B.
  bool sum = false;
  MatrixView sum_a{}, sum_b{};
  // Points to B in panels, if somebody has packed it: `b` is not read then. With int8 panels `a` is
  // not read either, but `quantized`. Such a product has neither twin nor sum.
  const Panels* panels = nullptr;
  QuantizedRows quantized{};
};

// A block of B has 256 steps of K by 128 columns, which take 128 KB, an eighth of a second-level
// cache; 96 rows of A another 96 KB. Sums for 512 rows stay there as well while K is walked
// through: packing B takes a few steps for each number, and pays by the rows that it is multiplied
// with.
constexpr int64_t kDepthBlock = 256, kColumnBlock = 128, kRowBlock = 512, kRowsAtOnce = 96;
// Products are summed over so much of K before they meet the sums of the rest: errors grow with the
// square root of what is summed at a stretch.
constexpr int64_t kSumDepth = 128;
// A panel is as wide as the widest tile of any instruction set.
constexpr int64_t kPanelColumns = 64;

struct ProductScratch {
  float *sums, *b, *a, *turned;

  static constexpr int64_t kSums = kRowBlock * kColumnBlock, kB = kDepthBlock * kColumnBlock;
  static constexpr int64_t kA = kRowsAtOnce * kDepthBlock, kTurned = kPanelColumns * kDepthBlock;
  static constexpr int64_t kFloats = kSums + kB + kA + kTurned;

  ProductScratch(float* memory, int64_t worker) {
    sums = memory + worker * kFloats;
    b = sums + kSums;
    a = b + kB;
    turned = a + kA;
  }
};

inline int64_t blocks_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

struct ProductBlocks {
  int64_t row_block, column_block;  // sizes
  int64_t row_blocks, column_blocks;

  int64_t count() const { return row_blocks * column_blocks; }
};

// Blocks are smaller where large ones would be too few for all threads to be busy to the end. Twins
// share the room of one.
inline ProductBlocks product_blocks(const Product& p) {
  ProductBlocks blocks{kRowBlock, p.twin ? kColumnBlock / 2 : kColumnBlock, 0, 0};
  const auto cut = [&] {
    blocks.row_blocks = blocks_of(p.rows, blocks.row_block);
    blocks.column_blocks = blocks_of(p.columns, blocks.column_block);
  };
  cut();
  const int64_t enough = 4 * worker_limit();
  while (blocks.count() < enough && blocks.column_block > kPanelColumns) {
    blocks.column_block /= 2;
    cut();
  }
  while (blocks.count() < enough && blocks.row_block > kRowsAtOnce / 2) {
    blocks.row_block /= 2;
    cut();
  }
  return blocks;
}

// Products of so few rows read B once and A from the first-level cache: nothing is packed.
constexpr int64_t kFewRows = 16;
constexpr int64_t kFewColumns = 64;  // of a piece of work

inline bool takes_few_rows(const Product& p) {
  return p.rows <= kFewRows && p.panels == nullptr && p.b.row == 1 &&
         (!p.twin || p.twin_b.row == 1) && !p.sum;
}

// A product of one row with B in rows adds up these rows, part by part: the parts' sums are kept,
// and added in order.
inline bool takes_one_row(const Product& p) {
  return p.rows == 1 && p.panels == nullptr && p.b.column == 1 && !takes_few_rows(p) && !p.twin &&
         !p.sum;
}
struct RowParts {
  int64_t depth, count;  // steps of K of a part, and how many parts there are
};
inline RowParts row_parts(const Product& p) {
  constexpr int64_t kMostParts = 8, kLeastDepth = 64;
  const int64_t depth = std::max(kLeastDepth, (blocks_of(p.depth, kMostParts) + 1) / 2 * 2);
  return {depth, blocks_of(p.depth, depth)};
}

// A product of so few steps of K that goes into a tensor as it is has both operands packed, as
// floats.
constexpr int64_t kFewSteps = 16;
inline bool takes_few_steps(const Product& p) {
  return p.depth > 0 && p.depth <= kFewSteps && p.panels == nullptr && !p.twin && !p.sum;
}

// Returns the size of the scratch memory in floats, for all workers.
inline int64_t product_scratch(const Product& p) {
  // Whether the product goes into a tensor as it is, is not known here.
  const int64_t steps =
      takes_few_steps(p) ? p.depth * (padded_columns(p.rows) + padded_columns(p.columns)) : 0;
  if (takes_few_rows(p)) return std::max(steps, kFewRows * padded_columns(p.depth));
  if (takes_one_row(p)) {
    // A product of no steps of K has no part, but needs a row of zeros.
    const int64_t rows_of_sums = std::max<int64_t>(row_parts(p).count, 1);
    const int64_t sums = rows_of_sums * padded_columns(p.columns);
    return std::max(steps, padded_columns(p.depth) + sums);
  }
  const int64_t workers = std::min(worker_limit(), product_blocks(p).count());
  return std::max(steps, workers * ProductScratch::kFloats);
}

// Returns how many columns the blocks have that `finish` is given: it may keep something for each.
inline int64_t columns_at_once(const Product& p) {
  if (takes_one_row(p)) return kColumnBlock;
  return takes_few_rows(p) ? kFewColumns : product_blocks(p).column_block;
}
inline int64_t rows_at_once(const Product& p) {
  if (takes_one_row(p)) return 1;
  return takes_few_rows(p) ? kFewRows : product_blocks(p).row_block;
}

inline MatrixView transposed(const MatrixView& m) { return {m.data, m.dtype, m.column, m.row}; }
inline MatrixView matrix_view(const Tensor& t) {
  return {t.data, t.dtype, t.stride(0), t.stride(1)};
}

}  // namespace fk::cpu
