// How the rows of the backward's inputs come into registers. kPlain: all of them are given, their
// rows not split over dims.
#pragma once

#include "cuda/async_copy.cuh"
#include "cuda/norm/rows.cuh"
#include "cuda/pipeline.cuh"

namespace fk::cuda::norm {

// Loads a row when it is asked for; other warps hide the wait.
template <class T, int kInputs, class Team, int kVecs, bool kPlain>
class DirectLoader {
 public:
  __device__ DirectLoader(const UntypedRows* sources, uint32_t, uint32_t, int vectors, uint32_t,
                          int)
      : sources_(sources), vectors_(vectors) {}
  __device__ __forceinline__ void take(uint32_t row, RowVectors<T, kVecs> (&parts)[kInputs]) {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      if (!kPlain && !sources_[k]) continue;
      const T* data = sources_[k].template row<T, kPlain>(row);
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        const int v = Team::rank() + i * Team::kSize;
        if (v < vectors_)
          parts[k][i] = load_read_only_in_place<kVecWidth<T>>(data + v * kVecWidth<T>);
      }
    }
  }
  __device__ __forceinline__ void refill(uint32_t) {}

 private:
  const UntypedRows* sources_;
  int vectors_;
};

// Keeps the team's next rows on their way into a ring of shared memory, by bulk copies (sm_90):
// bytes in flight cost no registers.
constexpr int kMaxStages = 4;

template <class T, int kInputs, class Team, int kVecs, bool kPlain>
class BulkLoader {
 public:
  __device__ BulkLoader(const UntypedRows* sources, uint32_t first, uint32_t step, int vectors,
                        uint32_t rows, int stages)
      : sources_(sources), step_(step), rows_(rows), vectors_(vectors), stages_(stages) {
    extern __shared__ uint4 shared_rows[];
    __shared__ uint64_t barriers[Team::kCount][kMaxStages];
    ring_ = shared_rows + Team::index() * stages * kInputs * vectors;
    full_ = barriers[Team::index()];
    if (Team::rank() == 0) {
      for (int s = 0; s < stages; ++s) barrier_init(&full_[s], 1);
      fence_barrier_init();
    }
    __syncthreads();
    if (Team::rank() == 0) {
      uint32_t row = first;
      for (int s = 0; s < stages && row < rows; ++s, row += step) issue(s, row);
    }
  }
  __device__ __forceinline__ void take(uint32_t, RowVectors<T, kVecs> (&parts)[kInputs]) {
    barrier_wait(&full_[stage_.index], stage_.phase);
    const uint4* slot = ring_ + stage_.index * kInputs * vectors_;
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      if (!kPlain && !sources_[k]) continue;
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        const int v = Team::rank() + i * Team::kSize;
        if (v < vectors_) memcpy(&parts[k][i], &slot[k * vectors_ + v], 16);
      }
    }
  }
  // To be called by the whole team once a reduction has shown that all of it took the row.
  __device__ __forceinline__ void refill(uint32_t row) {
    if (Team::kSize == kWarpSize) __syncwarp();
    const uint32_t next = row + stages_ * step_;
    if (Team::rank() == 0 && next < rows_) issue(stage_.index, next);
    stage_.next(stages_);
  }

 private:
  __device__ __forceinline__ void issue(int stage, uint32_t row) {
    const uint32_t bytes = vectors_ * 16;
    uint32_t total = 0;
#pragma unroll
    for (int k = 0; k < kInputs; ++k) total += kPlain || sources_[k] ? bytes : 0;
    barrier_arrive_expect(&full_[stage], total);
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      if (!kPlain && !sources_[k]) continue;
      bulk_copy_to_shared(ring_ + (stage * kInputs + k) * vectors_,
                          sources_[k].template row<T, kPlain>(row), bytes, &full_[stage]);
    }
  }

  const UntypedRows* sources_;
  uint32_t step_, rows_;
  int vectors_, stages_;
  RingStep stage_;
  uint4* ring_;
  uint64_t* full_;
};

}  // namespace fk::cuda::norm
