// How the sums of a product leave: through shared memory as floats, then in a loop that is short,
// since eight activations are in it, and whose loads and stores are vectors of 16 bytes where the
// results' strides allow that.
#pragma once

#include "cuda/activations.cuh"
#include "cuda/gemm/portable_call.cuh"
#include "cuda/parameter.cuh"

namespace fk::cuda {

// Some columns of one row of results.
template <class T>
struct ResultVector {
  static constexpr int kWidth = kVecWidth<T>;

  const PortableArguments& a;
  int64_t m, n;
  bool whole;  // all of them are there, and in vectors

  __device__ __forceinline__ ResultVector(const PortableArguments& a, int64_t m, int64_t n)
      : a(a), m(m), n(n), whole(a.results_in_vectors && n + kWidth <= a.columns) {}

  __device__ __forceinline__ void store(const ProductResult& to, const float (&x)[kWidth]) const {
    const int64_t at = to.rows.offset(m) + n * to.column;
    if (!whole) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (n + i < a.columns) store_either<T>(to.data, to.is_float, at + i * to.column, x[i]);
      }
    } else if (to.is_float) {
      float* const p = static_cast<float*>(to.data) + at;
#pragma unroll
      for (int i = 0; i < kWidth; i += 4) {
        cuda::store(p + i, Vec<float, 4>{{x[i], x[i + 1], x[i + 2], x[i + 3]}});
      }
    } else {
      cuda::store(static_cast<T*>(to.data) + at, pack<T>(x));
    }
  }
  __device__ __forceinline__ void add(const ProductResult& from, float (&x)[kWidth]) const {
    const int64_t at = from.rows.offset(m) + n * from.column;
    if (!whole) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (n + i < a.columns) {
          x[i] += load_either<T>(from.data, from.is_float, at + i * from.column);
        }
      }
    } else if (from.is_float) {
      const float* const p = static_cast<const float*>(from.data) + at;
#pragma unroll
      for (int i = 0; i < kWidth; i += 4) {
        const Vec<float, 4> v = load<4>(p + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) x[i + j] += v.data[j];
      }
    } else {
      float more[kWidth];
      unpack(load<kWidth>(static_cast<const T*>(from.data) + at), more);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] += more[i];
    }
  }

  // The epilogue of sums x and, where there is a gate, of those it is multiplied with.
  __device__ __forceinline__ void finish(float (&x)[kWidth], const float (&up)[kWidth]) const {
    if (a.epilogue.bias != nullptr) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (n + i >= a.columns) continue;
        x[i] += load_either<T>(a.epilogue.bias, a.epilogue.float_bias,
                               (n + i) * a.epilogue.bias_stride);
      }
    }
    if (a.before.data != nullptr) store(a.before, x);
    if (a.before_up.data != nullptr) store(a.before_up, up);
    if (a.out.data == nullptr) return;
    with_activation(a.epilogue.activation, [&](auto kind) {
#pragma unroll
      for (float& value : x) value = activate<decltype(kind)::value, sizeof(T) == 4>(value);
    });
    if (a.gated) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] *= up[i];
    }
    if (a.residual.data != nullptr) add(a.residual, x);
    store(a.out, x);
  }
};

// Floats of kRows x kColumns in shared memory. A row's groups of eight are permuted by its number:
// neither the pairs that a warp's fragments store nor the vectors that are read share banks.
template <int kRows, int kColumns>
struct StagedSums {
  static constexpr int kBytes = kRows * kColumns * 4;
  float* const data;

  __device__ __forceinline__ float* at(int row, int column) const {
    return data + row * kColumns + (((column / 8) ^ (row % 4)) * 8) + column % 8;
  }
  // The vector that begins at a column which is a multiple of its width.
  template <int kWidth>
  __device__ __forceinline__ void read(int row, int column, float (&x)[kWidth]) const {
    static_assert(kWidth == 4 || kWidth == 8);
    const float* const p = at(row, column);
    if constexpr (kWidth == 4) {
      const Vec<float, 4> v = load<4>(p);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = v.data[i];
    } else {
      // Half of the lanes read the second half first: eight vectors side by side have each bank
      // twice.
      const int turn = threadIdx.x / 4 % 2;
      const Vec<float, 4> u = load<4>(p + 4 * turn), v = load<4>(p + 4 * (turn ^ 1));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = turn == 0 ? u.data[i] : v.data[i];
        x[i + 4] = turn == 0 ? v.data[i] : u.data[i];
      }
    }
  }

  // What a block's threads do with all of it: `row` and `column` are those of the product where it
  // begins, columns counting both of a pair.
  template <class T, int kThreads>
  __device__ __forceinline__ void finish(const PortableArguments& a, int64_t row,
                                         int64_t column) const {
    if (a.partials != nullptr) {
      float* const to = a.partials + blockIdx.y * a.rows * a.partial_width;
#pragma unroll 1
      for (int i = threadIdx.x; i < kRows * kColumns / 4; i += kThreads) {
        const int r = i / (kColumns / 4), c = i % (kColumns / 4) * 4;
        if (row + r >= a.rows || column + c >= a.partial_width) continue;
        store(to + (row + r) * a.partial_width + column + c, load<4>(at(r, c)));
      }
      return;
    }
    constexpr int kWidth = kVecWidth<T>;
    const int along = (a.gated ? kColumns / 2 : kColumns) / kWidth;
    const int64_t first = a.gated ? column / 2 : column;
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows * along; i += kThreads) {
      const int r = i / along, c = i % along * kWidth;
      if (row + r >= a.rows || first + c >= a.columns) continue;
      float x[kWidth], up[kWidth] = {};
      if (a.gated) {
        read(r, c / 8 * 16 + c % 8, x);
        read(r, c / 8 * 16 + c % 8 + 8, up);
      } else {
        read(r, c, x);
      }
      ResultVector<T>(a, row + r, first + c).finish(x, up);
    }
  }
};

}  // namespace fk::cuda
