// Calls of Hopper's matrix product: which tile, how many parts of K, and the descriptors of copies.
#include <algorithm>

#include "cuda/gemm/portable_call.cuh"
#include "cuda/gemm/sm90_product.cuh"
#include "ops/linear/sm90/call.h"
#include "ops/linear/sm90/few_rows.h"

namespace fk::cuda_sm90 {

namespace {

using cuda::Major;

// The narrow tile has the shorter epilogue, the wide one needs less of the L2 cache. Pairs take the
// narrow one.
struct NarrowTile {
  static constexpr int kColumns = 128, kStages = 5, kRoom = 2;
  static constexpr bool kShared = false;
};
struct WideTile {
  static constexpr int kColumns = 192, kStages = 4, kRoom = 1;
  static constexpr bool kShared = false;
};
// This tile is taken where a block has only one, whose epilogue nothing hides.
struct SharedTile {
  static constexpr int kColumns = 128, kStages = 5, kRoom = 2;
  static constexpr bool kShared = true;
};

constexpr int kLongDepth = 4096;
constexpr int kRowsTogether = 4;  // of tiles, that share columns of B in the L2 cache
constexpr int64_t kMaxSize = int64_t{1} << 30;
constexpr int64_t kDepth = 64;      // of a slice of K
constexpr int64_t kGateBlock = 64;  // half a tile

int64_t product_columns(int64_t columns, bool gated) {
  return gated ? ceil_div(columns, kGateBlock) * kGateBlock * 2 : columns;
}

// Fewer tiles than half of the multiprocessors share them by parts of K of at least eight slices:
// a part costs a store and a load of its sums.
struct Parts {
  int count = 1, slices_each = 0;

  Parts(int64_t rows, int64_t product_columns, int64_t slices, int device) {
    constexpr int64_t kLeastSlices = 8, kMost = 16;
    const int64_t tiles = ceil_div(rows, int64_t{128}) * ceil_div(product_columns, int64_t{128});
    const int64_t room = cuda::device_properties(device).multiprocessors / tiles;
    const int64_t wanted = std::min({room, slices / kLeastSlices, kMost});
    const int64_t each = wanted < 2 ? slices : ceil_div(slices, wanted);
    slices_each = static_cast<int>(each);
    count = static_cast<int>(ceil_div(slices, each));
  }
};

// A product's operand: its outer dimension and which way it lies.
Status operand_map(CUtensorMap* map, const Matrix& m, DType dtype, Major major, int outer) {
  cuda::TensorMapShape shape;
  shape.dims = 2;
  shape.sizes[0] = m.columns;
  shape.sizes[1] = m.rows;
  shape.strides[1] = m.stride * size_of(dtype);
  shape.box[0] = 64;
  shape.box[1] = major == Major::kK ? outer : 64;
  return cuda::make_tensor_map(map, m.data, dtype, shape);
}

Status result_map(CUtensorMap* map, const Tensor& t) {
  if (!t) return {};
  cuda::TensorMapShape shape;
  shape.dims = 2;
  shape.sizes[0] = t.size(-1);
  shape.sizes[1] = rows_of(t).count;
  shape.strides[1] = rows_of(t).last_stride * size_of(t.dtype);
  shape.box[0] = shape.box[1] = 64;
  return cuda::make_tensor_map(map, t.data, t.dtype, shape);
}

cuda::PlainMatrix plain(const Tensor& t) {
  if (!t) return {};
  return {t.data, t.dtype, rows_of(t).last_stride, t.stride(-1)};
}

// What adds up parts takes their results as they are.
cuda::PortableArguments sums_of(const Product& p, const ProductArguments& f) {
  cuda::PortableArguments sums;
  sums.out = cuda::result(p.out);
  sums.before = cuda::result(p.before);
  sums.before_up = cuda::result(p.before_up);
  sums.residual = cuda::result(p.residual);
  sums.rows = p.rows;
  sums.columns = p.columns;
  sums.gated = p.gated;
  sums.epilogue = p.epilogue;
  sums.results_in_vectors = cuda::results_in_vectors(sums, p.dtype);
  sums.splits = f.splits;
  sums.partials = f.partials;
  sums.partial_width = f.partial_width;
  sums.gate_block = kGateBlock;
  return sums;
}

template <class T, class Tile, Major kA, Major kB>
Status launch(ProductArguments f, const Product& p, int device, cudaStream_t stream) {
  using Plan = ProductPlan<Tile>;
  constexpr int kColumns = Plan::kColumns;
  FK_RETURN_IF_ERROR(operand_map(&f.a, p.a, p.dtype, kA, Plan::kRows));
  FK_RETURN_IF_ERROR(operand_map(&f.b, p.b, p.dtype, kB, p.gated ? kColumns / 2 : kColumns));
  if (p.second_a.data != nullptr) {
    FK_RETURN_IF_ERROR(operand_map(&f.second_a, p.second_a, p.dtype, kA, Plan::kRows));
  }
  if (p.second_b.data != nullptr) {
    FK_RETURN_IF_ERROR(
        operand_map(&f.second_b, p.second_b, p.dtype, kB, p.gated ? kColumns / 2 : kColumns));
  }
  f.order = {static_cast<int>(ceil_div(f.rows, Plan::kRows)),
             static_cast<int>(ceil_div(f.columns, kColumns)), kRowsTogether};
  const int blocks = std::min(cuda::device_properties(device).multiprocessors, f.items());
  return cuda::launch_early(matrix_product<T, Tile, kA, kB>, "matrix_product",
                            {{static_cast<unsigned>(blocks)}, {Plan::kThreads}, Plan::kSharedBytes},
                            stream, f);
}

// The tile with which the last multiprocessor ends first; as measured where both are even.
bool takes_wide(const ProductArguments& f, int multiprocessors) {
  if (f.gated || f.splits > 1) return false;
  const auto time = [&](int columns) {
    const int64_t tiles = int64_t{(f.rows + 127) / 128} * ((f.columns + columns - 1) / columns);
    return (tiles + multiprocessors - 1) / multiprocessors * columns;
  };
  const int64_t wide = time(WideTile::kColumns), narrow = time(NarrowTile::kColumns);
  if (wide != narrow) return wide < narrow;
  return f.slices * kDepth >= kLongDepth || f.epilogue.activation == Activation::kNone;
}

template <Major kA, Major kB>
Status launch_tile(const ProductArguments& f, const Product& p, int device, cudaStream_t stream) {
  const int multiprocessors = cuda::device_properties(device).multiprocessors;
  const auto with = [&](auto type) {
    using T = decltype(type);
    const int64_t narrow = ceil_div(f.rows, 128) * ceil_div(f.columns, 128) * f.splits;
    if (narrow <= multiprocessors) return launch<T, SharedTile, kA, kB>(f, p, device, stream);
    return takes_wide(f, multiprocessors) ? launch<T, WideTile, kA, kB>(f, p, device, stream)
                                          : launch<T, NarrowTile, kA, kB>(f, p, device, stream);
  };
  return p.dtype == DType::kFloat16 ? with(__half()) : with(__nv_bfloat16());
}

}  // namespace

Status set_results(ProductArguments* f, const Product& p) {
  if (p.gated || (engine_takes(p.out, p.dtype) && engine_takes(p.before, p.dtype) &&
                  engine_takes(p.residual, p.dtype))) {
    f->has_before = p.before.defined;
    f->has_residual = p.residual.defined;
    FK_RETURN_IF_ERROR(result_map(&f->out, p.out));
    FK_RETURN_IF_ERROR(result_map(&f->before, p.before));
    FK_RETURN_IF_ERROR(result_map(&f->before_up, p.before_up));
    return result_map(&f->residual, p.residual);
  }
  f->plain_out = plain(p.out);
  f->plain_before = plain(p.before);
  f->plain_residual = plain(p.residual);
  return {};
}

bool engine_takes(const Tensor& t, DType dtype) {
  if (!t) return true;
  const Rows r = rows_of(t);
  return t.size(-1) * size_of(dtype) % 16 == 0 && t.dtype == dtype && r.ndim <= 1 &&
         (t.stride(-1) == 1 || t.size(-1) == 1) &&
         cuda::tensor_map_takes(r.count, r.last_stride * size_of(dtype)) &&
         reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

bool takes(const Tensor& x, const Tensor& weight) {
  if (x.dtype != DType::kFloat16 && x.dtype != DType::kBFloat16) return false;
  if (cuda::device_properties(x.device_id).code < 90) return false;
  for (const int64_t size : {rows_of(x).count, weight.size(0), weight.size(1)}) {
    if (size == 0 || size > kMaxSize) return false;
  }
  // Tiles are counted in ints.
  return (rows_of(x).count / 128 + 1) * (weight.size(0) / 128 + 1) < kMaxSize &&
         (rows_of(x).count / 128 + 1) * (weight.size(1) / 128 + 1) < kMaxSize;
}

bool in_vectors_but_for_address(Tensor t, DType dtype) {
  t.data = nullptr;
  return t.stride(-1) == 1 && cuda::operand(t, true, dtype).in_vectors;
}

bool few_rows(const Tensor& x) {
  return rows_of(x).count <= cuda::kFewRows && in_vectors_but_for_address(x, x.dtype);
}

int64_t partial_floats(int64_t rows, int64_t columns, int64_t depth, bool gated, int pairs,
                       int device) {
  if (rows == 0 || columns == 0 || depth == 0) return 0;
  const int64_t all = product_columns(columns, gated);
  const Parts parts(rows, all, pairs * ceil_div(depth, kDepth), device);
  return parts.count == 1 ? 0 : parts.count * rows * ceil_div(all, int64_t{8}) * 8;
}

Status multiply(const Product& p, int device, cudaStream_t stream) {
  if (p.rows <= most_few_rows(p.dtype) && p.second_a.data == nullptr && p.a_major == Major::kK) {
    return multiply_few_rows(p, p.dtype, nullptr, device, stream);
  }
  ProductArguments f = {};
  const int64_t columns = product_columns(p.columns, p.gated);
  const bool continues = p.second_a.data != nullptr;
  f.rows = static_cast<int>(p.rows);
  f.columns = static_cast<int>(columns);
  f.gated = p.gated;
  f.first_slices = static_cast<int>(ceil_div(p.depth, kDepth));
  f.slices = continues ? 2 * f.first_slices : f.first_slices;
  const Parts parts(p.rows, columns, f.slices, device);
  f.splits = parts.count;
  f.slices_each = parts.slices_each;
  if (parts.count > 1) {
    f.partials = p.partials;
    f.partial_width = ceil_div(columns, int64_t{8}) * 8;
  } else {
    f.epilogue = p.epilogue;
    FK_RETURN_IF_ERROR(set_results(&f, p));
  }
  if (p.a_major == Major::kOuter) {
    FK_RETURN_IF_ERROR((launch_tile<Major::kOuter, Major::kOuter>(f, p, device, stream)));
  } else if (p.b_major == Major::kOuter) {
    FK_RETURN_IF_ERROR((launch_tile<Major::kK, Major::kOuter>(f, p, device, stream)));
  } else {
    FK_RETURN_IF_ERROR((launch_tile<Major::kK, Major::kK>(f, p, device, stream)));
  }
  return parts.count > 1 ? cuda::finish_splits(sums_of(p, f), p.dtype, stream) : Status();
}

}  // namespace fk::cuda_sm90
