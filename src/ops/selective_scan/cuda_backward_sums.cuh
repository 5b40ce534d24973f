// The last sums of the backward: over blocks of channels for dB and dC, over segments for dA, dD
// and ddelta_bias, all in one kernel.
#pragma once

#include "cuda/row_walk.cuh"
#include "ops/selective_scan/cuda_backward_stage.cuh"

namespace fk::cuda {

constexpr int kSumThreads = 128;

struct BackwardSums {
  BackwardArgs args;
  scan::GroupView dB, dC;
  float* dA;
  int64_t dA_channel, dA_state;
  ChannelView dD, dbias;
  int64_t state_parts, of_A;  // threads for dB and dC, then for dA, then for dD, ddelta_bias

  int split;  // threads for one of the first: a power of two, at most 32

  int64_t threads() const { return state_parts * split + of_A + 2 * args.channels; }
};

template <class T>
__global__ void __launch_bounds__(kSumThreads) sum_parts(const __grid_constant__ BackwardSums s) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const BackwardArgs& a = s.args;
  int64_t index = block_index() * kSumThreads + threadIdx.x;
  if (index < s.state_parts * s.split) {
    // Neighbouring threads share the sum of many parts.
    const int turn = static_cast<int>(index % s.split);
    index /= s.split;
    float4 sum = make_float4(0, 0, 0, 0);
    const float4* parts = reinterpret_cast<const float4*>(a.parts_of_states) + index;
#pragma unroll 8
    for (int i = turn; i < a.blocks_per_group; i += s.split) {
      const float4 v = parts[i * s.state_parts];
      sum.x += v.x;
      sum.y += v.y;
      sum.z += v.z;
      sum.w += v.w;
    }
    for (int mask = 1; mask < s.split; mask *= 2) {
      sum.x += __shfl_xor_sync(0xffffffffu, sum.x, mask);
      sum.y += __shfl_xor_sync(0xffffffffu, sum.y, mask);
      sum.z += __shfl_xor_sync(0xffffffffu, sum.z, mask);
      sum.w += __shfl_xor_sync(0xffffffffu, sum.w, mask);
    }
    if (turn > 0) return;
    const int lane = index % 32, piece = index / 32 % (kChunk / kPieceSteps);
    int64_t rest = index / (kChunkParts / 4);
    const int n =
        static_cast<int>(rest % a.state_groups) * kGroupStates + lane % 4 * 4 + (lane & 16 ? 2 : 0);
    rest /= a.state_groups;
    const Segment chunk = a.chunks[rest % a.chunks.slots];
    const int64_t group = rest / a.chunks.slots;
    const int64_t step = chunk.first + piece * kPieceSteps + (lane >> 3 & 1) * 2 + (lane >> 2 & 1);
    if (!chunk.exists || step >= chunk.last) return;
    const auto put = [&](const scan::GroupView& to, float first, float second) {
      if (to.data == nullptr) return;
      T* p = static_cast<T*>(to.data) + chunk.batch * to.batch + step * to.step + group * to.group +
             n * to.state;
      if (n < a.states) *p = from_float<T>(first);
      if (n + 1 < a.states) p[to.state] = from_float<T>(second);
    };
    put(s.dB, sum.x, sum.y);
    put(s.dC, sum.z, sum.w);
    return;
  }
  index -= s.state_parts * s.split;
  const bool of_A = index < s.of_A;
  if (!of_A) index -= s.of_A;
  if (!of_A && index >= 2 * a.channels) return;
  const float* parts = (of_A ? a.parts_of_A : a.parts_of_channels) + index;
  const int64_t stride = a.channels * (of_A ? a.states : 2);
  float sum = 0;
#pragma unroll 8
  for (int64_t i = 0; i < a.segments.slots; ++i) sum += parts[i * stride];
  if (of_A) {
    if (s.dA != nullptr)
      s.dA[index / a.states * s.dA_channel + index % a.states * s.dA_state] = sum;
    return;
  }
  const ChannelView& to = index < a.channels ? s.dD : s.dbias;
  if (to.data == nullptr) return;
  store_either<T>(to.data, to.is_float, index % a.channels * to.stride, sum);
}

}  // namespace fk::cuda
