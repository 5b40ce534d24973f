// A matrix product on Hopper, C = A B^T in float with an epilogue, for 16-bit A and B.
//
// Floor: 2 M N K operations at 4096 a clock and multiprocessor. A tile of 128 x 128 takes 512
// clocks for 64 of K, in which 32 KB must come from the L2 cache: 64 bytes a clock, the most that a
// multiprocessor gets; one of 128 x 192 needs 53.
//
// A block has a warpgroup whose first thread feeds shared memory by the copy engine, and two that
// multiply. Each of these has a tile of its own (ping-pong): while one multiplies, the other does
// its epilogue, which so costs nothing as long as it takes no longer than the main loop. Blocks are
// persistent: they take every gridDim.x-th tile.
//
// The epilogue goes through shared memory, 64 rows at a time: the sums become pieces of 64 x 64 in
// the layout of the copy engine (stmatrix), which stores them meanwhile. A residual comes the same
// way: it is loaded into the place from which its result will leave, during the main loop.
#pragma once

#include "cuda/gemm/sm90_multiplier.cuh"

namespace fk::cuda_sm90 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// One operand's part of a stage: kCount of its outer dimension from `outer` on, 64 of K.
template <cuda::Major kMajor, int kCount>
__device__ __forceinline__ void load_operand(char* to, const CUtensorMap* map, uint64_t* full,
                                             int outer, int k) {
  if constexpr (kMajor == cuda::Major::kK) {
    cuda::tensor_load(to, map, full, k, outer);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 64) {
      cuda::tensor_load(to + i * 128, map, full, outer + i, k);
    }
  }
}

// Ahead of earlier kernels' end: the first stages' part of B, which is often a weight, comes into
// the L2 cache. That reads nothing yet, so it does not matter who still writes there.
template <class Plan, cuda::Major kB>
__device__ __forceinline__ void prefetch_operand(const ProductArguments& a) {
  if (kB != cuda::Major::kK || a.gated || blockIdx.x >= a.items()) return;
  const ProductItem item(a, blockIdx.x);
  const int last = item.end < a.first_slices ? item.end : a.first_slices;
  const int end = item.begin + kPrefetchedSlices < last ? item.begin + kPrefetchedSlices : last;
  for (int slice = item.begin; slice < end; ++slice) {
    cuda::tensor_prefetch(&a.b, slice * Plan::kDepth, item.column * Plan::kColumns);
  }
}

// The thread that loads.
template <class Plan, cuda::Major kA, cuda::Major kB>
__device__ __forceinline__ void load_operands(const ProductArguments& a, char* shared,
                                              ProductBarriers<Plan>* barriers) {
  Turn<Plan::kStages> turn;
  for (int index = blockIdx.x; index < a.items(); index += gridDim.x) {
    const ProductItem item(a, index);
    for (int slice = item.begin; slice < item.end; ++slice, turn.next()) {
      cuda::barrier_wait(&barriers->empty[turn.place], turn.phase ^ 1);
      uint64_t* const full = &barriers->full[turn.place];
      char* const to_a = shared + turn.place * Plan::kStageBytes;
      char* const to_b = to_a + Plan::kABytes;
      cuda::barrier_arrive_expect(full, Plan::kStageBytes);
      const bool second = slice >= a.first_slices;
      const int k = (second ? slice - a.first_slices : slice) * Plan::kDepth;
      load_operand<kA, Plan::kRows>(to_a, second ? &a.second_a : &a.a, full, item.row * Plan::kRows,
                                    k);
      if (a.gated) {
        constexpr int kHalf = Plan::kColumns / 2;
        load_operand<kB, kHalf>(to_b, &a.b, full, item.column * kHalf, k);
        load_operand<kB, kHalf>(to_b + kHalf * 128, &a.second_b, full, item.column * kHalf, k);
      } else {
        load_operand<kB, Plan::kColumns>(to_b, second ? &a.second_b : &a.b, full,
                                         item.column * Plan::kColumns, k);
      }
    }
  }
}

#endif

template <class T, class Tile, cuda::Major kA, cuda::Major kB>
__global__ void __launch_bounds__(ProductPlan<Tile>::kThreads, 1)
    matrix_product(const __grid_constant__ ProductArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Plan = ProductPlan<Tile>;
  extern __shared__ __align__(1024) char shared[];
  auto* barriers = reinterpret_cast<ProductBarriers<Plan>*>(shared + Plan::kBarriersAt);
  static_assert(sizeof(ProductBarriers<Plan>) <= Plan::kSharedBytes - Plan::kBarriersAt);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Plan::kStages; ++i) {
      cuda::barrier_init(&barriers->full[i], 1);
      cuda::barrier_init_for_warps(&barriers->empty[i], Plan::kReaders);
    }
    for (int i = 0; i < 2 * Plan::kRoom; ++i) {
      cuda::barrier_init(&barriers->residual[i / Plan::kRoom][i % Plan::kRoom], 1);
    }
    cuda::prefetch_tensor_map(&a.a);
    cuda::prefetch_tensor_map(&a.b);
    if (a.gated || a.first_slices < a.slices) cuda::prefetch_tensor_map(&a.second_b);
    cuda::fence_barrier_init();
    prefetch_operand<Plan, kB>(a);
  }
  __syncthreads();
  cuda::wait_for_earlier_kernels();
  cuda::let_next_kernel_start();
  const int group = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (group == 0) {
    cuda::give_registers<Plan::kProducerRegisters>();
    if (threadIdx.x == 0) load_operands<Plan, kA, kB>(a, shared, barriers);
  } else {
    cuda::take_registers<Plan::kRegisters>();
    Multiplier<T, Plan, kA, kB> multiplier{a, shared, barriers, group - 1};
    multiplier.run();
  }
#endif
}

}  // namespace fk::cuda_sm90
