// Calls of the matrix product for any architecture, C[m, n] = sum over k of A[m, k] B[n, k], whose
// kernels are compiled once for all ops: portable_product.cu has the tiles, few_rows.cu what
// streams B past a few rows of A, and what adds up the parts of a product whose K was split.
//
// Products whose results are few tiles split K among blocks, which leave their sums in the
// workspace; the parts are added in a fixed order, so results are the same every time. `multiply`
// splits nothing where it is given no memory.
#pragma once

#include "core/rows.h"
#include "cuda/convert.cuh"
#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/tile_order.cuh"
#include "cuda/launch.h"

namespace fk::cuda {

// Rows of one tensor.
struct OperandPart {
  const void* data = nullptr;
  bool is_float = false;  // else of the product's type
  Rows rows;
  int64_t column = 0;  // stride
};

// A or B as it lies. Either rows are the outer dimension (M or N) and K runs along them, or the
// other way round. From row `first_rows` on they are those of a second tensor: two weights are read
// as if they were stacked.
struct ProductOperand {
  OperandPart parts[2];
  int64_t first_rows = INT64_MAX;
  bool rows_are_outer = true;
  bool in_vectors = false;  // 16 bytes of a row can be read at once, wherever a tile begins

  template <class T>
  __device__ __forceinline__ const T* at(int64_t outer, int64_t k) const {
    const int64_t row = rows_are_outer ? outer : k, column = rows_are_outer ? k : outer;
    const OperandPart& part = parts[row >= first_rows];
    const int64_t r = row >= first_rows ? row - first_rows : row;
    return static_cast<const T*>(part.data) + part.rows.offset(r) + column * part.column;
  }
  // An element, which may be of float where T is not.
  template <class T>
  __device__ __forceinline__ T element(int64_t outer, int64_t k) const {
    const int64_t row = rows_are_outer ? outer : k;
    const bool is_float = parts[row >= first_rows].is_float;
    return is_float ? from_float<T>(*at<float>(outer, k)) : *at<T>(outer, k);
  }
};

// A matrix of results, or of what is added to them. The rows may be those of any tensor.
struct ProductResult {
  void* data = nullptr;  // null: not there
  bool is_float = false;
  Rows rows;
  int64_t column = 0;
};

struct PortableArguments {
  ProductOperand a, b;
  ProductResult out, before, before_up, residual;
  int64_t rows = 0, columns = 0, depth = 0;  // columns: of the output
  // B has two rows for each output column n, a gate's and, `columns` further, another:
  // out = act(A gate^T) * (A up^T).
  bool gated = false;
  // Floats are multiplied on FMA units, also where there are tensor cores for them: three products
  // of parts there have some more rounding errors than one product.
  bool on_float_units = false;
  Epilogue epilogue;

  // This is what `multiply` finds out.
  TileOrder order;
  bool results_in_vectors = false;
  int splits = 1;             // of K
  float* partials = nullptr;  // the sums of each split: `rows` rows of partial_width floats
  int64_t partial_width = 0;
  int gate_block =
      8;  // so many columns of gates, then those of the others, in products and partials
};

// A tensor's rows as an operand that is multiplied as `dtype`, or as a result. A matrix whose
// columns are contiguous instead of its rows is taken the other way round.
ProductOperand operand(const Tensor& t, bool rows_are_outer, DType dtype);
// The rows of `second` follow upon those of `first`.
ProductOperand stacked(const Tensor& first, const Tensor& second, bool rows_are_outer, DType dtype);
ProductResult result(const Tensor& t);

// How many floats of workspace a product takes at most.
int64_t partial_floats(int64_t rows, int64_t columns, int64_t depth, bool gated, DType dtype,
                       int device);

// Computes the product with its epilogue; operands are multiplied as `dtype`.
Status multiply(PortableArguments f, DType dtype, int device, float* workspace,
                cudaStream_t stream);

// The same, and the norm of the results' rows (gemm/row_norm.cuh) where `*normed` says so
// afterwards: of a few rows, or where K is split, if the rows are not too long.
struct RowNorm;
Status multiply(PortableArguments f, const RowNorm* norm, DType dtype, int device, float* workspace,
                cudaStream_t stream, bool* normed);

// Adds up the partials of f.splits parts and does the epilogue.
Status finish_splits(const PortableArguments& f, DType dtype, cudaStream_t stream);

// Tells whether results go out in vectors of 16 bytes.
bool results_in_vectors(const PortableArguments& f, DType dtype);

// At most so many rows of A are multiplied while B streams past them, where B is of 16 bits or
// there are tensor cores for float (few_rows.cu). It asks for both operands in_vectors, with K
// along their rows.
constexpr int kFewRows = 16;
Status multiply_few_rows(const PortableArguments& f, DType dtype, cudaStream_t stream);

// Tells whether a norm can be written by the kernel of few rows (f.splits is 1), or by what adds up
// parts; and the launch of that.
bool holds_rows(const PortableArguments& f, const RowNorm& norm, DType dtype);
Status finish_with_norm(const PortableArguments& f, const RowNorm& norm, DType dtype,
                        cudaStream_t stream);

}  // namespace fk::cuda
