// A product of few rows of x on Hopper, C[m, n] = sum over k of x[m, k] W[n, k], of 16-bit
// numbers or of 8-bit floats with their scales. The weight may lie the other way round.
//
// Floor: the weight is read once, at the bandwidth of memory. What hides its latency is how many
// bytes are under way: the copy engine keeps up to 80 KB of a block's weight on their way to shared
// memory, and two blocks fit on a multiprocessor.
//
// The weight is the left operand, 64 of its rows a block, so that few rows of x waste nothing of
// the tensor cores that anybody waits for. A stage is 128 bytes of K of those rows and of x's; one
// thread loads, a warpgroup multiplies. Where tiles are few, the blocks of a cluster
// share K: each block of the cluster gets some columns of results, the others' sums of which are
// stored in its shared memory.
//
// Tensor cores add up products of 8-bit floats with about 14 bits: such sums begin at 0 in each
// stage, which is one block of scales, and are scaled and added up in float.
//
// With gates, out = act(x gate^T) * (x up^T), half of a block's rows are those of a second weight.
#pragma once

#include "cuda/dependent_launch.cuh"
#include "cuda/float8.cuh"
#include "cuda/gemm/portable_epilogue.cuh"
#include "cuda/gemm/sm90_plan.cuh"
#include "cuda/tma.cuh"
#include "cuda/wgmma.cuh"
#include "ops/linear/scaled_linear.h"

namespace fk::cuda_sm90 {

struct FewRowsArguments {
  CUtensorMap x, weight, second;    // in boxes of 128 bytes of K; second: what gates belong to
  int slices, splits;               // of K
  Scales x_scale, weight_scale;     // of 8-bit floats
  cuda::PortableArguments results;  // what becomes of sums
};

// kX: rows of x that there is room for.
template <class T, int kX>
struct FewRowsPlan {
  // A block has as many columns of the product, rows of the weight, as one instruction multiplies.
  static constexpr int kColumns = 64;
  static constexpr int kDepth = 128 / static_cast<int>(sizeof(T));
  static constexpr int kBlocks = 2;  // of a multiprocessor
  static constexpr int kStages = kX == 64 ? 6 : kX == 32 ? 8 : 10;
  static constexpr int kThreads = 256, kMultiplying = 128;
  static constexpr int kWeightBytes = kColumns * 128, kStageBytes = kWeightBytes + kX * 128;
  static constexpr int kSumsAt = kStages * kStageBytes;
  static constexpr int kBarriersAt = kSumsAt + kX * kColumns * 4;
  static constexpr int kSharedBytes = kBarriersAt + 2 * kStages * 8;
  static_assert(kBlocks * (kSharedBytes + 1024) <= 228 * 1024);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

template <class Plan>
struct FewRowsBarriers {
  uint64_t full[Plan::kStages], empty[Plan::kStages];
};

// The sums of a block's columns, from each block of the cluster: kX rows of kColumns / splits
// floats. A row's groups of eight are permuted by its number, against bank conflicts.
struct FewRowsSums {
  float* const data;
  const int rows, width;

  __device__ __forceinline__ float* at(int split, int m, int n) const {
    return data + (split * rows + m) * width + (n ^ (m / 2 % 4 * 8 & (width - 1)));
  }
};

// Gives the parts of a slice of the weight: how many bytes further each goes, its map, and its
// coordinates. Of pairs, each 64 columns are 32 gates and the 32 that belong to them.
template <class Plan, cuda::Major kWeight, class Body>
__device__ __forceinline__ void load_of_weight(const FewRowsArguments& a, int slice,
                                               const Body& body) {
  const int k = slice * Plan::kDepth, first = blockIdx.x * Plan::kColumns;
  if constexpr (kWeight == cuda::Major::kK) {
    if (a.results.gated) {
      body(0, &a.weight, k, first / 2);
      body(32 * 128, &a.second, k, first / 2);
    } else {
      body(0, &a.weight, k, first);
    }
  } else {
    body(0, &a.weight, first, k);
  }
}

// The thread that loads.
template <class Plan, cuda::Major kWeight>
__device__ __forceinline__ void load_few_rows(const FewRowsArguments& a, char* shared,
                                              FewRowsBarriers<Plan>* barriers, int begin, int end) {
  Turn<Plan::kStages> turn;
#pragma unroll 1
  for (int slice = begin; slice < end; ++slice, turn.next()) {
    cuda::barrier_wait(&barriers->empty[turn.place], turn.phase ^ 1);
    uint64_t* const full = &barriers->full[turn.place];
    char* const to = shared + turn.place * Plan::kStageBytes;
    cuda::barrier_arrive_expect(full, Plan::kStageBytes);
    load_of_weight<Plan, kWeight>(a, slice, [&](int at, const CUtensorMap* map, int c0, int c1) {
      cuda::tensor_load(to + at, map, full, c0, c1);
    });
    cuda::tensor_load(to + Plan::kWeightBytes, &a.x, full, slice * Plan::kDepth, 0);
  }
}

// Threads that have nothing else to do fetch the bias, which nobody waits for until the end.
template <class Plan>
__device__ __forceinline__ void prefetch_bias(const FewRowsArguments& a) {
  const cuda::Epilogue& epilogue = a.results.epilogue;
  const int c = threadIdx.x - (Plan::kThreads - Plan::kColumns);
  const int64_t at = blockIdx.x * int64_t{Plan::kColumns} + c;
  if (epilogue.bias == nullptr || c < 0 || at >= a.results.columns) return;
  const auto* const bias = static_cast<const char*>(epilogue.bias);
  const char* const p = bias + at * epilogue.bias_stride * (epilogue.float_bias ? 4 : 2);
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// Of a thread's sums, those of one column are two rows of x side by side: sum[4 i + 2 j + e] is
// column 16 warp + lane / 4 + 8 j, row 8 i + 2 (lane % 4) + e.
template <class T, int kX, cuda::Major kWeight>
struct FewRowsMultiplier {
  using Plan = FewRowsPlan<T, kX>;
  static constexpr int kSums = kX / 2;
  static constexpr bool kScaled = std::is_same_v<T, __nv_fp8_e4m3>;

  const FewRowsArguments& a;
  char* const shared;
  FewRowsBarriers<Plan>* const barriers;
  const int begin, end;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Turn<Plan::kStages> turn;

  __device__ __forceinline__ void release(int place) const {
    __syncwarp();
    if (lane == 0 || cuda::kEveryLaneArrives) cuda::barrier_arrive(&barriers->empty[place]);
  }
  __device__ __forceinline__ void start_stage(float (&sum)[kSums], bool adds) {
    cuda::barrier_wait(&barriers->full[turn.place], turn.phase);
    const char* const stage = shared + turn.place * Plan::kStageBytes;
    constexpr bool kAlongK = kWeight == cuda::Major::kK;
    const uint64_t left = kAlongK ? cuda::k_major(stage) : cuda::outer_major(stage, 64 * 128);
    const uint64_t right = cuda::k_major(stage + Plan::kWeightBytes);
    cuda::warpgroup_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      cuda::multiply<T, kWeight, cuda::Major::kK>(sum,
                                                  cuda::advance(left, (kAlongK ? 32 : 2048) * i),
                                                  cuda::advance(right, 32 * i), adds || i > 0);
    }
    cuda::warpgroup_commit();
  }

  __device__ __forceinline__ void multiply(float (&total)[kSums]) {
    int last = 0;
#pragma unroll 1
    for (int slice = begin; slice < end; ++slice) {
      start_stage(total, slice > begin);
      cuda::warpgroup_wait<1>();
      if (slice > begin) release(last);
      last = turn.place;
      turn.next();
    }
    cuda::warpgroup_wait<0>();
    cuda::keep_registers(total);
  }

  __device__ __forceinline__ void multiply_scaled(float (&total)[kSums]) {
    const Scales& of_x = a.x_scale;
    const Scales& of_weight = a.weight_scale;
    const bool moves = (of_x.along_k | of_weight.along_k) != 0;
    const bool by_column = of_weight.rows_each == 1;
    const int rows = static_cast<int>(a.results.rows),
              columns = static_cast<int>(a.results.columns);
    const int first = blockIdx.x * Plan::kColumns;
    float x_scales[kX / 4], weight_scale = 1.f;
    const int64_t x_row = of_x.rows_each == 0 ? 0 : of_x.rows.last_stride;
    const float* x_at = of_x.data + begin * of_x.along_k + 2 * (lane % 4) * x_row;
    const float* weight_at = of_weight.data + begin * of_weight.along_k;
    if (of_weight.rows_each > 1) weight_at += of_weight.rows.offset(first / kScaleBlock);
    const auto load = [&] {
#pragma unroll
      for (int i = 0; i < kX / 4; ++i) {
        const int m = i / 2 * 8 + i % 2;
        x_scales[i] = m + 2 * (lane % 4) < rows ? x_at[m * x_row] : 0.f;
      }
      x_at += of_x.along_k;
      if (!by_column) weight_scale = *weight_at;
      weight_at += of_weight.along_k;
    };
    if (begin < end) load();
#pragma unroll 1
    for (int slice = begin; slice < end; ++slice) {
      float now[kX / 4];
#pragma unroll
      for (int i = 0; i < kX / 4; ++i) now[i] = x_scales[i] * weight_scale;
      float sum[kSums];
      cuda::keep_registers(sum);
      start_stage(sum, false);
      if (moves && slice + 1 < end) load();
      cuda::warpgroup_wait<0>();
      cuda::keep_registers(sum);
      release(turn.place);
      turn.next();
#pragma unroll
      for (int i = 0; i < kSums; ++i) total[i] += sum[i] * now[i / 4 * 2 + i % 2];
    }
    if (!by_column) return;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int n = first + 16 * warp + lane / 4 + 8 * j;
      if (n >= columns) continue;
      const float by = of_weight.data[of_weight.rows.offset(n)];
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        if (i / 2 % 2 == j) total[i] *= by;
      }
    }
  }

  // Sums go to the block of the cluster whose columns they belong to.
  __device__ __forceinline__ void put(const FewRowsSums& sums, const float (&total)[kSums]) const {
#pragma unroll
    for (int at = 0; at < kSums; ++at) {
      const int n = 16 * warp + lane / 4 + at / 2 % 2 * 8;
      const int m = at / 4 * 8 + 2 * (lane % 4) + at % 2;
      // Of pairs, a block of the cluster has gates and, behind them, what belongs to them.
      const int half = sums.width / 2, pair = n % 32;
      const int owner = a.results.gated ? pair / half : n / sums.width;
      const int place = a.results.gated ? pair % half + n / 32 * half : n % sums.width;
      if (a.splits == 1) {
        *sums.at(0, m, place) = total[at];
      } else {
        cuda::store_in_block(sums.at(blockIdx.z, m, place), owner, total[at]);
      }
    }
  }

  // A thread's vectors of eight columns of a row.
  __device__ __forceinline__ void finish(const FewRowsSums& sums) const {
    using Result = std::conditional_t<kScaled, __nv_bfloat16, T>;
    const bool gated = a.results.gated;
    const int width = gated ? sums.width / 2 : sums.width;  // of results
    const int along = width / 8, rows = static_cast<int>(a.results.rows);
    const int first = (blockIdx.x * a.splits + blockIdx.z) * width;
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * along; i += Plan::kMultiplying) {
      const int m = i / along, n = i % along * 8;
      if (first + n >= a.results.columns) continue;
      float x[8] = {}, up[8] = {};
#pragma unroll 1
      for (int split = 0; split < a.splits; ++split) {
        add(x, sums.at(split, m, n));
        if (gated) add(up, sums.at(split, m, n + width));
      }
      cuda::ResultVector<Result>(a.results, m, first + n).finish(x, up);
    }
  }

  __device__ __forceinline__ static void add(float (&x)[8], const float* from) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const float4 some = *reinterpret_cast<const float4*>(from + i);
      x[i] += some.x;
      x[i + 1] += some.y;
      x[i + 2] += some.z;
      x[i + 3] += some.w;
    }
  }
};

#endif

template <class T, int kX, cuda::Major kWeight>
__global__ void __launch_bounds__(FewRowsPlan<T, kX>::kThreads, FewRowsPlan<T, kX>::kBlocks)
    few_rows_product(const __grid_constant__ FewRowsArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Plan = FewRowsPlan<T, kX>;
  extern __shared__ __align__(1024) char shared[];
  auto* barriers = reinterpret_cast<FewRowsBarriers<Plan>*>(shared + Plan::kBarriersAt);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Plan::kStages; ++i) {
      cuda::barrier_init(&barriers->full[i], 1);
      cuda::barrier_init_for_warps(&barriers->empty[i], Plan::kMultiplying / 32);
    }
    cuda::prefetch_tensor_map(&a.weight);
    cuda::prefetch_tensor_map(&a.x);
    cuda::fence_barrier_init();
  }
  __syncthreads();
  const bool shares = a.splits > 1;
  if (shares) cuda::cluster_arrive_relaxed();
  const int each = (a.slices + a.splits - 1) / a.splits;
  const int from = blockIdx.z * each, begin = from < a.slices ? from : a.slices;
  const int end = begin + each < a.slices ? begin + each : a.slices;
  prefetch_bias<Plan>(a);
  cuda::wait_for_earlier_kernels();
  cuda::let_next_kernel_start();
  const FewRowsSums sums{reinterpret_cast<float*>(shared + Plan::kSumsAt), kX,
                         Plan::kColumns / a.splits};
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (warp >= Plan::kMultiplying / 32) {
    if (threadIdx.x == Plan::kMultiplying)
      load_few_rows<Plan, kWeight>(a, shared, barriers, begin, end);
    __syncwarp();
    if (shares) {
      cuda::cluster_wait();
      cuda::cluster_arrive();
      cuda::cluster_wait();
    }
    return;
  }
  FewRowsMultiplier<T, kX, kWeight> multiplier{a, shared, barriers, begin, end};
  float total[kX / 2] = {};
  if constexpr (FewRowsMultiplier<T, kX, kWeight>::kScaled) {
    multiplier.multiply_scaled(total);
  } else {
    multiplier.multiply(total);
  }
  if (shares) cuda::cluster_wait();  // all blocks have begun
  multiplier.put(sums, total);
  if (shares) {
    cuda::cluster_arrive();
    cuda::cluster_wait();
  } else {
    cuda::named_barrier_sync(1, Plan::kMultiplying);
  }
  multiplier.finish(sums);
#endif
}

}  // namespace fk::cuda_sm90
