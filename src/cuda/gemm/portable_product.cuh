// A matrix product for any architecture, any strides and any float types, with an epilogue:
// C[m, n] = sum over k of A[m, k] B[n, k].
//
// Floor: 2 M N K operations on the tensor cores (mma.sync), in float on the FMA units. A block has
// four warps and a tile of 64 x 64; slices of K go from global memory through registers, where they
// are converted and, if need be, turned, into one of two places in shared memory, while the slice
// before is multiplied. Rows in shared memory are padded so that no two of eight share a bank.
#pragma once

#include "cuda/activations.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/gemm/portable_call.cuh"
#include "cuda/gemm/tile_order.cuh"
#include "cuda/mma.cuh"
#include "cuda/parameter.cuh"

namespace fk::cuda {

constexpr int kPortableTile = 64, kPortableThreads = 128;

template <class T, bool kVectors>
struct Slice {
  // Of each operand: elements a thread brings, as vectors of 16 bytes or one by one.
  static constexpr int kDepth = sizeof(T) == 2 ? 32 : 16;
  static constexpr int kPerThread = kPortableTile * kDepth / kPortableThreads;
  static constexpr int kWidth = kVectors ? kVecWidth<T> : 1;
  static constexpr int kCount = kPerThread / kWidth;

  Vec<T, kWidth> values[kCount];

  // The i-th vector's first element: neighbouring threads have neighbouring addresses.
  __device__ __forceinline__ static void place(const ProductOperand& from, int i, int* outer,
                                               int* k) {
    const int index = (static_cast<int>(threadIdx.x) + i * kPortableThreads) * kWidth;
    if (from.rows_are_outer) {
      *outer = index / kDepth;
      *k = index % kDepth;
    } else {
      *k = index / kPortableTile;
      *outer = index % kPortableTile;
    }
  }
  __device__ __forceinline__ void load(const ProductOperand& from, int64_t first, int64_t count,
                                       int64_t first_k, int64_t depth) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      int outer, k;
      place(from, i, &outer, &k);
      values[i] = Vec<T, kWidth>{};
      if (first + outer >= count || first_k + k >= depth) continue;
      const int64_t at = from.place(first + outer, first_k + k);
      if constexpr (kVectors) {
        values[i] = cuda::load<kWidth>(static_cast<const T*>(from.data) + at);
      } else {
        values[i].data[0] = from_float<T>(load_either<T>(from.data, from.is_float, at));
      }
    }
  }
  // store(outer, k, value)
  template <class Store>
  __device__ __forceinline__ void put(const ProductOperand& from, const Store& store) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      int outer, k;
      place(from, i, &outer, &k);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        store(outer + (from.rows_are_outer ? 0 : e), k + (from.rows_are_outer ? e : 0),
              values[i].data[e]);
      }
    }
  }
};

template <class T>
__device__ __forceinline__ void finish_element(const PortableArguments& a, Activation activation,
                                               int64_t m, int64_t n, float value) {
  const Epilogue& e = a.epilogue;
  if (m >= a.rows || n >= a.columns) return;
  if (e.bias != nullptr) value += load_either<T>(e.bias, e.float_bias, n * e.bias_stride);
  const auto place = [&](const ProductResult& r) { return r.rows.offset(m) + n * r.column; };
  if (a.before.data != nullptr) store_either<T>(a.before.data, false, place(a.before), value);
  if (a.out.data == nullptr) return;
  with_activation(activation, [&](auto kind) {
    value = activate<decltype(kind)::value, sizeof(T) == 4>(value);
  });
  if (a.residual.data != nullptr) {
    value += load_either<T>(a.residual.data, a.residual.is_float, place(a.residual));
  }
  store_either<T>(a.out.data, a.out.is_float, place(a.out), value);
}

// The tile's sums leave through shared memory, as floats, for a loop that is short and whose stores
// are of neighbours.
constexpr int kSumPitch = kPortableTile + 4;

template <class T>
__device__ __forceinline__ void finish_tile(const PortableArguments& a, int64_t row, int64_t column,
                                            const float* sums) {
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < kPortableTile * kPortableTile; i += kPortableThreads) {
    const int r = i / kPortableTile, c = i % kPortableTile;
    finish_element<T>(a, a.epilogue.activation, row + r, column + c, sums[r * kSumPitch + c]);
  }
}

// On tensor cores: T of 16 bits. Each warp has 32 x 32 of the tile.
template <class T, bool kVectors>
__global__ void __launch_bounds__(kPortableThreads, 2)
    portable_product(const __grid_constant__ PortableArguments a) {
  using Part = Slice<T, kVectors>;
  constexpr int kPitch = Part::kDepth + 8;
  __shared__ __align__(16) T tiles[2][2][kPortableTile * kPitch];
  wait_for_earlier_kernels();
  const int64_t column_tiles = (a.columns + kPortableTile - 1) / kPortableTile;
  const int64_t row = blockIdx.x / column_tiles * kPortableTile;
  const int64_t column = blockIdx.x % column_tiles * kPortableTile;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp / 2 * 32, warp_column = warp % 2 * 32;
  float sum[2][4][4] = {};
  Part left, right;
  left.load(a.a, row, a.rows, 0, a.depth);
  right.load(a.b, column, a.columns, 0, a.depth);
  int stage = 0;
  for (int64_t k = 0; k < a.depth; k += Part::kDepth, stage ^= 1) {
    T* const from_a = tiles[stage][0];
    T* const from_b = tiles[stage][1];
    left.put(a.a, [&](int o, int i, T x) { from_a[o * kPitch + i] = x; });
    right.put(a.b, [&](int o, int i, T x) { from_b[o * kPitch + i] = x; });
    __syncthreads();
    left.load(a.a, row, a.rows, k + Part::kDepth, a.depth);
    right.load(a.b, column, a.columns, k + Part::kDepth, a.depth);
#pragma unroll
    for (int i = 0; i < Part::kDepth; i += 16) {
      uint32_t x[2][4], w[2][4];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        load_matrices(x[r], shared_address(from_a + (warp_row + 16 * r + lane % 16) * kPitch + i +
                                           lane / 16 * 8));
        load_matrices(w[r], shared_address(from_b + (warp_column + 16 * r + lane % 16) * kPitch +
                                           i + lane / 16 * 8));
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          mma_16816(sum[r][c], x[r], w[c / 2][c % 2], w[c / 2][c % 2 + 2], T());
        }
      }
    }
  }
  __syncthreads();
  float* const sums = reinterpret_cast<float*>(tiles);
  static_assert(sizeof(tiles) >= sizeof(float) * kPortableTile * kSumPitch);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[(warp_row + 16 * r + lane / 4 + i / 2 * 8) * kSumPitch + warp_column + 8 * c +
             2 * (lane % 4) + i % 2] = sum[r][c][i];
      }
    }
  }
  finish_tile<T>(a, row, column, sums);
}

// In float: for float, and for bfloat16 where tensor cores have none. Each thread has 8 x 4.
template <class T, bool kVectors>
__global__ void __launch_bounds__(kPortableThreads, 2)
    portable_product_in_float(const __grid_constant__ PortableArguments a) {
  using Part = Slice<T, kVectors>;
  constexpr int kPitch = kPortableTile + 4;
  __shared__ __align__(16) float tiles[2][2][Part::kDepth * kPitch];
  wait_for_earlier_kernels();
  const int64_t column_tiles = (a.columns + kPortableTile - 1) / kPortableTile;
  const int64_t row = blockIdx.x / column_tiles * kPortableTile;
  const int64_t column = blockIdx.x % column_tiles * kPortableTile;
  const int first_row = threadIdx.x / 16 * 8, first_column = threadIdx.x % 16 * 4;
  // Sums over a stretch of K meet those of the rest only then: errors grow with its square root.
  constexpr int kStretch = 64;
  float sum[8][4] = {}, part[8][4] = {};
  const auto add_part = [&] {
#pragma unroll
    for (int r = 0; r < 8; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sum[r][c] += part[r][c];
        part[r][c] = 0;
      }
    }
  };
  Part left, right;
  left.load(a.a, row, a.rows, 0, a.depth);
  right.load(a.b, column, a.columns, 0, a.depth);
  int stage = 0;
  for (int64_t k = 0; k < a.depth; k += Part::kDepth, stage ^= 1) {
    float* const from_a = tiles[stage][0];
    float* const from_b = tiles[stage][1];
    left.put(a.a, [&](int o, int i, T x) { from_a[i * kPitch + o] = to_float(x); });
    right.put(a.b, [&](int o, int i, T x) { from_b[i * kPitch + o] = to_float(x); });
    __syncthreads();
    left.load(a.a, row, a.rows, k + Part::kDepth, a.depth);
    right.load(a.b, column, a.columns, k + Part::kDepth, a.depth);
#pragma unroll
    for (int i = 0; i < Part::kDepth; ++i) {
      const Vec<float, 4> x0 = load<4>(from_a + i * kPitch + first_row);
      const Vec<float, 4> x1 = load<4>(from_a + i * kPitch + first_row + 4);
      const Vec<float, 4> w = load<4>(from_b + i * kPitch + first_column);
#pragma unroll
      for (int r = 0; r < 8; ++r) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          part[r][c] = fmaf(r < 4 ? x0.data[r] : x1.data[r - 4], w.data[c], part[r][c]);
        }
      }
    }
    if ((k + Part::kDepth) % kStretch == 0) add_part();
  }
  add_part();
  __syncthreads();
  float* const sums = &tiles[0][0][0];
  static_assert(sizeof(tiles) >= sizeof(float) * kPortableTile * kSumPitch);
#pragma unroll
  for (int r = 0; r < 8; ++r) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      sums[(first_row + r) * kSumPitch + first_column + c] = sum[r][c];
    }
  }
  finish_tile<T>(a, row, column, sums);
}

}  // namespace fk::cuda
