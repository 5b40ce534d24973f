// A chunk's products C B^T, which all heads of a group share: the lower triangle in tiles of 16 x
// 16, row by row. In workspace each tile lies as the lanes of a warp have it, eight floats a lane.
#pragma once

#include "ops/ssd/cuda/decays.cuh"
#include "ops/ssd/cuda/tiles.cuh"

namespace fk::cuda::ssd {

template <int kSteps>
constexpr int kTriangleTiles = kSteps / 16 * (kSteps / 16 + 1) / 2;
template <int kSteps>
constexpr int kTriangleFloats = kTriangleTiles<kSteps> * 256;

// Brings B and C of the block's chunk and group into shared memory; a block has one of each.
// Returns whether there is such a chunk.
template <class T, class StatesTile>
__device__ __forceinline__ bool load_shared_operands(const Inputs& in, const Segments& chunks,
                                                     const StatesTile& B, const StatesTile& C) {
  const int64_t slot = divide_likely_small(block_index(), in.groups);
  const int group = static_cast<int>(block_index() - slot * in.groups);
  const Segment chunk = chunks[slot];
  if (!chunk.exists) return false;
  const int count = static_cast<int>(chunk.last - chunk.first);
  B.load(RowsFrom<T>(in.B, chunk.batch, chunk.first, group, 0, in.states), count, threadIdx.x,
         blockDim.x);
  C.load(RowsFrom<T>(in.C, chunk.batch, chunk.first, group, 0, in.states), count, threadIdx.x,
         blockDim.x);
  copies_commit();
  copies_wait<0>();
  __syncthreads();
  return true;
}

// A tile of the triangle: steps t from 16 row on, steps s from 16 column on.
struct TriangleTile {
  int row, column;

  __device__ __forceinline__ explicit TriangleTile(int index) : row(0), column(index) {
    while (column > row) column -= ++row;
  }
};

// A lane's part of a tile: two times 8 columns.
struct TileSums {
  float sums[2][4];

  // Multiplies a chunk's C and B, of kStates states.
  template <class T, int kStates, class CTile, class BTile>
  __device__ __forceinline__ void multiply_rows(const CTile& C, const BTile& B,
                                                const TriangleTile& tile) {
#pragma unroll
    for (int e = 0; e < 8; ++e) sums[e / 4][e % 4] = 0.f;
    constexpr int kAtOnce = kStates < 256 && kParts<T> == 1 ? kStates / 16 : 2;
#pragma unroll(kAtOnce)
    for (int n = 0; n < kStates; n += 16) {
      multiply(sums[0], sums[1], C.left(tile.row * 16, n), B.right(tile.column * 16, n));
    }
  }
  __device__ __forceinline__ void keep(float* triangle, int index) const {
    float* const at = triangle + index * 256 + threadIdx.x % 32 * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Vec<float, 4> four;
#pragma unroll
      for (int e = 0; e < 4; ++e) four.data[e] = sums[half][e];
      store(at + half * 128, four);
    }
  }
  __device__ __forceinline__ void load_kept(const float* triangle, int index) {
    const float* const at = triangle + index * 256 + threadIdx.x % 32 * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Vec<float, 4> four = load<4>(at + half * 128);
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[half][e] = four.data[e];
    }
  }

  // Makes the chunk's matrix of a head of it: each product times the decay from s to t and dt of s,
  // and 0 above the diagonal.
  template <class T, class Matrix, int kSteps>
  __device__ __forceinline__ void put_matrix(const Matrix& matrix, const StepDecays<kSteps>& decays,
                                             const TriangleTile& tile) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int s = tile.column * 16 + half * 8 + lane % 4 * 2;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int t = tile.row * 16 + r * 8 + lane / 4;
        float weighted[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float decay = decays.template between<T>(t, s + e);
          // What decayed altogether counts as 0, whatever it was.
          weighted[e] = decay == 0.f ? 0.f : sums[half][2 * r + e] * decay * decays.dt[s + e];
        }
        matrix.put_pair(t, s, weighted[0], weighted[1]);
      }
    }
  }
};

}  // namespace fk::cuda::ssd
