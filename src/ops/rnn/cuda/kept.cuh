// What the kernels that keep the recurrent weights share: the product of a block's weights with a
// vector for each of eight sequences, and the exchange of vectors among the blocks of a team. The
// plan (kept_plan.h) says who keeps what.
//
// Shared memory of a block, in this order: the vectors that are multiplied (one set of eight, or
// two that take turns where blocks write into each other's shared memory), the sums of the product,
// what each unit carries of each sequence, the unit's biases, where sequences lie.
#pragma once

#include "cuda/dependent_launch.cuh"
#include "cuda/grid_barrier.cuh"
#include "cuda/mma.cuh"
#include "cuda/tma.cuh"
#include "ops/rnn/cuda/cells.cuh"
#include "ops/rnn/cuda/kept_plan.h"
#include "ops/rnn/cuda/views.cuh"

namespace fk::cuda::rnn {

// Weights of a warp in the registers of its lanes, as rnn_pack_weights laid them out.
struct KeptWeights {
  uint4 vectors[kKeptVectors];

  __device__ __forceinline__ void load(const uint4* packed, const KeptPlan& plan, int rank) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint4* const from = packed + (rank * kKeptWarps + warp) * plan.vectors * 32 + lane;
#pragma unroll
    for (int i = 0; i < kKeptVectors; ++i) {
      vectors[i] = i < plan.vectors ? from[i * 32] : make_uint4(0, 0, 0, 0);
    }
  }
};

// The product on tensor cores, for 16-bit types. Of a block of 32 of the depth, lane 4 g + t has
// the eight elements from 8 t on: those of row g (and g + 8) of the weights, in two vectors, and
// those of sequence g. The order along the depth is the same for both, so the sum is.
template <class T, Direction kDirection>
struct Product {
  static constexpr int kTiles = tensor_tiles(kDirection);
  static constexpr int kBlocks = kKeptVectors / 2 / kTiles;

  __device__ __forceinline__ static void run(const KeptWeights& weights, const KeptPlan& plan,
                                             const T* vectors, int, float* sums) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int slice = warp % plan.slices, first_row = warp / plan.slices * kTiles * 16;
    const uint32_t from = shared_address(vectors + g * plan.pitch + slice * plan.slab + 8 * t);
    // Two sums of each tile take turns, so that no product waits for the one before.
    float sum[kTiles][2][4] = {};
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (block * kTensorBlock >= plan.slab) break;
      const uint4 v = load_shared(from + block * kTensorBlock * static_cast<int>(sizeof(T)));
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint4& low = weights.vectors[(block * kTiles + tile) * 2];
        const uint4& high = weights.vectors[(block * kTiles + tile) * 2 + 1];
        mma_16816(sum[tile][0], {low.x, low.y, low.z, low.w}, v.x, v.y, T());
        mma_16816(sum[tile][1], {high.x, high.y, high.z, high.w}, v.z, v.w, T());
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float* const to =
          sums + (slice * kTogether + 2 * t) * plan.sum_pitch + first_row + tile * 16 + g;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to[i % 2 * plan.sum_pitch + i / 2 * 8] = sum[tile][0][i] + sum[tile][1][i];
      }
    }
  }
};

// The product on FMA units, in float. A lane has a row, or every `lanes`-th four elements of one.
template <Direction kDirection>
struct Product<float, kDirection> {
  __device__ __forceinline__ static void run(const KeptWeights& weights, const KeptPlan& plan,
                                             const float* vectors, int count, float* sums) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int slice = warp % plan.slices, part = lane % plan.lanes;
    const int row = (warp / plan.slices * 32 + lane) / plan.lanes;
    const float* const from = vectors + slice * plan.slab + part * 4;
    float* const to = sums + (slice * plan.lanes + part) * kTogether * plan.sum_pitch + row;
#pragma unroll 1
    for (int s = 0; s < count; ++s) {
      float sum[4] = {};
#pragma unroll
      for (int i = 0; i < kKeptVectors; ++i) {
        if (i >= plan.vectors) break;
        const Vec<float, 4> v = load<4>(from + s * plan.pitch + i * plan.lanes * 4);
        const uint4& w = weights.vectors[i];
        sum[0] = fmaf(__uint_as_float(w.x), v.data[0], sum[0]);
        sum[1] = fmaf(__uint_as_float(w.y), v.data[1], sum[1]);
        sum[2] = fmaf(__uint_as_float(w.z), v.data[2], sum[2]);
        sum[3] = fmaf(__uint_as_float(w.w), v.data[3], sum[3]);
      }
      to[s * plan.sum_pitch] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }
  }
};

// Says where a sequence lies among all positions.
struct Place {
  int64_t batch, first;  // the row of the batch; the position of the first step of the walk
  int64_t steps;

  __device__ __forceinline__ int64_t position(const Problem& p, int64_t t) const {
    return p.reverse ? first - t : first + t;
  }
};

// A block's part in its team, and its shared memory.
template <class T, Exchange kExchange>
struct Team {
  static constexpr int kBuffers = kExchange == Exchange::kShared ? 2 : 1;

  const KeptPlan& plan;
  const Problem& p;
  uint32_t* counter;  // of the team's barrier, for blocks that meet in global memory
  T* vectors;
  float *sums, *carried, *bias;
  Place* places;
  int rank, units, count;  // of the block; the units and sequences that are there
  int64_t first_unit, first_sequence, longest;

  __device__ __forceinline__ Team(const KeptPlan& plan_, const Problem& problem, uint32_t* counters,
                                  char* memory)
      : plan(plan_), p(problem) {
    counter = counters + blockIdx.x;
    places = reinterpret_cast<Place*>(memory);
    vectors = reinterpret_cast<T*>(places + plan.sequences);
    sums = reinterpret_cast<float*>(vectors + kBuffers * kTogether * plan.pitch);
    carried = sums + plan.sums();
    bias = carried + plan.sequences * plan.units;
    rank = static_cast<int>(blockIdx.z);
    first_unit = int64_t{rank} * plan.units;
    units = static_cast<int>(min(int64_t{plan.units}, max(p.hidden - first_unit, int64_t{0})));
    first_sequence = int64_t{blockIdx.x} * plan.sequences;
    count = static_cast<int>(
        max(min(int64_t{plan.sequences}, p.sequences.count - first_sequence), int64_t{0}));
    for (int s = threadIdx.x; s < count; s += kKeptThreads) {
      const SequenceSteps steps = p.sequences[first_sequence + s];
      places[s] = {steps.batch, p.position(steps, 0), steps.end - steps.begin};
    }
    for (int i = threadIdx.x; i < kBuffers * kTogether * plan.pitch; i += kKeptThreads) {
      vectors[i] = from_float<T>(0.f);
    }
    __syncthreads();
    longest = 0;
    for (int s = 0; s < count; ++s) longest = max(longest, places[s].steps);
  }

  // Whether blocks have to meet at all.
  __device__ __forceinline__ bool is_alone() const { return plan.blocks == 1; }

  // Step number `step`'s set of vectors.
  __device__ __forceinline__ T* set_of(int64_t step) const {
    return vectors + (kBuffers == 1 ? 0 : step % 2 * kTogether * plan.pitch);
  }

  // This block's threads have written what the team reads in the next step. Blocks that share their
  // memory also arrive once ahead of the first step, when that memory is ready.
  __device__ __forceinline__ void arrive() const {
    if constexpr (kExchange == Exchange::kShared) {
#if __CUDA_ARCH__ >= 900
      cluster_arrive();
#endif
    } else {
      __syncthreads();
      if (!is_alone() && threadIdx.x == 0) grid_arrive(counter);
    }
  }
  __device__ __forceinline__ void wait([[maybe_unused]] int64_t steps_done) const {
    if constexpr (kExchange == Exchange::kShared) {
#if __CUDA_ARCH__ >= 900
      cluster_wait();
#else
      __syncthreads();
#endif
    } else if (!is_alone()) {
      if (threadIdx.x == 0) grid_wait(counter, static_cast<uint32_t>(steps_done * plan.blocks));
      __syncthreads();
    }
  }

  // Puts an entry of a sequence's vector where the blocks of the cluster read it in the next step.
  __device__ __forceinline__ void share(int64_t next_step, int s, int entry, float value) const {
    T* const at = set_of(next_step) + s * plan.pitch + entry;
    const T rounded = from_float<T>(value);
#if __CUDA_ARCH__ >= 900
    for (int to = 0; to < plan.blocks; ++to) store_in_block(at, static_cast<uint32_t>(to), rounded);
#else
    *at = rounded;  // there are no clusters, and this block is alone
#endif
  }

  // The product of a row of this block with sequence s of the eight.
  __device__ __forceinline__ float sum_of(int row, int s) const {
    float sum = 0;
    for (int part = 0; part < plan.slices * plan.lanes; ++part) {
      sum += sums[(part * kTogether + s) * plan.sum_pitch + row];
    }
    return sum;
  }
};

// Brings the vectors of eight sequences from rows in global memory that other blocks wrote into
// shared memory. `row_of(s)` is sequence s's row, or null for zeros.
template <class T, class RowOf>
__device__ __forceinline__ void stage(T* vectors, int pitch, int depth, bool in_vectors, int count,
                                      const RowOf& row_of) {
  for (int s = threadIdx.x / 32; s < count; s += kKeptWarps) {
    const T* const row = row_of(s);
    T* const to = vectors + s * pitch;
    if (in_vectors) {
      constexpr int kWidth = kVecWidth<T>;
      for (int k = threadIdx.x % 32 * kWidth; k < depth; k += 32 * kWidth) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row != nullptr) v = __ldcg(reinterpret_cast<const uint4*>(row + k));
        *reinterpret_cast<uint4*>(to + k) = v;
      }
    } else {
      for (int k = threadIdx.x % 32; k < depth; k += 32) {
        to[k] = row == nullptr ? from_float<T>(0.f) : __ldcg(row + k);
      }
    }
  }
}

}  // namespace fk::cuda::rnn
