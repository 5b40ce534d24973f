// A product of 8-bit floats with scales on Hopper:
//   y = act(sum over blocks b of sx[m, b] sw[n, b] (x_b W_b^T) + bias) + residual.
//
// Floor: 2 M N K operations at 8192 a clock and multiprocessor. A tile of 128 x 128 takes 512
// clocks for 128 of K, in which 32 KB come from the L2 cache: 64 bytes a clock, all that a
// multiprocessor gets.
//
// Tensor cores add up 8-bit products with about 14 bits. So a stage is one block of scales, 128 of
// K: its sums begin at 0, are multiplied by the block's scales, and are added up in float. A block
// has a warpgroup whose first thread feeds shared memory by the copy engine, and two that share the
// rows of the tile, 64 rows at a time: while one scales its sums, the other's product keeps the
// tensor cores busy. Scales come into registers a stage ahead. Blocks are persistent; copies for
// the next tile run during an epilogue, which is that of the 16-bit product (sm90_multiplier.cuh).
#pragma once

#include "cuda/float8.cuh"
#include "cuda/gemm/sm90_multiplier.cuh"
#include "ops/linear/scaled_linear.h"

namespace fk::cuda_sm90 {

struct ScaledArguments {
  ProductArguments product;  // operands in boxes of 128 of K
  Scales x_scale, weight_scale;
};

// kRowBlocks: how many times 64 rows of a tile a warpgroup has.
template <int kRowBlocks>
struct ScaledPlan {
  static constexpr int kBlocks = kRowBlocks, kRows = 128 * kBlocks, kColumns = 128, kDepth = 128;
  static constexpr int kStages = kBlocks == 2 ? 4 : 6, kRoom = 1, kPieces = kColumns / 64;
  static constexpr bool kOutputAlone = true, kShared = true;
  static constexpr int kThreads = 384, kWarps = 8;  // kWarps: those that multiply
  static constexpr int kProducerRegisters = 24, kRegisters = 240;
  static constexpr int kABytes = kRows * kDepth, kStageBytes = kABytes + kColumns * kDepth;
  static constexpr int kPieceBytes = 64 * 128;
  static constexpr int kPiecesAt = kStages * kStageBytes;
  static constexpr int kBiasAt = kPiecesAt + 2 * kRoom * kPieces * kPieceBytes;
  static constexpr int kScalesAt = kBiasAt + 2 * kColumns * 4;  // of columns
  static constexpr int kBarriersAt = kScalesAt + 2 * kColumns * 4;
  static constexpr int kSharedBytes = kBarriersAt + 256;
  static_assert(kDepth == kScaleBlock && kColumns == kScaleBlock);
  static_assert(kSharedBytes <= 227 * 1024);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// The thread that loads.
template <class Plan>
__device__ __forceinline__ void load_scaled(const ProductArguments& a, char* shared,
                                            ProductBarriers<Plan>* barriers) {
  Turn<Plan::kStages> turn;
  for (int index = blockIdx.x; index < a.order.count(); index += gridDim.x) {
    int row_tile, column_tile;
    a.order.place(index, &row_tile, &column_tile);
    for (int slice = 0; slice < a.slices; ++slice, turn.next()) {
      cuda::barrier_wait(&barriers->empty[turn.place], turn.phase ^ 1);
      uint64_t* const full = &barriers->full[turn.place];
      char* const to = shared + turn.place * Plan::kStageBytes;
      cuda::barrier_arrive_expect(full, Plan::kStageBytes);
      cuda::tensor_load(to, &a.a, full, slice * Plan::kDepth, row_tile * Plan::kRows);
      cuda::tensor_load(to + Plan::kABytes, &a.b, full, slice * Plan::kDepth,
                        column_tile * Plan::kColumns);
    }
  }
}

// A warpgroup that multiplies: half of each tile's rows.
template <class Plan>
struct ScaledMultiplier : Multiplier<__nv_bfloat16, Plan, cuda::Major::kK, cuda::Major::kK> {
  using Base = Multiplier<__nv_bfloat16, Plan, cuda::Major::kK, cuda::Major::kK>;
  static constexpr int kBlocks = Plan::kBlocks, kSums = Plan::kColumns / 2;  // of a thread
  using Base::barriers, Base::column, Base::lane, Base::row, Base::shared, Base::thread, Base::turn,
      Base::warp, Base::warpgroup;

  const ScaledArguments& scaled;
  // This is where the scales of the thread's rows and of the tile's columns are for the next 128 of
  // K.
  const float *x_at[kBlocks][2], *weight_at;
  float x_scales[kBlocks][2], weight_scale, column_scale;

  __device__ __forceinline__ ScaledMultiplier(const ScaledArguments& arguments, char* memory,
                                              ProductBarriers<Plan>* all_barriers, int number)
      : Base{arguments.product, memory, all_barriers, number}, scaled(arguments) {}

  __device__ __forceinline__ bool by_column() const { return scaled.weight_scale.rows_each == 1; }
  __device__ __forceinline__ float* column_scales() const {
    return reinterpret_cast<float*>(shared + Plan::kScalesAt) + warpgroup * Plan::kColumns;
  }

  // Begins with the scales of the first 128 of K of a tile that begins at this row and column.
  __device__ __forceinline__ void begin_scales(int at_row, int at_column) {
    const Scales& x = scaled.x_scale;
    const Scales& weight = scaled.weight_scale;
#pragma unroll
    for (int i = 0; i < kBlocks * 2; ++i) {
      // Rows below the last one are not stored, whatever they are multiplied by.
      const int r = at_row + 64 * (i / 2) + 16 * warp + lane / 4 + 8 * (i % 2);
      const int last = scaled.product.rows - 1;
      x_at[i / 2][i % 2] = x.data + (x.rows_each == 0 ? 0 : x.rows.offset(r < last ? r : last));
    }
    weight_at = weight.data;
    weight_scale = column_scale = 1.f;
    if (by_column()) {
      const int c = at_column + thread;
      if (c < scaled.product.columns) column_scale = weight.data[weight.rows.offset(c)];
    } else if (weight.rows_each != 0) {
      weight_at += weight.rows.offset(at_column / Plan::kColumns);
    }
    load_scales();
  }
  // Those of the next 128 of K start on their way to registers.
  __device__ __forceinline__ void load_scales() {
    if (!by_column()) weight_scale = *weight_at;
    weight_at += scaled.weight_scale.along_k;
#pragma unroll
    for (int i = 0; i < kBlocks * 2; ++i) {
      x_scales[i / 2][i % 2] = *x_at[i / 2][i % 2];
      x_at[i / 2][i % 2] += scaled.x_scale.along_k;
    }
  }

  __device__ __forceinline__ void multiply_tile(float (&total)[kBlocks][kSums]) {
    const bool moves = (scaled.x_scale.along_k | scaled.weight_scale.along_k) != 0;
    const int slices = scaled.product.slices;
#pragma unroll
    for (int i = 0; i < kBlocks * kSums; ++i) total[i / kSums][i % kSums] = 0.f;
#pragma unroll 1
    for (int slice = 0; slice < slices; ++slice) {
      cuda::barrier_wait(&barriers->full[turn.place], turn.phase);
      const char* const stage = shared + turn.place * Plan::kStageBytes;
      const uint64_t left = cuda::k_major(stage + warpgroup * kBlocks * 64 * 128);
      const uint64_t right = cuda::k_major(stage + Plan::kABytes);
      float now[kBlocks][2];
#pragma unroll
      for (int i = 0; i < kBlocks * 2; ++i)
        now[i / 2][i % 2] = x_scales[i / 2][i % 2] * weight_scale;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        float sum[kSums];
        cuda::keep_registers(sum);
        cuda::warpgroup_fence();
#pragma unroll
        for (int i = 0; i < Plan::kDepth / 32; ++i) {
          cuda::multiply<__nv_fp8_e4m3>(sum, cuda::advance(left, b * 64 * 128 + 32 * i),
                                        cuda::advance(right, 32 * i), i > 0);
        }
        cuda::warpgroup_commit();
        // On their way while products run.
        if (b == 0 && moves && slice + 1 < slices) load_scales();
        cuda::warpgroup_wait<0>();
        cuda::keep_registers(sum);
        if (b == kBlocks - 1) this->release(turn.place);
#pragma unroll
        for (int i = 0; i < kSums; ++i) total[b][i] += sum[i] * now[b][i / 2 % 2];
      }
      turn.next();
    }
  }

  __device__ __forceinline__ void scale_columns(float (&x)[kSums]) const {
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      const float2 by =
          *reinterpret_cast<const float2*>(column_scales() + i / 4 * 8 + 2 * (lane % 4));
      x[i] *= by.x;
      x[i + 1] *= by.y;
      x[i + 2] *= by.x;
      x[i + 3] *= by.y;
    }
  }

  __device__ __forceinline__ void run() {
    const ProductArguments& a = scaled.product;
    int next_row, next_column;
    const auto begin = [&](int index) {
      int row_tile, column_tile;
      a.order.place(index, &row_tile, &column_tile);
      next_row = row_tile * Plan::kRows + warpgroup * kBlocks * 64;
      next_column = column_tile * Plan::kColumns;
      begin_scales(next_row, next_column);
    };
    const int count = a.order.count(), step = gridDim.x;
    begin(blockIdx.x);  // there are no more blocks than tiles
    for (int index = blockIdx.x; index < count; index += step) {
      row = next_row;
      column = next_column;
      uint32_t biases[Base::kBiases];
      this->begin_tile(biases);
      float total[kBlocks][kSums];
      multiply_tile(total);
      // All have read the last tile's: its results left since.
      if (by_column()) column_scales()[thread] = column_scale;
      // The next tile's first scales are on their way during the epilogue.
      if (index + step < count) begin(index + step);
      this->begin_epilogue(biases);
      if (by_column()) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) scale_columns(total[b]);
      }
      this->finish_tile(total);
    }
    if (thread == 0) cuda::bulk_wait_read<0>();
  }
};

#endif

template <int kRowBlocks>
__global__ void __launch_bounds__(ScaledPlan<kRowBlocks>::kThreads, 1)
    scaled_product(const __grid_constant__ ScaledArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Plan = ScaledPlan<kRowBlocks>;
  extern __shared__ __align__(1024) char shared[];
  auto* barriers = reinterpret_cast<ProductBarriers<Plan>*>(shared + Plan::kBarriersAt);
  static_assert(sizeof(ProductBarriers<Plan>) <= Plan::kSharedBytes - Plan::kBarriersAt);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Plan::kStages; ++i) {
      cuda::barrier_init(&barriers->full[i], 1);
      cuda::barrier_init_for_warps(&barriers->empty[i], Plan::kWarps);
    }
    for (int i = 0; i < 2 * Plan::kRoom; ++i) {
      cuda::barrier_init(&barriers->residual[i / Plan::kRoom][i % Plan::kRoom], 1);
    }
    cuda::prefetch_tensor_map(&a.product.a);
    cuda::prefetch_tensor_map(&a.product.b);
    cuda::fence_barrier_init();
    int row_tile, column_tile;
    a.product.order.place(blockIdx.x, &row_tile, &column_tile);
    for (int i = 0; i < kPrefetchedSlices && i < a.product.slices; ++i) {
      cuda::tensor_prefetch(&a.product.b, i * Plan::kDepth, column_tile * Plan::kColumns);
    }
  }
  __syncthreads();
  cuda::wait_for_earlier_kernels();
  cuda::let_next_kernel_start();
  const int group = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (group == 0) {
    cuda::give_registers<Plan::kProducerRegisters>();
    if (threadIdx.x == 0) load_scaled<Plan>(a.product, shared, barriers);
  } else {
    cuda::take_registers<Plan::kRegisters>();
    ScaledMultiplier<Plan> multiplier(a, shared, barriers, group - 1);
    multiplier.run();
  }
#endif
}

}  // namespace fk::cuda_sm90
