// This is what the kernels that keep the recurrent weights share: the product of a block's weights
// with a vector for each of eight sequences, and the exchange of vectors among the blocks of a
// team. The plan (kept_plan.h) says who keeps what.
//
// Going forward, row `gates * unit + gate` of a block's weights belongs to its hidden unit number
// `unit`; going backward row `unit` does.
//
// Shared memory of a block, in this order: where sequences lie, two barriers, the vectors that are
// multiplied (kept_plan.h says how many sets), two sets of sums of the product that rounds use in
// turn, what each unit carries of each sequence, and the units' biases or, going backward, what a
// thread's pairs have added up of the gradients of biases.
#pragma once

#include "cuda/dependent_launch.cuh"
#include "cuda/mma.cuh"
#include "cuda/tma.cuh"
#include "ops/rnn/cuda/cells.cuh"
#include "ops/rnn/cuda/exchange.cuh"
#include "ops/rnn/cuda/kept_plan.h"
#include "ops/rnn/cuda/views.cuh"

namespace fk::cuda::rnn {

// W_hh where it lies, for a kernel whose lanes can load their vectors of it themselves.
struct WeightRows {
  const void* data = nullptr;  // null: packed
  int64_t row = 0;             // elements from row to row, a multiple of a vector's
};

// Weights of a warp in the registers of its lanes: what is in them, `Product` says.
struct KeptWeights {
  uint4 vectors[kKeptVectors];

  // The weights are loaded as rnn_pack_weights laid them out.
  __device__ __forceinline__ void load(const uint4* packed, const KeptPlan& plan, int rank) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint4* const from = packed + (rank * kKeptWarps + warp) * plan.vectors * 32 + lane;
#pragma unroll
    for (int i = 0; i < kKeptVectors; ++i) {
      vectors[i] = i < plan.vectors ? from[i * 32] : make_uint4(0, 0, 0, 0);
    }
  }

  // The same from the rows of W_hh that a block multiplies going forward.
  template <class T, int kGates>
  __device__ __forceinline__ void load_rows(const WeightRows& from, const KeptPlan& plan, int rank,
                                            int hidden) {
    constexpr int kWidth = kVecWidth<T>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first_k = warp % plan.slices * plan.slab;
    const auto row_of = [&](int row) -> const T* {
      const int unit = row / kGates, own = rank * plan.units + unit;
      if (unit >= plan.units || own >= hidden) return nullptr;
      const int64_t r = int64_t{row - unit * kGates} * hidden + own;
      return static_cast<const T*>(from.data) + r * from.row;
    };
    const auto vector = [&](const T* row, int i, int k) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (row != nullptr && i < plan.vectors && k < hidden) {
        v = *reinterpret_cast<const uint4*>(row + k);
      }
      return v;
    };
    if constexpr (sizeof(T) == 4) {
      const T* rows[kFloatRows];
#pragma unroll
      for (int r = 0; r < kFloatRows; ++r) rows[r] = row_of(float_row(plan, warp, lane) + r);
#pragma unroll
      for (int i = 0; i < kKeptVectors; ++i) {
        vectors[i] = vector(rows[i % kFloatRows], i, first_k + float_depth(plan, lane, i));
      }
    } else {
      constexpr int kTiles = tensor_tiles(Direction::kForward);
      const T* rows[kTiles][2];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const int row = (warp / plan.slices * kTiles + tile) * 16 + lane / 4;
        rows[tile][0] = row_of(row);
        rows[tile][1] = row_of(row + 8);
      }
#pragma unroll
      for (int i = 0; i < kKeptVectors; i += 2) {
        const int block = i / 2 / kTiles, tile = i / 2 % kTiles;
        const int k = first_k + block * kTensorBlock + lane % 4 * kWidth;
        const uint4 a = vector(rows[tile][0], i, k), b = vector(rows[tile][1], i, k);
        vectors[i] = make_uint4(a.x, b.x, a.y, b.y);
        vectors[i + 1] = make_uint4(a.z, b.z, a.w, b.w);
      }
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

  // The sums of eight sequences. Two of each tile take turns, so that no product waits for the one
  // before.
  struct Sums {
    float of[kTiles][2][4] = {};

    __device__ __forceinline__ void add(const KeptWeights& weights, int block, const uint4& v) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint4& low = weights.vectors[(block * kTiles + tile) * 2];
        const uint4& high = weights.vectors[(block * kTiles + tile) * 2 + 1];
        mma_16816(of[tile][0], {low.x, low.y, low.z, low.w}, v.x, v.y, T());
        mma_16816(of[tile][1], {high.x, high.y, high.z, high.w}, v.z, v.w, T());
      }
    }

    // `first` is the number of the eight among those of the round.
    __device__ __forceinline__ void store(const KeptPlan& plan, int first, float* sums) const {
      const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
      const int slice = warp % plan.slices, first_row = warp / plan.slices * kTiles * 16;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        float* const to = sums + (slice * plan.together + first + 2 * t) * plan.sum_pitch +
                          first_row + tile * 16 + g;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          to[i % 2 * plan.sum_pitch + i / 2 * 8] = of[tile][0][i] + of[tile][1][i];
        }
      }
    }
  };

  // Multiplies vectors in shared memory, for one round of eight sequences.
  __device__ __forceinline__ static void run(const KeptWeights& weights, const KeptPlan& plan,
                                             const T* vectors, int, float* sums) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int slice = warp % plan.slices;
    const uint32_t from = shared_address(vectors + g * plan.pitch + slice * plan.slab + 8 * t);
    Sums sum;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (block * kTensorBlock >= plan.slab) break;
      sum.add(weights, block,
              load_shared(from + block * kTensorBlock * static_cast<int>(sizeof(T))));
    }
    sum.store(plan, 0, sums);
  }

  // Multiplies vectors in global memory, each warp waiting for its own, in a round of `count`
  // sequences. `row_of(s)` is sequence s's vector of plan.depth() elements, or null for zeros.
  // While one batch of loads is multiplied the next is under way.
  static constexpr int kBatch = kBlocks / 2;
  struct Batch {
    uint4 v[kBatch];

    __device__ __forceinline__ void ask(const T* row, int first, int slab) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const bool is_there = row != nullptr && (first + i) * kTensorBlock < slab;
        v[i] = make_uint4(0, 0, 0, 0);
        if (is_there) v[i] = load_published(row + (first + i) * kTensorBlock);
      }
    }
    __device__ __forceinline__ void wait(const T* row, int first, int slab) {
      while (true) {
        uint32_t found = 0;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) found |= missing<T>(v[i]);
        if (!__any_sync(0xffffffff, found != 0)) break;
        if (found != 0) ask(row, first, slab);
      }
    }
  };
  template <class RowOf>
  __device__ __forceinline__ static void run_from_global(const KeptWeights& weights,
                                                         const KeptPlan& plan, int count,
                                                         const RowOf& row_of, float* sums) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int from = warp % plan.slices * plan.slab + 8 * t;
    const auto part_of = [&](int s) -> const T* {
      const T* const row = s < count ? row_of(s) : nullptr;
      return row == nullptr ? nullptr : row + from;
    };
    const T* row = part_of(g);
    Batch next;
    next.ask(row, 0, plan.slab);
#pragma unroll 1
    for (int first = 0; first < count; first += kTogether) {
      const bool is_last = first + kTogether >= count;
      const T* const next_row = is_last ? nullptr : part_of(first + kTogether + g);
      Sums sum;
#pragma unroll
      for (int batch = 0; batch < kBlocks / kBatch; ++batch) {
        if (batch * kBatch * kTensorBlock >= plan.slab) break;
        Batch now = next;
        const bool ends =
            batch + 1 == kBlocks / kBatch || (batch + 1) * kBatch * kTensorBlock >= plan.slab;
        if (!ends) {
          next.ask(row, (batch + 1) * kBatch, plan.slab);
        } else if (!is_last) {
          next.ask(next_row, 0, plan.slab);
        }
        now.wait(row, batch * kBatch, plan.slab);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if ((batch * kBatch + i) * kTensorBlock < plan.slab) {
            sum.add(weights, batch * kBatch + i, now.v[i]);
          }
        }
      }
      sum.store(plan, first, sums);
      row = next_row;
    }
  }
};

// The product on FMA units, in float. A lane has four rows, so that what it loads of a vector
// serves four times, and of them every so many-th four elements, as there are lanes with the same
// rows.
template <Direction kDirection>
struct Product<float, kDirection> {
  __device__ __forceinline__ static void run(const KeptWeights& weights, const KeptPlan& plan,
                                             const float* vectors, int count, float* sums) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int parts = kFloatRows * plan.lanes, part = lane % parts;
    const int slice = warp % plan.slices;
    const bool odd = part & 1, upper = part & 2;
    const int row = float_row(plan, warp, lane) + (odd ? 2 : 0) + (upper ? 1 : 0);
    const float* const from = vectors + slice * plan.slab + part * 4;
    float* const to = sums + slice * plan.together * plan.sum_pitch + row;
#pragma unroll 2
    for (int s = 0; s < count; ++s) {
      float sum[kFloatRows] = {};
#pragma unroll
      for (int i = 0; i < kKeptVectors; i += kFloatRows) {
        if (i >= plan.vectors) break;
        const Vec<float, 4> v = load<4>(from + s * plan.pitch + i * plan.lanes * 4);
#pragma unroll
        for (int r = 0; r < kFloatRows; ++r) {
          const uint4& w = weights.vectors[i + r];
          sum[r] = fmaf(__uint_as_float(w.x), v.data[0], sum[r]);
          sum[r] = fmaf(__uint_as_float(w.y), v.data[1], sum[r]);
          sum[r] = fmaf(__uint_as_float(w.z), v.data[2], sum[r]);
          sum[r] = fmaf(__uint_as_float(w.w), v.data[3], sum[r]);
        }
      }
      // Neighbours add up: of four lanes each ends with one of the rows.
      float a = __shfl_xor_sync(0xffffffff, odd ? sum[0] : sum[2], 1);
      float b = __shfl_xor_sync(0xffffffff, odd ? sum[1] : sum[3], 1);
      a += odd ? sum[2] : sum[0];
      b += odd ? sum[3] : sum[1];
      float total = __shfl_xor_sync(0xffffffff, upper ? a : b, 2);
      total += upper ? b : a;
      for (int m = kFloatRows; m < parts; m *= 2) total += __shfl_xor_sync(0xffffffff, total, m);
      if (part < kFloatRows) to[s * plan.sum_pitch] = total;
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

// A thread's pairs of a sequence of the round and a unit.
struct Pairs {
  int s[kPairs], u[kPairs];

  __device__ __forceinline__ explicit Pairs(int units) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int n = static_cast<int>(threadIdx.x) + i * kKeptThreads;
      s[i] = n / units;
      u[i] = n - s[i] * units;
    }
  }
};

// A block's part in its team, and its shared memory.
template <class T, Exchange kExchange>
struct Team {
  static constexpr bool kShared = kExchange == Exchange::kShared;
  static constexpr int kSets =
      vector_sets(sizeof(T) == 4 ? DType::kFloat32 : DType::kFloat16, kExchange);
  static constexpr bool kStaged = kSets > 0 && !kShared;

  const KeptPlan& plan;
  const Problem& p;
  uint64_t* barriers;  // of a cluster: each is passed when this block has a step's vectors
  T* vectors;
  float *sums, *carried, *bias;
  Place* places;
  int rank, units, count;  // of the block; the units and sequences that are there
  int64_t first_unit, first_sequence, longest;

  __device__ __forceinline__ Team(const KeptPlan& plan_, const Problem& problem, char* memory)
      : plan(plan_), p(problem) {
    places = reinterpret_cast<Place*>(memory);
    barriers = reinterpret_cast<uint64_t*>(places + plan.sequences);
    vectors = reinterpret_cast<T*>(barriers + 2);
    sums = reinterpret_cast<float*>(vectors + kSets * kTogether * plan.pitch);
    carried = sums + 2 * plan.sums();
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
    for (int i = threadIdx.x; i < kSets * kTogether * plan.pitch; i += kKeptThreads) {
      vectors[i] = from_float<T>(0.f);
    }
    if (kShared && threadIdx.x == 0) {
      barrier_init(&barriers[0], 1);
      barrier_init(&barriers[1], 1);
#if __CUDA_ARCH__ >= 900
      fence_barrier_init_cluster();
#endif
    }
    __syncthreads();
    longest = 0;
    for (int s = 0; s < count; ++s) longest = max(longest, places[s].steps);
  }

  __device__ __forceinline__ int round_of(int first) const {
    return min(plan.together, count - first);
  }

  // Step number `step`'s set of vectors.
  __device__ __forceinline__ T* set_of(int64_t step) const {
    return vectors + step % kSets * kTogether * plan.pitch;
  }

  // Blocks that write into each other's shared memory: makes ready for the vectors of steps 1 to
  // `last`, which the team's other blocks send, and meets these blocks once.
  __device__ __forceinline__ void meet([[maybe_unused]] int64_t last) const {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
      if (last >= 1) expect(1);
      if (last >= 2) expect(2);
    }
    cluster_arrive();
    cluster_wait();
#else
    __syncthreads();
#endif
  }
#if __CUDA_ARCH__ >= 900
  // All entries come with each step, also those of sequences that have ended.
  __device__ __forceinline__ void expect(int64_t step) const {
    const int entries = plan.entries * count;
    barrier_arrive_expect(&barriers[step % 2], entries * static_cast<int>(sizeof(T)));
  }
#endif
  // Waits for the vectors of a step from 1 to `last`.
  __device__ __forceinline__ void wait(int64_t step, [[maybe_unused]] int64_t last) const {
#if __CUDA_ARCH__ >= 900
    if (plan.blocks > 1) {
      barrier_wait(&barriers[step % 2], static_cast<uint32_t>((step - 1) / 2 % 2));
      // Who sends what comes after that has this block's part of the next step first.
      if (threadIdx.x == 0 && step + 2 <= last) expect(step + 2);
      return;
    }
#endif
    __syncthreads();
  }

  // Puts an entry of a sequence's vector where all blocks of the team read it in step `step`.
  // Neighbouring lanes have neighbouring entries, the even lane's even; all lanes of a warp call
  // this, those without an entry with is_there = false.
  __device__ __forceinline__ void share(int64_t step, bool is_there, int s, int entry,
                                        float value) const {
    T* const at = set_of(step) + s * plan.pitch + entry;
#if __CUDA_ARCH__ >= 900
    if (plan.blocks > 1) {
      constexpr int kLanes = 4 / sizeof(T);  // that share a word, and the blocks it goes to
      uint32_t word = published_bits<T>(value);
      const int half = threadIdx.x % kLanes;
      if constexpr (kLanes == 2) {
        const uint32_t other = __shfl_xor_sync(0xffffffff, word, 1);
        word = half == 0 ? word | other << 16 : other | word << 16;
      }
      if (!is_there) return;
      for (int to = half; to < plan.blocks; to += kLanes) {
        store_remote(remote_address(at - half, to), static_cast<int>(word),
                     remote_address(&barriers[step % 2], to));
      }
      return;
    }
#endif
    if (is_there) *at = from_float<T>(value);
  }

  // The products of the rows of a unit, kRows of them, with sequence s of a round.
  template <int kRows>
  __device__ __forceinline__ void add_sums(const float* from, int u, int s,
                                           float (&to)[kRows]) const {
    from += s * plan.sum_pitch + u * kRows;
    for (int part = 0; part < plan.slices; ++part) {
      if constexpr (kRows == 4 && sizeof(T) == 2) {
        const float4 v = *reinterpret_cast<const float4*>(from);
        to[0] += v.x;
        to[1] += v.y;
        to[2] += v.z;
        to[3] += v.w;
      } else {
#pragma unroll
        for (int i = 0; i < kRows; ++i) to[i] += from[i];
      }
      from += plan.together * plan.sum_pitch;
    }
  }
};

// Brings the vectors of eight sequences into shared memory, from rows in global memory where other
// blocks publish them. `row_of(s)` is sequence s's row, or null for zeros.
template <class T, class RowOf>
__device__ __forceinline__ void stage(T* vectors, int pitch, int depth, int count,
                                      const RowOf& row_of) {
  constexpr int kWidth = kVecWidth<T>, kAtOnce = 4;
  const int of_row = depth / kWidth;
  for (int first = threadIdx.x; first < count * of_row; first += kAtOnce * kKeptThreads) {
    const T* from[kAtOnce];
    int to[kAtOnce];
    uint4 v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int n = first + i * kKeptThreads, s = n / of_row, k = (n - s * of_row) * kWidth;
      const T* const row = s < count ? row_of(s) : nullptr;
      from[i] = row == nullptr ? nullptr : row + k;
      to[i] = s < count ? s * pitch + k : -1;
      v[i] = make_uint4(0, 0, 0, 0);
      if (from[i] != nullptr) v[i] = load_published(from[i]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      while (missing<T>(v[i]) != 0) v[i] = load_published(from[i]);
      if (to[i] >= 0) *reinterpret_cast<uint4*>(vectors + to[i]) = v[i];
    }
  }
}

}  // namespace fk::cuda::rnn
