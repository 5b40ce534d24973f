// linear on Hopper: which calls, with which tiles and in which order. The kernel is
// cuda/gemm/sm90_product.cuh.
#include <algorithm>

#include "core/rows.h"
#include "cuda/gemm/sm90_product.cuh"
#include "cuda/launch.h"
#include "cuda/tma.h"
#include "ops/linear/cuda_inner.h"

namespace fk::cuda_sm90 {

namespace {

using cuda::Major;

// The narrow tile has the shorter epilogue, the wide one needs less of the L2 cache.
struct NarrowTile {
  static constexpr int kColumns = 128, kStages = 5, kRoom = 2;
};
struct WideTile {
  static constexpr int kColumns = 192, kStages = 4, kRoom = 1;
};

constexpr int kLongDepth = 4096;
constexpr int kRowsTogether = 4;  // of tiles, that share columns of B in the L2 cache
constexpr int64_t kMaxSize = int64_t{1} << 30;

// A tensor's rows as one matrix whose rows the copy engine can fetch, in place or, where strides or
// dtype do not allow that, copied into the workspace.
struct Matrix {
  void* data = nullptr;
  int64_t rows = 0, columns = 0, stride = 0;
  bool copied = false;

  Matrix(const Tensor& t, DType dtype, WorkspaceParts& parts) {
    const Rows r = rows_of(t);
    data = t.data;
    rows = r.count;
    columns = t.size(-1);
    stride = r.last_stride;
    copied = t.dtype != dtype || r.ndim > 1 || (t.stride(-1) != 1 && columns != 1) ||
             !cuda::tensor_map_takes(rows, stride * size_of(dtype));
    if (!copied) return;
    stride = cuda::linear::padded(columns);
    data = parts.take<char>(rows * stride * size_of(dtype));
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

// Whether a result, or a residual, goes through the copy engine. It stores whole units of 16 bytes,
// also where a row ends inside one and what follows belongs to somebody else.
bool engine_takes(const Tensor& t, DType dtype) {
  if (!t) return true;
  const Rows r = rows_of(t);
  return t.size(-1) * size_of(dtype) % 16 == 0 && t.dtype == dtype && r.ndim <= 1 &&
         (t.stride(-1) == 1 || t.size(-1) == 1) &&
         cuda::tensor_map_takes(r.count, r.last_stride * size_of(dtype)) &&
         reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
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

struct Results {
  const Tensor &out, &before, &residual;
};

Status set_results(ProductArguments* f, const Results& r, DType dtype) {
  if (engine_takes(r.out, dtype) && engine_takes(r.before, dtype) &&
      engine_takes(r.residual, dtype)) {
    f->has_before = r.before.defined;
    f->has_residual = r.residual.defined;
    FK_RETURN_IF_ERROR(result_map(&f->out, r.out));
    FK_RETURN_IF_ERROR(result_map(&f->before, r.before));
    return result_map(&f->residual, r.residual);
  }
  f->plain_out = plain(r.out);
  f->plain_before = plain(r.before);
  f->plain_residual = plain(r.residual);
  return {};
}

struct Call {
  const Matrix &a, &b;
  DType dtype;
  int device;
  cudaStream_t stream;
};

template <class T, class Tile, Major kA, Major kB>
Status launch(ProductArguments f, const Call& call) {
  using Plan = ProductPlan<Tile>;
  FK_RETURN_IF_ERROR(operand_map(&f.a, call.a, call.dtype, kA, Plan::kRows));
  FK_RETURN_IF_ERROR(operand_map(&f.b, call.b, call.dtype, kB, Plan::kColumns));
  const auto tiles = [](int size, int tile) { return (size + tile - 1) / tile; };
  f.order = {tiles(f.rows, Plan::kRows), tiles(f.columns, Plan::kColumns), kRowsTogether};
  const int blocks =
      std::min(cuda::device_properties(call.device).multiprocessors, f.order.count());
  return cuda::launch_early(matrix_product<T, Tile, kA, kB>, "matrix_product",
                            {{static_cast<unsigned>(blocks)}, {Plan::kThreads}, Plan::kSharedBytes},
                            call.stream, f);
}

// The tile with which the last multiprocessor ends first; as measured where both are even.
bool takes_wide(const ProductArguments& f, int multiprocessors) {
  const auto time = [&](int columns) {
    const int64_t tiles = int64_t{(f.rows + 127) / 128} * ((f.columns + columns - 1) / columns);
    return (tiles + multiprocessors - 1) / multiprocessors * columns;
  };
  const int64_t wide = time(WideTile::kColumns), narrow = time(NarrowTile::kColumns);
  if (wide != narrow) return wide < narrow;
  return f.depth >= kLongDepth || f.epilogue.activation == Activation::kNone;
}

template <Major kA, Major kB>
Status multiply(const ProductArguments& f, const Call& call) {
  const bool wide = takes_wide(f, cuda::device_properties(call.device).multiprocessors);
  if (call.dtype == DType::kFloat16) {
    return wide ? launch<__half, WideTile, kA, kB>(f, call)
                : launch<__half, NarrowTile, kA, kB>(f, call);
  }
  return wide ? launch<__nv_bfloat16, WideTile, kA, kB>(f, call)
              : launch<__nv_bfloat16, NarrowTile, kA, kB>(f, call);
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

// One row after another, as the threads' stores need them.
bool in_even_rows(const Tensor& t) { return !t || rows_of(t).ndim <= 1; }

bool aligned(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data) % 16 == 0; }

struct ForwardParts {
  WorkspaceParts parts;
  Matrix x, weight;

  ForwardParts(const LinearFwd& a, void* memory)
      : parts(memory), x(a.x, a.x.dtype, parts), weight(a.weight, a.x.dtype, parts) {}
};

struct BackwardParts {
  WorkspaceParts parts;
  Matrix dy, x, weight;
  float* sums = nullptr;
  void* inner = nullptr;

  BackwardParts(const LinearBwd& a, void* memory)
      : parts(memory),
        dy(a.dy, a.x.dtype, parts),
        x(a.x, a.x.dtype, parts),
        weight(a.weight, a.x.dtype, parts) {
    const int64_t width = cuda::linear::padded(dy.columns);
    if (a.activation != 0) inner = parts.take<char>(dy.rows * width * size_of(a.x.dtype));
    if (a.dbias) sums = parts.take(cuda::linear::bias_pieces(dy.rows, dy.columns) * width);
  }

  // What is multiplied: the inner gradient, or dy itself.
  Matrix gradient() const {
    Matrix g = dy;
    if (inner == nullptr) return g;
    g.data = inner;
    g.stride = cuda::linear::padded(dy.columns);
    return g;
  }
};

Status copy_if_needed(const Matrix& m, const Tensor& from, DType dtype, cudaStream_t stream) {
  return m.copied ? cuda::linear::copy_matrix(from, dtype, m.data, stream) : Status();
}

ProductArguments product(int64_t rows, int64_t columns, int64_t depth) {
  ProductArguments f = {};
  f.rows = static_cast<int>(rows);
  f.columns = static_cast<int>(columns);
  f.depth = static_cast<int>(depth);
  return f;
}

}  // namespace

bool accepts(const LinearFwd& a) {
  return a.y && takes(a.x, a.weight) && in_even_rows(a.y) && in_even_rows(a.before) &&
         in_even_rows(a.residual);
}

bool accepts(const LinearBwd& a) {
  return takes(a.x, a.weight) && in_even_rows(a.dx) && in_even_rows(a.dweight);
}

size_t workspace(const LinearFwd& a) { return ForwardParts(a, nullptr).parts.bytes(); }

size_t workspace(const LinearBwd& a) {
  // Also what the portable kernel needs, which takes calls with addresses the copy engine cannot.
  return std::max(BackwardParts(a, nullptr).parts.bytes(), cuda::workspace(a));
}

Status run(const LinearFwd& a, const Exec& exec) {
  const ForwardParts parts(a, exec.workspace());
  if ((!parts.x.copied && !aligned(a.x)) || (!parts.weight.copied && !aligned(a.weight))) {
    return cuda::run(a, exec);
  }
  const cudaStream_t stream = cuda::stream_of(exec);
  const DType dtype = a.x.dtype;
  FK_RETURN_IF_ERROR(copy_if_needed(parts.x, a.x, dtype, stream));
  FK_RETURN_IF_ERROR(copy_if_needed(parts.weight, a.weight, dtype, stream));
  ProductArguments f = product(parts.x.rows, parts.weight.rows, parts.x.columns);
  f.epilogue.activation = static_cast<Activation>(a.activation);
  if (a.bias) {
    f.epilogue.bias = a.bias.data;
    f.epilogue.float_bias = a.bias.dtype == DType::kFloat32;
    f.epilogue.bias_stride = a.bias.stride(0);
  }
  FK_RETURN_IF_ERROR(set_results(&f, {a.y, a.before, a.residual}, dtype));
  return multiply<Major::kK, Major::kK>(f, {parts.x, parts.weight, dtype, a.x.device_id, stream});
}

Status run(const LinearBwd& a, const Exec& exec) {
  const BackwardParts parts(a, exec.workspace());
  const bool reads_dy = parts.inner == nullptr && !parts.dy.copied;
  if ((reads_dy && !aligned(a.dy)) || (!parts.x.copied && !aligned(a.x)) ||
      (!parts.weight.copied && !aligned(a.weight))) {
    return cuda::run(a, exec);
  }
  const cudaStream_t stream = cuda::stream_of(exec);
  const DType dtype = a.x.dtype;
  FK_RETURN_IF_ERROR(cuda::linear::make_inner(a, parts.inner, parts.sums, stream));
  if (parts.inner == nullptr) {
    FK_RETURN_IF_ERROR(copy_if_needed(parts.dy, a.dy, dtype, stream));
  }
  const Matrix g = parts.gradient();
  const Tensor none;
  if (a.dx) {
    FK_RETURN_IF_ERROR(copy_if_needed(parts.weight, a.weight, dtype, stream));
    ProductArguments f = product(g.rows, parts.weight.columns, g.columns);
    FK_RETURN_IF_ERROR(set_results(&f, {a.dx, none, none}, dtype));
    FK_RETURN_IF_ERROR(
        (multiply<Major::kK, Major::kOuter>(f, {g, parts.weight, dtype, a.x.device_id, stream})));
  }
  if (a.dweight) {
    FK_RETURN_IF_ERROR(copy_if_needed(parts.x, a.x, dtype, stream));
    ProductArguments f = product(g.columns, parts.x.columns, g.rows);
    FK_RETURN_IF_ERROR(set_results(&f, {a.dweight, none, none}, dtype));
    FK_RETURN_IF_ERROR(
        (multiply<Major::kOuter, Major::kOuter>(f, {g, parts.x, dtype, a.x.device_id, stream})));
  }
  return {};
}

}  // namespace fk::cuda_sm90
