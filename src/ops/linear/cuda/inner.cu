// The elementwise part of linear's backward: dy act'(before), its sums over rows, copies.
//
// Floor: dy and `before` read once, the inner gradient written once. A block has 32 x 8 threads, a
// few columns for each of the 32 and every eighth row of its piece for each of the 8; sums over
// rows stay in registers to the end. Where rows are contiguous and aligned, an access is 16 bytes.
#include "core/rows.h"
#include "cuda/activations.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/parameter.cuh"
#include "ops/linear/cuda/inner.h"

namespace fk::cuda::linear {

namespace {

struct StridedRows {
  void* data = nullptr;
  Rows rows;
  int64_t column = 0;
};

StridedRows strided_rows(const Tensor& t) {
  if (!t) return {};
  return {t.data, rows_of(t), t.stride(-1)};
}

struct InnerArguments {
  StridedRows dy, before, dresidual;
  void* inner;
  float* sums;
  int64_t rows, columns, piece, width;
  Activation activation;
};

constexpr int kWide = 32, kHigh = 8;

template <class T, int kWidth>
__global__ void __launch_bounds__(kWide* kHigh)
    linear_inner(const __grid_constant__ InnerArguments a) {
  wait_for_earlier_kernels();
  const int64_t column = (blockIdx.x * int64_t{kWide} + threadIdx.x) * kWidth;
  const int64_t begin = blockIdx.y * a.piece;
  const int64_t end = begin + a.piece < a.rows ? begin + a.piece : a.rows;
  float sum[kWidth] = {};
  const auto rows = [&](auto kind) {
    for (int64_t m = begin + threadIdx.y; m < end; m += kHigh) {
      const auto at = [&](const StridedRows& p) {
        return static_cast<T*>(p.data) + p.rows.offset(m) + column * p.column;
      };
      const Vec<T, kWidth> dy = load<kWidth>(at(a.dy));
      if (a.dresidual.data != nullptr) store(at(a.dresidual), dy);
      float g[kWidth];
      unpack(dy, g);
      if constexpr (decltype(kind)::value != Activation::kNone) {
        float x[kWidth];
        unpack(load<kWidth>(at(a.before)), x);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          g[i] *= activation_slope<decltype(kind)::value, sizeof(T) == 4>(x[i]);
        }
      }
      if (a.inner != nullptr) {
        store(static_cast<T*>(a.inner) + m * a.width + column, pack<T>(g));
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[i] += g[i];
    }
  };
  if (column < a.columns) with_activation(a.activation, rows);
  if (a.sums == nullptr) return;
  __shared__ float sums[kHigh][kWide * kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sums[threadIdx.y][threadIdx.x * kWidth + i] = sum[i];
  __syncthreads();
  for (int i = threadIdx.y * kWide + threadIdx.x; i < kWide * kWidth; i += kWide * kHigh) {
    const int64_t c = blockIdx.x * int64_t{kWide} * kWidth + i;
    if (c >= a.columns) continue;
    float total = 0;
#pragma unroll
    for (int y = 0; y < kHigh; ++y) total += sums[y][i];
    a.sums[blockIdx.y * a.width + c] = total;
  }
}

struct GatedInnerArguments {
  StridedRows dy, gate, up;
  void* inner;
  int64_t rows, columns, width, up_column;
  Activation activation;
};

template <class T, int kWidth>
__global__ void __launch_bounds__(kWide* kHigh)
    gated_inner(const __grid_constant__ GatedInnerArguments a) {
  wait_for_earlier_kernels();
  const int64_t column = (blockIdx.x * int64_t{kWide} + threadIdx.x) * kWidth;
  const auto rows = [&](auto kind) {
    constexpr bool kExact = sizeof(T) == 4;
    for (int64_t m = blockIdx.y * int64_t{kHigh} + threadIdx.y; m < a.rows;
         m += gridDim.y * int64_t{kHigh}) {
      const auto floats = [&](const StridedRows& p, float(&x)[kWidth]) {
        const T* const at = static_cast<const T*>(p.data) + p.rows.offset(m) + column * p.column;
        unpack(load<kWidth>(at), x);
      };
      float dy[kWidth], gate[kWidth], up[kWidth];
      floats(a.dy, dy);
      floats(a.gate, gate);
      floats(a.up, up);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        up[i] *= dy[i] * activation_slope<decltype(kind)::value, kExact>(gate[i]);
        gate[i] = dy[i] * activate<decltype(kind)::value, kExact>(gate[i]);
      }
      T* const to = static_cast<T*>(a.inner) + m * a.width + column;
      store(to, pack<T>(up));
      store(to + a.up_column, pack<T>(gate));
    }
  };
  if (column < a.columns) with_activation(a.activation, rows);
}

__global__ void linear_dbias(const float* sums, int64_t pieces, int64_t width, int64_t columns,
                             void* dbias, DType dtype, int64_t stride) {
  wait_for_earlier_kernels();
  const int64_t c = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (c >= columns) return;
  float total = 0;
  for (int64_t i = 0; i < pieces; ++i) total += after_wait(sums)[i * width + c];
  store_as(dtype, dbias, c * stride, total);
}

struct CopyArguments {
  StridedRows from;
  DType from_dtype, dtype;
  void* to;
  int64_t columns, width, count;
};

__global__ void __launch_bounds__(256) linear_copy(const __grid_constant__ CopyArguments a) {
  wait_for_earlier_kernels();
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < a.count;
       i += gridDim.x * int64_t{256}) {
    const int64_t m = i / a.columns, c = i - m * a.columns;
    const float x = load_as(a.from_dtype, a.from.data, a.from.rows.offset(m) + c * a.from.column);
    store_as(a.dtype, a.to, m * a.width + c, x);
  }
}

// Whether a row of the tensor may be read in pieces of 16 bytes.
bool in_vectors(const Tensor& t) {
  if (!t) return true;
  const int64_t width = 16 / size_of(t.dtype);
  bool fits = t.stride(-1) == 1 && t.size(-1) % width == 0;
  for (int i = 0; i + 1 < t.ndim; ++i) fits &= t.shape[i] == 1 || t.strides[i] % width == 0;
  return fits && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

template <class T>
Status launch_inner(const InnerArguments& f, bool vectors, cudaStream_t stream) {
  const int width = vectors ? kVecWidth<T> : 1;
  const unsigned pieces = static_cast<unsigned>((f.rows + f.piece - 1) / f.piece);
  const unsigned blocks = static_cast<unsigned>((f.columns + kWide * width - 1) / (kWide * width));
  const LaunchShape shape{{blocks, pieces}, {kWide, kHigh}};
  if (vectors) return launch_early(linear_inner<T, kVecWidth<T>>, "linear_inner", shape, stream, f);
  return launch_early(linear_inner<T, 1>, "linear_inner", shape, stream, f);
}

template <class T>
Status launch_gated_inner(const GatedInnerArguments& f, bool vectors, cudaStream_t stream) {
  const int width = vectors ? kVecWidth<T> : 1;
  const auto blocks = static_cast<unsigned>(ceil_div(f.columns, kWide * width));
  const auto high = static_cast<unsigned>(std::min<int64_t>(ceil_div(f.rows, kHigh), 1 << 15));
  return launch_early(vectors ? gated_inner<T, kVecWidth<T>> : gated_inner<T, 1>, "gated_inner",
                      {{blocks, high}, {kWide, kHigh}}, stream, f);
}

}  // namespace

Status make_gated_inner(const GatedLinearBwd& a, const Tensor& gate, const Tensor& up,
                        const GatedInner& inner, cudaStream_t stream) {
  GatedInnerArguments f = {};
  f.dy = strided_rows(a.dy);
  f.gate = strided_rows(gate);
  f.up = strided_rows(up);
  f.inner = inner.data;
  f.rows = f.dy.rows.count;
  f.columns = a.dy.size(-1);
  f.width = inner.width;
  f.up_column = inner.up_column;
  f.activation = static_cast<Activation>(a.activation);
  if (f.rows == 0 || f.columns == 0) return {};
  const bool vectors = in_vectors(a.dy) && in_vectors(gate) && in_vectors(up) &&
                       inner.up_column * size_of(a.dy.dtype) % 16 == 0;
  if (a.dy.dtype == DType::kFloat32) return launch_gated_inner<float>(f, vectors, stream);
  if (a.dy.dtype == DType::kFloat16) return launch_gated_inner<__half>(f, vectors, stream);
  return launch_gated_inner<__nv_bfloat16>(f, vectors, stream);
}

Status make_inner(const LinearBwd& a, void* inner, float* sums, cudaStream_t stream) {
  InnerArguments f = {};
  f.dy = strided_rows(a.dy);
  f.before = strided_rows(a.before);
  f.dresidual = strided_rows(a.dresidual);
  f.inner = inner;
  f.sums = a.dbias ? sums : nullptr;
  f.rows = f.dy.rows.count;
  f.columns = a.dy.size(-1);
  f.width = padded(f.columns);
  f.activation = static_cast<Activation>(a.activation);
  if (f.columns == 0) return {};
  const int64_t pieces = bias_pieces(f.rows, f.columns);
  if (f.rows > 0 && (f.inner != nullptr || f.sums != nullptr || a.dresidual)) {
    f.piece = (f.rows + pieces - 1) / pieces;
    const bool vectors = in_vectors(a.dy) && in_vectors(a.before) && in_vectors(a.dresidual);
    if (a.dy.dtype == DType::kFloat32) {
      FK_RETURN_IF_ERROR(launch_inner<float>(f, vectors, stream));
    } else if (a.dy.dtype == DType::kFloat16) {
      FK_RETURN_IF_ERROR(launch_inner<__half>(f, vectors, stream));
    } else {
      FK_RETURN_IF_ERROR(launch_inner<__nv_bfloat16>(f, vectors, stream));
    }
  }
  if (!a.dbias) return {};
  const int64_t written = f.rows == 0 ? 0 : (f.rows + f.piece - 1) / f.piece;
  return launch_early(linear_dbias, "linear_dbias",
                      {{static_cast<unsigned>((f.columns + 127) / 128)}, {128}}, stream, sums,
                      written, f.width, f.columns, a.dbias.data, a.dbias.dtype, a.dbias.stride(0));
}

Status copy_matrix(const Tensor& from, DType dtype, void* to, cudaStream_t stream) {
  CopyArguments f = {strided_rows(from),    from.dtype,  dtype, to, from.size(-1),
                     padded(from.size(-1)), from.numel()};
  if (f.count == 0) return {};
  const unsigned blocks = static_cast<unsigned>(std::min<int64_t>((f.count + 255) / 256, 1 << 16));
  return launch_early(linear_copy, "linear_copy", {{blocks}, {256}}, stream, f);
}

}  // namespace fk::cuda::linear
