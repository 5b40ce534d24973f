// Calls of the matrix product for any architecture: which kernel, with which tile, and into how
// many parts K is split.
#include <algorithm>

#include "cuda/gemm/portable_float.cuh"
#include "cuda/gemm/portable_product.cuh"

namespace fk::cuda {

namespace {

bool tensor_has_vectors(const Tensor& t, DType dtype) {
  const int64_t width = 16 / size_of(dtype);
  bool fits = t.dtype == dtype && t.stride(-1) == 1 && t.size(-1) % width == 0;
  for (int i = 0; i + 1 < t.ndim; ++i) fits &= t.shape[i] == 1 || t.strides[i] % width == 0;
  return fits && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

bool lies_by_columns(const Tensor& t) {
  return t.ndim == 2 && t.stride(-1) != 1 && t.stride(0) == 1 && t.shape[1] > 1;
}

Tensor turned(const Tensor& t) {
  Tensor other = t;
  std::swap(other.shape[0], other.shape[1]);
  std::swap(other.strides[0], other.strides[1]);
  return other;
}

OperandPart part_of(const Tensor& t) {
  return {t.data, t.dtype == DType::kFloat32, rows_of(t), t.stride(-1)};
}

// Whether a result or a residual is stored and loaded in vectors that begin at multiples of `width`
// columns.
bool result_in_vectors(const ProductResult& r, int width) {
  if (r.data == nullptr) return true;
  bool fits = r.column == 1 && reinterpret_cast<uintptr_t>(r.data) % 16 == 0;
  for (int i = 0; i < r.rows.ndim; ++i) fits &= r.rows.strides[i] % width == 0;
  return fits;
}

// Few tiles leave multiprocessors idle: K is split until there are about two blocks for each, as
// long as each part is worth its store and load.
int splits_of(int64_t blocks, int64_t slices, int multiprocessors) {
  constexpr int64_t kLeastSlices = 16, kMost = 16;
  const int64_t wanted = 2 * multiprocessors / std::max<int64_t>(blocks, 1);
  return static_cast<int>(std::max<int64_t>(1, std::min({wanted, slices / kLeastSlices, kMost})));
}

// The blocks of a product: columns count both of a pair.
struct Blocks {
  int64_t rows, columns, tile_rows, tile_columns;

  int64_t count() const { return ceil_div(rows, tile_rows) * ceil_div(columns, tile_columns); }
};

int64_t product_columns(int64_t columns, bool gated, int64_t block) {
  return gated ? ceil_div(columns, block) * block * 2 : columns;
}

bool uses_tensor_cores(DType dtype, int device) {
  return dtype == DType::kFloat16 || device_properties(device).code >= 80;
}

struct Choice {
  bool large = false;
  int splits = 1;

  Choice(int64_t rows, int64_t columns, int64_t depth, DType dtype, int device) {
    const int multiprocessors = device_properties(device).multiprocessors;
    const int64_t large_columns = dtype == DType::kFloat32 ? 64 : 128;
    large = uses_tensor_cores(dtype, device) &&
            Blocks{rows, columns, 128, large_columns}.count() >= multiprocessors;
    if (large) return;
    const int64_t slices = ceil_div(depth * size_of(dtype), int64_t{64});
    splits = splits_of(Blocks{rows, columns, 64, 64}.count(), slices, multiprocessors);
  }
};

// A step of few rows is a slice, and each of a block's eight warps wants some.
int splits_of_few_rows(int64_t columns, int64_t depth, DType dtype, int device) {
  const int64_t slices = ceil_div(depth * size_of(dtype), int64_t{64});
  return splits_of(ceil_div(columns, int64_t{16}), slices / 4,
                   device_properties(device).multiprocessors);
}

template <class T, class Tile, Major kA, Major kB>
Status launch_product(const PortableArguments& f, int device, cudaStream_t stream) {
  using Plan = PortablePlan<T, Tile>;
  const LaunchShape shape{{static_cast<unsigned>(f.order.count()), static_cast<unsigned>(f.splits)},
                          {Plan::kThreads},
                          Plan::shared_bytes(device_properties(device).code)};
  const void* const arguments[] = {&f};
  // Not early: for Hopper, these kernels are compiled as for sm_80 (build.cmake).
  return launch(reinterpret_cast<const void*>(portable_product<T, Tile, kA, kB>),
                "portable_product", shape, stream, arguments, false);
}

template <class T, class Tile>
Status launch_tile(PortableArguments f, int device, cudaStream_t stream) {
  constexpr int kRowsTogether = 8;  // of tiles, that share columns of B in the L2 cache
  const int64_t columns = product_columns(f.columns, f.gated, 8);
  f.order = {static_cast<int>(ceil_div(f.rows, int64_t{Tile::kRows})),
             static_cast<int>(ceil_div(columns, int64_t{Tile::kColumns})), kRowsTogether};
  // A across its rows and B along them: nobody has that, so A's elements are taken one by one.
  if (!f.a.rows_are_outer && f.b.rows_are_outer) f.a.in_vectors = false;
  const bool a_outer = !f.a.rows_are_outer && f.a.in_vectors;
  const bool b_outer = !f.b.rows_are_outer;
  if (a_outer) return launch_product<T, Tile, Major::kOuter, Major::kOuter>(f, device, stream);
  if (!f.a.rows_are_outer) f.a.in_vectors = false;
  if (b_outer) return launch_product<T, Tile, Major::kK, Major::kOuter>(f, device, stream);
  return launch_product<T, Tile, Major::kK, Major::kK>(f, device, stream);
}

template <class T>
Status launch_in_float(PortableArguments f, cudaStream_t stream) {
  const int64_t columns = product_columns(f.columns, f.gated, 8);
  f.order = {static_cast<int>(ceil_div(f.rows, int64_t{64})),
             static_cast<int>(ceil_div(columns, int64_t{64})), 8};
  const LaunchShape shape{{static_cast<unsigned>(f.order.count()), static_cast<unsigned>(f.splits)},
                          {FloatUnitsTile::kThreads}};
  const void* const arguments[] = {&f};
  return launch(reinterpret_cast<const void*>(portable_product_in_float<T>),
                "portable_product_in_float", shape, stream, arguments, false);
}

Status launch_chosen(const PortableArguments& f, bool large, DType dtype, int device,
                     cudaStream_t stream) {
  if (!uses_tensor_cores(dtype, device) || (f.on_float_units && dtype == DType::kFloat32)) {
    return dtype == DType::kFloat32 ? launch_in_float<float>(f, stream)
                                    : launch_in_float<__nv_bfloat16>(f, stream);
  }
  if (dtype == DType::kFloat32) {
    return large ? launch_tile<float, LargeFloatTile>(f, device, stream)
                 : launch_tile<float, SmallTile>(f, device, stream);
  }
  if (dtype == DType::kFloat16) {
    return large ? launch_tile<__half, LargeTile>(f, device, stream)
                 : launch_tile<__half, SmallTile>(f, device, stream);
  }
  return large ? launch_tile<__nv_bfloat16, LargeTile>(f, device, stream)
               : launch_tile<__nv_bfloat16, SmallTile>(f, device, stream);
}

}  // namespace

ProductOperand operand(const Tensor& t, bool rows_are_outer, DType dtype) {
  const bool turn = lies_by_columns(t);
  const Tensor& as = turn ? turned(t) : t;
  ProductOperand o;
  o.parts[0] = part_of(as);
  o.rows_are_outer = rows_are_outer != turn;
  o.in_vectors = tensor_has_vectors(as, dtype);
  return o;
}

ProductOperand stacked(const Tensor& first, const Tensor& second, bool rows_are_outer,
                       DType dtype) {
  if (!second) return operand(first, rows_are_outer, dtype);
  ProductOperand o;
  o.parts[0] = part_of(first);
  o.parts[1] = part_of(second);
  o.first_rows = first.size(0);
  o.rows_are_outer = rows_are_outer;
  o.in_vectors = tensor_has_vectors(first, dtype) && tensor_has_vectors(second, dtype);
  return o;
}

ProductResult result(const Tensor& t) {
  if (!t) return {};
  return {t.data, t.dtype == DType::kFloat32, rows_of(t), t.stride(-1)};
}

bool results_in_vectors(const PortableArguments& f, DType dtype) {
  const int width = 16 / size_of(dtype);
  return result_in_vectors(f.out, width) && result_in_vectors(f.before, width) &&
         result_in_vectors(f.before_up, width) && result_in_vectors(f.residual, width);
}

int64_t partial_floats(int64_t rows, int64_t columns, int64_t depth, bool gated, DType dtype,
                       int device) {
  const int64_t all = product_columns(columns, gated, 8);
  int splits = Choice(rows, all, depth, dtype, device).splits;
  if (rows <= kFewRows) splits = std::max(splits, splits_of_few_rows(all, depth, dtype, device));
  return splits == 1 ? 0 : splits * rows * ceil_div(all, int64_t{8}) * 8;
}

Status multiply(PortableArguments f, DType dtype, int device, float* workspace,
                cudaStream_t stream) {
  bool normed;
  return multiply(f, nullptr, dtype, device, workspace, stream, &normed);
}

Status multiply(PortableArguments f, const RowNorm* norm, DType dtype, int device, float* workspace,
                cudaStream_t stream, bool* normed) {
  *normed = false;
  if (f.rows == 0 || f.columns == 0) return {};
  const int64_t columns = product_columns(f.columns, f.gated, 8);
  if (Blocks{f.rows, columns, 64, 64}.count() > INT32_MAX) {
    return unsupported("the result has more than 2^43 elements");
  }
  f.results_in_vectors = results_in_vectors(f, dtype);
  // A chunk of 16 bytes must not hold the last of the gates and the first of the others.
  if (f.gated && !f.b.rows_are_outer && f.columns % 8 != 0) f.b.in_vectors = false;
  const bool few = f.rows <= kFewRows && uses_tensor_cores(dtype, device) && !f.on_float_units &&
                   f.a.in_vectors && f.b.in_vectors && f.a.rows_are_outer && f.b.rows_are_outer;
  const Choice choice(f.rows, columns, f.depth, dtype, device);
  if (workspace != nullptr) {
    f.splits = few ? splits_of_few_rows(columns, f.depth, dtype, device) : choice.splits;
  }
  if (f.splits > 1) {
    f.partials = workspace;
    f.partial_width = ceil_div(columns, int64_t{8}) * 8;
  }
  *normed = norm != nullptr && (few || f.splits > 1) && holds_rows(f, *norm, dtype);
  if (*normed && f.splits == 1) return finish_with_norm(f, *norm, dtype, stream);
  FK_RETURN_IF_ERROR(few ? multiply_few_rows(f, dtype, stream)
                         : launch_chosen(f, choice.large, dtype, device, stream));
  if (*normed) return finish_with_norm(f, *norm, dtype, stream);
  return f.splits > 1 ? finish_splits(f, dtype, stream) : Status();
}

}  // namespace fk::cuda
