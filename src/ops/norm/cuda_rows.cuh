// What the norm kernels share: how a kernel sees its tensors, which threads work on a row together,
// and how a row comes into their registers.
#pragma once

#include "core/rows.h"
#include "cuda/async_copy.cuh"
#include "cuda/convert.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/reduce.cuh"

namespace fk::cuda::norm {

// A tensor of type [..., N], or of one entry per row. Without data: not given.
struct View {
  void* data = nullptr;
  Rows rows;
  int64_t column_stride = 1;

  explicit __device__ operator bool() const { return data != nullptr; }

  template <class T>
  __device__ __forceinline__ T* row(int64_t row) const {
    return static_cast<T*>(data) + rows.offset(row);
  }
  // The tiled kernels take fewer than 2^31 rows, so that rows split over several dims cost 32-bit
  // divisions.
  template <class T>
  __device__ __forceinline__ T* row(uint32_t row) const {
    if (rows.ndim <= 1) return static_cast<T*>(data) + row * rows.last_stride;
    int64_t offset = 0;
    for (int i = rows.ndim - 1; i > 0; --i) {
      const uint32_t size = static_cast<uint32_t>(rows.sizes[i]);
      const uint32_t quotient = row / size;
      offset += (row - quotient * size) * rows.strides[i];
      row = quotient;
    }
    return static_cast<T*>(data) + offset + row * rows.strides[0];
  }
};

// A tensor of type P[N].
struct Parameter {
  const void* data = nullptr;
  int64_t stride = 1;
  bool is_float = false;  // else of the activations' dtype
  float otherwise = 0;    // its value where it is not given
  float offset = 0;       // added where it is given
};

// Entries [column, column + N). N > 1 needs stride 1 and 16-byte alignment.
template <class T, int N>
__device__ __forceinline__ void load_parameter(const Parameter& p, int64_t column,
                                               float (&out)[N]) {
  if (p.data == nullptr) {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = p.otherwise;
    return;
  }
  if (std::is_same_v<T, float> || p.is_float) {
    constexpr int kPart = N < 4 ? N : 4;
    const float* data = static_cast<const float*>(p.data) + column * p.stride;
#pragma unroll
    for (int i = 0; i < N; i += kPart) {
      const Vec<float, kPart> v = load_read_only<kPart>(data + i);
#pragma unroll
      for (int j = 0; j < kPart; ++j) out[i + j] = v.data[j];
    }
  } else {
    unpack(load_read_only<N>(static_cast<const T*>(p.data) + column * p.stride), out);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] += p.offset;
}

// The threads that work on one row: a warp, or several that meet at a barrier of their own. A block
// holds kBlock / kTeam teams.
template <int kTeam, int kBlock>
struct Team {
  static constexpr int kSize = kTeam;
  static constexpr int kThreads = kBlock;
  static constexpr int kCount = kBlock / kTeam;
  static constexpr int kWarps = kTeam / kWarpSize;
  static_assert(kTeam % kWarpSize == 0 && kBlock % kTeam == 0 && kCount < 16);

  static __device__ __forceinline__ int rank() { return threadIdx.x % kTeam; }
  static __device__ __forceinline__ int index() { return threadIdx.x / kTeam; }

  static __device__ __forceinline__ void sync() {
    if constexpr (kWarps == 1) {
      __syncwarp();
    } else if constexpr (kCount == 1) {
      __syncthreads();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(index() + 1), "n"(kTeam) : "memory");
    }
  }

  // `scratch` is the team's own, of kWarps values; it may be used again after another sync.
  template <class Value, class Merge>
  static __device__ __forceinline__ Value reduce(Value value, Merge merge, Value* scratch) {
    value = warp_reduce(value, merge);
    if constexpr (kWarps > 1) {
      const int lane = threadIdx.x % kWarpSize;
      if (lane == 0) scratch[rank() / kWarpSize] = value;
      sync();
      if constexpr (kWarps > 4) {
        value = warp_reduce<kWarps>(scratch[lane % kWarps], merge);
      } else {
        // Few enough for every thread to read them all, which is sooner done than shuffles.
        value = scratch[0];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) value = merge(value, scratch[w]);
      }
    }
    return value;
  }
};

// How a kernel is cut for rows of at most kTeam * kVecs vectors.
template <int kTeam, int kBlock, int kVecs_, int kMinBlocks_, bool kBulk_ = false>
struct Tile {
  using Team = norm::Team<kTeam, kBlock>;
  static constexpr int kVecs = kVecs_;
  // Blocks per multiprocessor: at least so many in the forward, just so many in the backward.
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr bool kBulk = kBulk_;  // rows come by bulk copies, where there are any
};

// What __launch_bounds__ may ask for: `blocks` per multiprocessor, or as many as its threads allow.
constexpr int min_blocks(int threads, int blocks) {
#if __CUDA_ARCH__ == 750
  constexpr int kMaxThreads = 1024;
#elif __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 870 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
  constexpr int kMaxThreads = 1536;
#else
  constexpr int kMaxThreads = 2048;
#endif
  return blocks * threads <= kMaxThreads ? blocks : kMaxThreads / threads;
}

// A thread's share of a row: kVecs vectors, vector i at position rank + i * team size.
template <class T, int kVecs>
using RowPart = Vec<T, kVecWidth<T>>[kVecs];

template <class T, class Team, int kVecs>
__device__ __forceinline__ void load_row(const View& source, uint32_t row, int vectors,
                                         RowPart<T, kVecs>& part) {
  const T* data = source.row<T>(row);
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int v = Team::rank() + i * Team::kSize;
    if (v < vectors) part[i] = load_streaming<kVecWidth<T>>(data + v * kVecWidth<T>);
  }
}

// Loads a row when it is asked for; other warps hide the wait.
template <class T, int kInputs, class Team, int kVecs>
class DirectLoader {
 public:
  __device__ DirectLoader(const View* sources, uint32_t, uint32_t, int vectors, uint32_t, int)
      : sources_(sources), vectors_(vectors) {}
  __device__ __forceinline__ void take(uint32_t row, RowPart<T, kVecs> (&parts)[kInputs]) {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      if (sources_[k]) load_row<T, Team, kVecs>(sources_[k], row, vectors_, parts[k]);
    }
  }
  __device__ __forceinline__ void refill(uint32_t) {}

 private:
  const View* sources_;
  int vectors_;
};

// Keeps the team's next rows on their way into a ring of shared memory, by bulk copies (sm_90):
// bytes in flight cost no registers.
constexpr int kMaxStages = 4;

template <class T, int kInputs, class Team, int kVecs>
class BulkLoader {
 public:
  __device__ BulkLoader(const View* sources, uint32_t first, uint32_t step, int vectors,
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
  __device__ __forceinline__ void take(uint32_t, RowPart<T, kVecs> (&parts)[kInputs]) {
    barrier_wait(&full_[stage_], phase_);
    const uint4* slot = ring_ + stage_ * kInputs * vectors_;
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      if (!sources_[k]) continue;
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
    if (Team::rank() == 0 && next < rows_) issue(stage_, next);
    if (++stage_ == stages_) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }

 private:
  __device__ __forceinline__ void issue(int stage, uint32_t row) {
    const uint32_t bytes = vectors_ * 16;
    uint32_t total = 0;
#pragma unroll
    for (int k = 0; k < kInputs; ++k) total += sources_[k] ? bytes : 0;
    barrier_arrive_expect(&full_[stage], total);
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      if (!sources_[k]) continue;
      bulk_copy_to_shared(ring_ + (stage * kInputs + k) * vectors_,
                          sources_[k].template row<T>(row), bytes, &full_[stage]);
    }
  }

  const View* sources_;
  uint32_t step_, rows_;
  int vectors_, stages_;
  int stage_ = 0;
  uint32_t phase_ = 0;
  uint4* ring_;
  uint64_t* full_;
};

}  // namespace fk::cuda::norm
