// The last sums of the backward: over blocks of channels for dB and dC, over segments for dA, dD
// and ddelta_bias, all in one kernel.
#pragma once

#include "cuda/row_partition.cuh"
#include "ops/selective_scan/cuda/backward_stage.cuh"

namespace fk::cuda {

constexpr int kSumThreads = 256;

struct BackwardSums {
  BackwardArgs args;
  scan::GroupView dB, dC;
  float* dA;
  int64_t dA_channel, dA_state;
  ChannelView dD, dbias;
  int64_t state_parts, of_A;  // sums of four for dB and dC, and sums for dA
  // So many threads make one sum, 1 or a power of two from 8 to 32: over blocks of channels, over
  // segments.
  int split, time_split;

  FK_HOST_DEVICE int64_t state_blocks() const { return blocks_for(state_parts, split); }
  FK_HOST_DEVICE int64_t blocks() const {
    return state_blocks() + blocks_for(of_A, time_split) +
           blocks_for(2 * args.channels, time_split);
  }
  FK_HOST_DEVICE static int64_t blocks_for(int64_t sums, int split) {
    const int each = kSumThreads / split;
    return ceil_div(sums, each);
  }
  // Returns so many threads that each adds up a few, as long as `room` threads are enough for all
  // `sums`.
  static int split_of(int64_t sums, int64_t parts, int64_t room) {
    return parts > 64 && sums * 32 <= room ? 32 : parts > 4 && sums * 8 <= room ? 8 : 1;
  }
};

// Returns the sum of `count` rows at one place, by `split` threads of the block: thread i and those
// that are a multiple of kSumThreads / split after it. The first has the sum; there is none without
// `exists`.
template <int kWidth>
__device__ __forceinline__ Vec<float, kWidth> sum_rows(const float* place, int64_t pitch,
                                                       int64_t count, int split, bool exists) {
  using Values = Vec<float, kWidth>;
  __shared__ Values of_warps[kSumThreads];
  const int each = kSumThreads / split;
  Values sum{};
  const auto add = [&](const Values& v) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sum.data[k] += v.data[k];
  };
  if (exists) {
    const int turn = threadIdx.x / each;
    const float* p = place + turn * pitch;
#pragma unroll 8
    for (int64_t i = turn; i < count; i += split) {
      add(load<kWidth>(p));
      p += split * pitch;
    }
  }
  if (split == 1) return sum;
  for (int mask = each; mask < 32; mask *= 2) {
    Values other;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      other.data[k] = __shfl_xor_sync(0xffffffffu, sum.data[k], mask);
    }
    add(other);
  }
  of_warps[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x < each) {
#pragma unroll
    for (int w = 1; w < kSumThreads / 32; ++w) add(of_warps[w * 32 + threadIdx.x]);
  }
  return sum;
}

__global__ void __launch_bounds__(kSumThreads) sum_parts(const __grid_constant__ BackwardSums s) {
  const BackwardArgs& a = s.args;
  int64_t block = block_index();
  if (block < s.state_blocks()) {
    const int each = kSumThreads / s.split;
    const int64_t index = block * each + threadIdx.x % each;
    const bool exists = index < s.state_parts;
    const int lane = index % 32, piece = index / 32 % (kChunk / kPieceSteps);
    int64_t rest = index / (kChunkParts / 4);
    const int n =
        static_cast<int>(rest % a.state_groups) * kGroupStates + lane % 4 * 4 + (lane & 16 ? 2 : 0);
    rest /= a.state_groups;
    const int64_t slot = rest % a.chunks.slots, group = rest / a.chunks.slots;
    if (a.chunks.sequences.packed) wait_for_earlier_kernels();  // offsets lie in memory
    const Segment chunk = a.chunks[slot];
    const int64_t step = chunk.first + piece * kPieceSteps + (lane >> 3 & 1) * 2 + (lane >> 2 & 1);
    const bool writes = exists && chunk.exists && step < chunk.last;
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const Vec<float, 4> sum = sum_rows<4>(a.parts_of_states + index * 4, s.state_parts * 4,
                                          a.blocks_per_group, s.split, exists);
    if (threadIdx.x >= each || !writes) return;
    const auto put = [&](const scan::GroupView& to, float first, float second) {
      if (to.data == nullptr) return;
      const int64_t at = chunk.batch * to.batch + step * to.step + group * to.group + n * to.state;
      if (n < a.states) store_as(to.dtype, to.data, at, first);
      if (n + 1 < a.states) store_as(to.dtype, to.data, at + to.state, second);
    };
    put(s.dB, sum.data[0], sum.data[1]);
    put(s.dC, sum.data[2], sum.data[3]);
    return;
  }
  block -= s.state_blocks();
  const int each = kSumThreads / s.time_split;
  const int64_t blocks_of_A = BackwardSums::blocks_for(s.of_A, s.time_split);
  const bool of_A = block < blocks_of_A;
  const int64_t sums = of_A ? s.of_A : 2 * a.channels;
  const int64_t index = (block - (of_A ? 0 : blocks_of_A)) * each + threadIdx.x % each;
  const int64_t row = of_A ? index / a.states : index % a.channels;  // a channel
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const float sum = sum_rows<1>((of_A ? a.parts_of_A : a.parts_of_channels) + index, sums,
                                a.segments.slots, s.time_split, index < sums)
                        .data[0];
  if (threadIdx.x >= each || index >= sums) return;
  if (of_A) {
    if (s.dA != nullptr) s.dA[row * s.dA_channel + (index - row * a.states) * s.dA_state] = sum;
    return;
  }
  const ChannelView& to = index < a.channels ? s.dD : s.dbias;
  if (to.data == nullptr) return;
  store_as(to.is_float ? DType::kFloat32 : a.u.dtype, to.data, row * to.stride, sum);
}

}  // namespace fk::cuda
