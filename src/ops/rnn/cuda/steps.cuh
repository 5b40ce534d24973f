// One step of all sequences: products of a hidden unit's rows of weights with a vector for each
// sequence, and what becomes of them. A launch for each step serves every call that the kernels
// which keep their weights (kept.cuh) do not take.
//
// Floor: a launch for each step, and in it the weights once from the L2 cache for every eight
// sequences. A warp takes a unit and eight sequences; its lanes walk along the rows, 16 bytes at a
// time where rows are aligned.
//
// What becomes of the products is the template parameter Step, a struct with
//   kRows                                      how many rows of weights a unit has
//   source<T>(arguments, steps, t, s)          the vector of sequence s, or null for zeros
//   finish<T>(arguments, steps, t, s, u, sums) takes the unit's products from there
#pragma once

#include "cuda/dependent_launch.cuh"
#include "cuda/reduce.cuh"
#include "ops/rnn/cuda/views.cuh"

namespace fk::cuda::rnn {

constexpr int kStepWarps = 4, kStepSequences = 8;

// Rows of weights: row r of unit u begins at data + u * unit + r * row.
template <class T>
struct UnitRows {
  const T* data;
  int64_t unit, row;
  int64_t depth;
  bool in_vectors;  // rows and the vectors that they meet can be read 16 bytes at a time
};

// Adds up each of eight values over a warp. Lane l gets the sum of value l % 8.
__device__ __forceinline__ float sum_of_eight(float (&values)[kStepSequences]) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int half = kStepSequences / 2; half > 0; half /= 2) {
    const bool upper = (lane & half) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float given = upper ? values[i] : values[i + half];
      const float own = upper ? values[i + half] : values[i];
      values[i] = own + __shfl_xor_sync(kFullMask, given, half);
    }
  }
  float sum = values[0];
  sum += __shfl_xor_sync(kFullMask, sum, 8);
  return sum + __shfl_xor_sync(kFullMask, sum, 16);
}

// Adds products over this lane's part of the depth, kWidth elements at a time.
template <int kWidth, class T, int kRows>
__device__ __forceinline__ void add_products(const T* weights, int64_t row, int64_t depth,
                                             const T* const (&vectors)[kStepSequences],
                                             float (&sums)[kRows][kStepSequences]) {
  const int lane = threadIdx.x % kWarpSize;
  for (int64_t k = lane * kWidth; k < depth; k += kWarpSize * kWidth) {
    float w[kRows][kWidth];
#pragma unroll
    for (int r = 0; r < kRows; ++r) unpack(load<kWidth>(weights + r * row + k), w[r]);
#pragma unroll
    for (int s = 0; s < kStepSequences; ++s) {
      if (vectors[s] == nullptr) continue;
      float v[kWidth];
      unpack(load<kWidth>(vectors[s] + k), v);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sums[r][s] = fmaf(w[r][i], v[i], sums[r][s]);
      }
    }
  }
}

template <class T, class Step, class Arguments>
__global__ void __launch_bounds__(kStepWarps* kWarpSize)
    rnn_step(const __grid_constant__ Arguments a, const UnitRows<T> rows, int64_t t) {
  wait_for_earlier_kernels();
  const int64_t unit = blockIdx.y * int64_t{kStepWarps} + threadIdx.x / kWarpSize;
  const int64_t first = blockIdx.x * int64_t{kStepSequences};
  if (unit >= a.units) return;
  const Sequences& sequences = a.views.p.sequences;
  const T* vectors[kStepSequences];
#pragma unroll
  for (int s = 0; s < kStepSequences; ++s) {
    vectors[s] = nullptr;
    if (first + s < sequences.count) {
      vectors[s] = Step::template source<T>(a, sequences[first + s], t, first + s);
    }
  }
  float sums[Step::kRows][kStepSequences] = {};
  const T* const weights = rows.data + unit * rows.unit;
  if (rows.in_vectors) {
    add_products<kVecWidth<T>>(weights, rows.row, rows.depth, vectors, sums);
  } else {
    add_products<1>(weights, rows.row, rows.depth, vectors, sums);
  }
  float products[Step::kRows];
#pragma unroll
  for (int r = 0; r < Step::kRows; ++r) products[r] = sum_of_eight(sums[r]);
  const int64_t s = first + threadIdx.x % kWarpSize;
  if (threadIdx.x % kWarpSize >= kStepSequences || s >= sequences.count) return;
  Step::template finish<T>(a, sequences[s], t, s, unit, products);
}

template <class Step, class T, class Arguments>
Status launch_step(const Arguments& a, const UnitRows<T>& rows, const char* name, int64_t t,
                   cudaStream_t stream) {
  const int64_t count = a.views.p.sequences.count;
  const LaunchShape shape{{static_cast<unsigned>(ceil_div(count, kStepSequences)),
                           static_cast<unsigned>(ceil_div(a.units, kStepWarps))},
                          {kStepWarps * kWarpSize}};
  return launch_early(rnn_step<T, Step, Arguments>, name, shape, stream, a, rows, t);
}

// Whether rows of `depth` elements, and everything that lies `pitch` elements apart, can be read in
// vectors.
template <class T>
bool rows_in_vectors(const void* data, int64_t depth, int64_t pitch) {
  return depth % kVecWidth<T> == 0 && pitch % kVecWidth<T> == 0 &&
         reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

}  // namespace fk::cuda::rnn
