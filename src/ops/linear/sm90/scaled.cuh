// A product of 8-bit floats with scales on Hopper:
//   y = act(sum over blocks b of sx[m, b] sw[n, b] (x_b W_b^T) + bias) + residual.
//
// Floor: 2 M N K operations at 8192 a clock and multiprocessor. A tile of 128 x 128 takes 512
// clocks for 128 of K less half, in which 32 KB come from the L2 cache: 128 bytes a clock at that
// rate, twice what a multiprocessor gets, so the copies bound large products, not the tensor cores.
//
// Tensor cores add up 8-bit products with about 14 bits. So a stage is one block of scales, 128 of
// K: its sums begin at 0, are multiplied by the block's scales, and are added up in float. A block
// has a warpgroup whose first thread feeds shared memory by the copy engine, and two that have 64
// rows of the tile each: while one scales its sums, the other's product keeps the tensor cores
// busy. Blocks are persistent; copies for the next tile run during an epilogue.
#pragma once

#include "cuda/float8.cuh"
#include "cuda/gemm/sm90_plan.cuh"
#include "ops/linear/scaled_linear.h"

namespace fk::cuda_sm90 {

struct ScaledArguments {
  CUtensorMap x, weight;  // boxes of 128 x 128
  Scales x_scale, weight_scale;
  int rows, columns, slices;  // slices: of 128 of K
  cuda::TileOrder order;
  cuda::Epilogue epilogue;
  cuda::PlainMatrix out, residual;
  bool pairs;  // two neighbours of a result's row can be stored at once
};

struct ScaledPlan {
  static constexpr int kRows = 128, kColumns = 128, kDepth = 128, kStages = 6;
  static constexpr int kThreads = 384, kWarps = 8;  // kWarps: those that multiply
  static constexpr int kProducerRegisters = 40, kRegisters = 232;
  static constexpr int kOperandBytes = 128 * 128, kStageBytes = 2 * kOperandBytes;
  static constexpr int kBarriersAt = kStages * kStageBytes;
  static constexpr int kSharedBytes = kBarriersAt + 2 * kStages * 8;
  static_assert(kDepth == kScaleBlock && kColumns == kScaleBlock);
};

struct ScaledBarriers {
  uint64_t full[ScaledPlan::kStages], empty[ScaledPlan::kStages];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// The thread that loads.
__device__ __forceinline__ void load_scaled(const ScaledArguments& a, char* shared,
                                            ScaledBarriers* barriers) {
  using Plan = ScaledPlan;
  Turn<Plan::kStages> turn;
  for (int index = blockIdx.x; index < a.order.count(); index += gridDim.x) {
    int row_tile, column_tile;
    a.order.place(index, &row_tile, &column_tile);
    for (int slice = 0; slice < a.slices; ++slice, turn.next()) {
      cuda::barrier_wait(&barriers->empty[turn.place], turn.phase ^ 1);
      uint64_t* const full = &barriers->full[turn.place];
      char* const to = shared + turn.place * Plan::kStageBytes;
      cuda::barrier_arrive_expect(full, Plan::kStageBytes);
      cuda::tensor_load(to, &a.x, full, slice * Plan::kDepth, row_tile * Plan::kRows);
      cuda::tensor_load(to + Plan::kOperandBytes, &a.weight, full, slice * Plan::kDepth,
                        column_tile * Plan::kColumns);
    }
  }
}

// A warpgroup that multiplies: 64 rows of each tile.
struct ScaledMultiplier {
  using Plan = ScaledPlan;
  static constexpr int kSums = Plan::kColumns / 2;  // of a thread

  const ScaledArguments& a;
  char* const shared;
  ScaledBarriers* const barriers;
  const int warpgroup;
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  Turn<Plan::kStages> turn;
  int row, column;  // the thread's first row; the tile's first column

  // Each warp says for itself that it has read a stage.
  __device__ __forceinline__ void release(int place) const {
    __syncwarp();
    if (lane == 0 || cuda::kEveryLaneArrives) cuda::barrier_arrive(&barriers->empty[place]);
  }
  // What the sums of one of the thread's two rows are multiplied with. Scales of the weight's rows
  // wait for the epilogue.
  __device__ __forceinline__ float scale(int half, int slice) const {
    const int r = row + 8 * half;
    if (r >= a.rows) return 0.f;
    const int64_t k = int64_t{slice} * Plan::kDepth;
    const float of_x = a.x_scale.at(r, k);
    return a.weight_scale.rows_each == 1 ? of_x : of_x * a.weight_scale.at(column, k);
  }

  __device__ __forceinline__ void multiply_tile(float (&total)[kSums]) {
#pragma unroll
    for (float& value : total) value = 0.f;
    float scales[2] = {scale(0, 0), scale(1, 0)};
#pragma unroll 1
    for (int slice = 0; slice < a.slices; ++slice) {
      cuda::barrier_wait(&barriers->full[turn.place], turn.phase);
      const char* const stage = shared + turn.place * Plan::kStageBytes;
      const uint64_t left = cuda::k_major(stage + warpgroup * 64 * 128);
      const uint64_t right = cuda::k_major(stage + Plan::kOperandBytes);
      float sum[kSums];
      cuda::keep_registers(sum);
      cuda::warpgroup_fence();
#pragma unroll
      for (int i = 0; i < Plan::kDepth / 32; ++i) {
        cuda::multiply<__nv_fp8_e4m3>(sum, cuda::advance(left, 32 * i),
                                      cuda::advance(right, 32 * i), i > 0);
      }
      cuda::warpgroup_commit();
      const float now[2] = {scales[0], scales[1]};
      if (slice + 1 < a.slices) {  // on their way while the product runs
        scales[0] = scale(0, slice + 1);
        scales[1] = scale(1, slice + 1);
      }
      cuda::warpgroup_wait<0>();
      cuda::keep_registers(sum);
      release(turn.place);
      turn.next();
#pragma unroll
      for (int i = 0; i < kSums; ++i) total[i] += sum[i] * now[i / 2 % 2];
    }
  }

  __device__ __forceinline__ void finish(float (&x)[kSums]) const {
    const auto column_of = [&](int i) { return column + i / 4 * 8 + 2 * (lane % 4) + i % 2; };
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int c = column_of(i);
      if (i / 2 % 2 != 0 || c >= a.columns) continue;  // both rows at a time
      if (a.weight_scale.rows_each == 1) {
        const float by = a.weight_scale.at(c, 0);
        x[i] *= by;
        x[i + 2] *= by;
      }
      if (a.epilogue.bias != nullptr) {
        const float bias = cuda::load_either<__nv_bfloat16>(a.epilogue.bias, a.epilogue.float_bias,
                                                            c * a.epilogue.bias_stride);
        x[i] += bias;
        x[i + 2] += bias;
      }
    }
    cuda::with_activation(a.epilogue.activation, [&](auto kind) {
#pragma unroll
      for (float& value : x) value = cuda::activate<decltype(kind)::value, false>(value);
    });
#pragma unroll
    for (int i = 0; i < kSums; i += 2) {
      const int64_t r = row + i / 2 % 2 * 8, c = column_of(i);
      if (r >= a.rows) continue;
      const auto place = [&](const cuda::PlainMatrix& m, int64_t at) {
        return r * m.row + at * m.column;
      };
      if (a.residual.data != nullptr) {
        const bool is_float = a.residual.dtype == DType::kFloat32;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (c + j >= a.columns) continue;
          x[i + j] +=
              cuda::load_either<__nv_bfloat16>(a.residual.data, is_float, place(a.residual, c + j));
        }
      }
      auto* const out = static_cast<__nv_bfloat16*>(a.out.data);
      if (a.pairs && c + 1 < a.columns) {
        *reinterpret_cast<uint32_t*>(out + place(a.out, c)) =
            cuda::pack_pair<__nv_bfloat16>(x[i], x[i + 1]);
        continue;
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (c + j < a.columns) out[place(a.out, c + j)] = __float2bfloat16_rn(x[i + j]);
      }
    }
  }

  __device__ __forceinline__ void run() {
    for (int index = blockIdx.x; index < a.order.count(); index += gridDim.x) {
      int row_tile, column_tile;
      a.order.place(index, &row_tile, &column_tile);
      row = row_tile * Plan::kRows + 64 * warpgroup + 16 * warp + lane / 4;
      column = column_tile * Plan::kColumns;
      float total[kSums];
      multiply_tile(total);
      finish(total);
    }
  }
};

#endif

__global__ void __launch_bounds__(ScaledPlan::kThreads, 1)
    scaled_product(const __grid_constant__ ScaledArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Plan = ScaledPlan;
  extern __shared__ __align__(1024) char shared[];
  auto* barriers = reinterpret_cast<ScaledBarriers*>(shared + Plan::kBarriersAt);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Plan::kStages; ++i) {
      cuda::barrier_init(&barriers->full[i], 1);
      cuda::barrier_init_for_warps(&barriers->empty[i], Plan::kWarps);
    }
    cuda::prefetch_tensor_map(&a.x);
    cuda::prefetch_tensor_map(&a.weight);
    cuda::fence_barrier_init();
  }
  __syncthreads();
  cuda::wait_for_earlier_kernels();
  const int group = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (group == 0) {
    cuda::give_registers<Plan::kProducerRegisters>();
    if (threadIdx.x == 0) load_scaled(a, shared, barriers);
  } else {
    cuda::take_registers<Plan::kRegisters>();
    ScaledMultiplier multiplier{a, shared, barriers, group - 1};
    multiplier.run();
  }
  cuda::let_next_kernel_start();
#endif
}

}  // namespace fk::cuda_sm90
