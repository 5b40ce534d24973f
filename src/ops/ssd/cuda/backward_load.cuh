// Squares of 64 rows of 64 elements in shared memory, which ssd's backward multiplies, and how they
// get there from global memory.
//
// Memory map: rows as in global memory, whether K runs along them or across. The 16-byte chunks of
// a row are permuted by the row's number, so that neither the rows of a matrix that ldmatrix reads,
// nor floats that lie across rows, nor stored fragments share a bank.
#pragma once

#include "cuda/activations.cuh"
#include "cuda/convert.cuh"
#include "ops/ssd/cuda/backward.h"

namespace fk::cuda::ssd {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool kTuring = true;
#else
constexpr bool kTuring = false;
#endif

// This is the type that numbers of T have in shared memory. Turing multiplies bfloat16 as float.
template <class T>
using Stored = std::conditional_t<kTuring && std::is_same_v<T, __nv_bfloat16>, float, T>;

// Returns the thread's number in its block. It is asked for anew each time, so that the addresses
// that follow from it are made where they are needed and hold no registers across a loop.
__device__ __forceinline__ int thread_now() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// A matrix in global memory from one of its elements on. Beyond its rows and columns are zeros.
template <class T>
struct SquareSource {
  const T* data;
  int64_t row, column;  // strides
  int rows, columns;
  bool in_vectors;  // its rows are whole vectors

  __device__ __forceinline__ float element(int r, int c) const {
    return r < rows && c < columns ? to_float(data[r * row + c * column]) : 0.f;
  }
};

// Returns the steps of a chunk, of one head or group, from one column on.
template <class T>
__device__ __forceinline__ SquareSource<T> steps_source(const Rows& t, const Segment& chunk,
                                                        int head, int columns, int from) {
  const Rows& v = t;
  return {static_cast<const T*>(v.data) + v.offset(chunk.batch, chunk.first, head, from),
          v.strides[1],
          v.strides[3],
          static_cast<int>(chunk.last - chunk.first),
          columns - from,
          t.vectors};
}

// Returns channels by states of a head's state in the workspace.
template <class T>
__device__ __forceinline__ SquareSource<T> state_source(const BackwardArguments& a,
                                                        const void* states, int64_t at, int channel,
                                                        int state) {
  const int pitch = a.state_pitch;
  return {static_cast<const T*>(states) + at + channel * pitch + state,
          pitch,
          1,
          a.in.channels - channel,
          pitch - state,
          true};
}

// Returns where an element of a tile lies, in bytes.
template <class S>
__device__ __forceinline__ int square_place(int row, int column) {
  constexpr int kWidth = 16 / static_cast<int>(sizeof(S));
  const int turn = sizeof(S) == 2 ? row % 8 : row % 4 * 2 ^ row / 4 % 2;
  return row * kSide * static_cast<int>(sizeof(S)) + ((column / kWidth) ^ turn) * 16 +
         column % kWidth * static_cast<int>(sizeof(S));
}

template <class S>
constexpr int kSquareBytes = kSide* kSide* static_cast<int>(sizeof(S));

// Stores kWidth neighbours, of which 16 bytes each lie together.
template <class S, int kWidth>
__device__ __forceinline__ void put_vectors(char* tile, int row, int column,
                                            const float (&values)[kWidth]) {
  constexpr int kEach = kVecWidth<S>;
#pragma unroll
  for (int i = 0; i < kWidth; i += kEach) {
    float part[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) part[e] = values[i + e];
    store(reinterpret_cast<S*>(tile + square_place<S>(row, column + i)), pack<S>(part));
  }
}

// This is a thread's part of a tile on its way from global to shared memory: some vectors, which
// wait in registers. Where rows are no whole vectors, elements go one by one when the tile is
// written, and nothing waits.
template <class T>
struct SquareLoader {
  using S = Stored<T>;
  static constexpr int kWidth = kVecWidth<T>;
  static constexpr int kCount = kSide * kSide / kBackwardThreads / kWidth;
  Vec<T, kWidth> values[kCount];

  // Tells where the thread's i-th vector lies.
  __device__ __forceinline__ static int row(int thread, int i) {
    return thread / (kSide / kWidth) + i * (kBackwardThreads * kWidth / kSide);
  }
  __device__ __forceinline__ static int column(int thread) {
    return thread % (kSide / kWidth) * kWidth;
  }
  __device__ __forceinline__ void fetch(const SquareSource<T>& from) {
    if (!from.in_vectors) return;
    const int thread = thread_now();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] = Vec<T, kWidth>{};
      if (row(thread, i) < from.rows && column(thread) < from.columns) {
        values[i] = load<kWidth>(from.data + row(thread, i) * from.row + column(thread));
      }
    }
  }
  // Writes the tile, each row times its factor where there are any.
  __device__ __forceinline__ void put(char* tile, const SquareSource<T>& from,
                                      const float* factors = nullptr) const {
    const int thread = thread_now();
    if (!from.in_vectors) {
#pragma unroll 1
      for (int i = thread; i < kSide * kSide; i += kBackwardThreads) {
        const int r = i / kSide, c = i % kSide;
        const float factor = factors == nullptr ? 1.f : factors[r];
        *reinterpret_cast<S*>(tile + square_place<S>(r, c)) =
            from_float<S>(from.element(r, c) * factor);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (std::is_same_v<S, T>) {
        if (factors == nullptr) {
          store(reinterpret_cast<S*>(tile + square_place<S>(row(thread, i), column(thread))),
                values[i]);
          continue;
        }
      }
      float numbers[kWidth];
      unpack(values[i], numbers);
      const float factor = factors == nullptr ? 1.f : factors[row(thread, i)];
#pragma unroll
      for (float& number : numbers) number *= factor;
      put_vectors<S>(tile, row(thread, i), column(thread), numbers);
    }
  }
};

// The same for the gradient of outputs before the gate: dy, or dy silu(z).
template <class T>
struct GradientLoader {
  using S = Stored<T>;
  SquareLoader<T> dy, z;

  __device__ __forceinline__ static SquareSource<T> source(const Rows& t,
                                                           const BackwardArguments& a,
                                                           const Segment& chunk, int head,
                                                           int channel) {
    return steps_source<T>(t, chunk, head, a.in.channels, channel);
  }
  __device__ __forceinline__ void fetch(const BackwardArguments& a, const Segment& chunk, int head,
                                        int channel) {
    dy.fetch(source(a.dy, a, chunk, head, channel));
    if (a.in.z.data != nullptr) z.fetch(source(a.in.z, a, chunk, head, channel));
  }
  __device__ __forceinline__ void put(char* tile, const BackwardArguments& a, const Segment& chunk,
                                      int head, int channel, const float* factors = nullptr) const {
    using Loader = SquareLoader<T>;
    const SquareSource<T> from = source(a.dy, a, chunk, head, channel);
    if (a.in.z.data == nullptr) {
      dy.put(tile, from, factors);
      return;
    }
    const int thread = thread_now();
    const auto gated = [](float x, float gate) {
      return x * activate<Activation::kSilu, std::is_same_v<T, float>>(gate);
    };
    if (!from.in_vectors || !a.in.z.vectors) {
      const SquareSource<T> gates = source(a.in.z, a, chunk, head, channel);
#pragma unroll 1
      for (int i = thread; i < kSide * kSide; i += kBackwardThreads) {
        const int r = i / kSide, c = i % kSide;
        const float factor = factors == nullptr ? 1.f : factors[r];
        *reinterpret_cast<S*>(tile + square_place<S>(r, c)) =
            from_float<S>(gated(from.element(r, c), gates.element(r, c)) * factor);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < Loader::kCount; ++i) {
      float values[Loader::kWidth], gates[Loader::kWidth];
      unpack(dy.values[i], values);
      unpack(z.values[i], gates);
      const float factor = factors == nullptr ? 1.f : factors[Loader::row(thread, i)];
#pragma unroll
      for (int e = 0; e < Loader::kWidth; ++e) values[e] = gated(values[e], gates[e]) * factor;
      put_vectors<S>(tile, Loader::row(thread, i), Loader::column(thread), values);
    }
  }
};

}  // namespace fk::cuda::ssd
