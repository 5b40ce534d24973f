// The last launch of ssd's backward: ddt, the gradients of heads' parameters, and dB and dC where
// several blocks of a group have a part of them. Everything is added in a fixed order.
//
// Floor: bytes, two floats for each of a step's terms. Steps of a chunk are summed in double, as
// what a step is worth counts in the gradients of all decays before or after it in the chunk.
//
// One block has a head; its warps take turns with chunks, a lane two steps of one. Further blocks
// add up dB and dC, a number each thread.
#pragma once

#include "cuda/reduce.cuh"
#include "ops/ssd/cuda/backward_steps.cuh"

namespace fk::cuda::ssd {

constexpr int kAddingThreads = 512;

// This is what some chunks add to the gradients of a head's A and dt_bias.
struct HeadSums {
  double A = 0, dt_bias = 0;
};

// Returns the sum of x over this lane and those before it.
__device__ __forceinline__ double prefix_sum(double x) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const double other = __shfl_up_sync(kFullMask, x, distance);
    if (lane >= distance) x += other;
  }
  return x;
}

// Returns the sum of x over this lane and those behind it.
__device__ __forceinline__ double suffix_sum(double x) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const double other = __shfl_down_sync(kFullMask, x, distance);
    if (lane + distance < 32) x += other;
  }
  return x;
}

// Stores ddt of a chunk in one head. One warp calls it.
template <class T>
__device__ __forceinline__ void finish_times(const BackwardArguments& a, int64_t slot,
                                             const Segment& chunk, int head, HeadSums* sums) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Times<T> times;
  load_times<T>(a, chunk, head, &times);
  const float* const worth = a.worth_of(slot, head) + 2 * lane;
  const auto pair = [&](int row) { return load<2>(worth + row * kSide); };
  const Vec<float, 2> rate = pair(kRate), column = pair(kColumn);
  double from_state[2] = {}, to_state[2] = {}, through = 0;
  for (int tile = 0; tile < a.state_tiles; ++tile) {
    const Vec<float, 2> from = pair(kFromState + 2 * tile), to = pair(kToState + 2 * tile);
    through += a.through[(slot * a.in.heads + head) * a.state_tiles + tile];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      from_state[i] += from.data[i];
      to_state[i] += to.data[i];
    }
  }
  const float bias = number_of_head<T>(a.in.dt_bias, head);
  const TimeStep own[2] = {TimeStep(a.in, times.raw[0], bias), TimeStep(a.in, times.raw[1], bias)};
  const double A = a.in.A[head * a.in.A_head];
  // What decays from the begin to this lane's steps and to later ones are worth.
  const double from_here = suffix_sum(from_state[0] + from_state[1]);
  const double from_next = __shfl_down_sync(kFullMask, from_here, 1);
  const double later = lane == 31 ? 0.0 : from_next;
  // What decays from steps before a step to the end are worth.
  const double given = to_state[0] * own[0].dt + to_state[1] * own[1].dt;
  const double upto_lane = prefix_sum(given);
  const double before_lane = __shfl_up_sync(kFullMask, upto_lane, 1);
  const double before = lane == 0 ? 0.0 : before_lane;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t step = chunk.first + 2 * lane + i;
    if (step >= chunk.last) continue;
    const double whole = rate.data[i] + (from_state[1] + (i == 0 ? from_state[0] : 0.0) + later) +
                         (before + (i == 1 ? to_state[0] * own[0].dt : 0.0)) + through;
    sums->A += whole * own[i].dt;
    const double ddt = (whole * A + column.data[i] + to_state[i]) * own[i].slope;
    sums->dt_bias += ddt;
    if (a.ddt.data == nullptr) continue;
    static_cast<T*>(a.ddt.data)[a.ddt.offset(chunk.batch, step, head)] =
        from_float<T>(static_cast<float>(ddt));
  }
}

template <class T>
__device__ __forceinline__ void store_number(const HeadNumbers& to, int head, int64_t channel,
                                             double value) {
  if (to.data == nullptr) return;
  store_either<T>(to.data, to.is_float, head * to.head + channel * to.channel,
                  static_cast<float>(value));
}

// Adds up what the chunks have for one head.
template <class T>
__device__ __forceinline__ void sum_head(const BackwardArguments& a, int head) {
  constexpr int kWarps = kAddingThreads / 32;
  constexpr int kTurns = kAddingThreads / static_cast<int>(kMaxSsdChannels);
  __shared__ HeadSums of_warps[kWarps];
  __shared__ double of_channels[kTurns][kMaxSsdChannels];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  HeadSums sums;
#pragma unroll 1
  for (int64_t slot = warp; slot < a.chunks.slots; slot += kWarps) {
    const Segment chunk = a.chunks[slot];
    if (chunk.exists && chunk.first < chunk.last) {
      finish_times<T>(a, slot, chunk, head, &sums);
    }
  }
  sums.A = prefix_sum(sums.A);
  sums.dt_bias = prefix_sum(sums.dt_bias);
  if (lane == 31) of_warps[warp] = sums;
  const int channel = static_cast<int>(threadIdx.x) % static_cast<int>(kMaxSsdChannels);
  const int turn = static_cast<int>(threadIdx.x) / static_cast<int>(kMaxSsdChannels);
  double own = 0;
  if (a.dD.data != nullptr && channel < a.in.channels) {
#pragma unroll 4
    for (int64_t slot = turn; slot < a.chunks.slots; slot += kTurns) {
      own += a.dD_parts[(slot * a.in.heads + head) * a.in.channels + channel];
    }
  }
  of_channels[turn][channel] = own;
  __syncthreads();
  if (threadIdx.x == 0) {
    HeadSums total;
    for (const HeadSums& part : of_warps) {
      total.A += part.A;
      total.dt_bias += part.dt_bias;
    }
    store_number<T>(a.dA, head, 0, total.A);
    store_number<T>(a.ddt_bias, head, 0, total.dt_bias);
  }
  if (a.dD_has_channels) {
    if (turn != 0 || channel >= a.in.channels) return;
    for (int i = 1; i < kTurns; ++i) own += of_channels[i][channel];
    store_number<T>(a.dD, head, channel, own);
  } else if (warp == 0) {
    double sum = 0;
    for (int i = lane; i < kTurns * static_cast<int>(kMaxSsdChannels); i += 32) {
      sum += (&of_channels[0][0])[i];
    }
    sum = prefix_sum(sum);
    if (lane == 31) store_number<T>(a.dD, head, 0, sum);
  }
}

// Adds up the parts of one number of dB or dC.
template <class T>
__device__ __forceinline__ void sum_parts(const BackwardArguments& a, const float* parts,
                                          const Rows& out, int64_t i) {
  if (out.data == nullptr) return;
  float sum = parts[i];
  for (int64_t part = 1; part < a.parts; ++part) sum += parts[part * a.shared_numbers() + i];
  const int64_t row = i / a.in.states, step = row / a.in.groups;
  const int64_t length = a.chunks.sequences.length;
  const int64_t at = out.offset(step / length, step % length, row % a.in.groups, i % a.in.states);
  static_cast<T*>(out.data)[at] = from_float<T>(sum);
}

template <class T>
__global__ void __launch_bounds__(kAddingThreads, 1)
    backward_sums(const __grid_constant__ BackwardArguments a) {
  const int64_t block = blockIdx.x + int64_t{blockIdx.y} * gridDim.x;
  if (block < a.in.heads) {
    sum_head<T>(a, static_cast<int>(block));
    return;
  }
  const int64_t i = (block - a.in.heads) * kAddingThreads + threadIdx.x;
  if (a.parts == 1 || i >= a.shared_numbers()) return;
  sum_parts<T>(a, a.dB_parts, a.dB, i);
  sum_parts<T>(a, a.dC_parts, a.dC, i);
}

}  // namespace fk::cuda::ssd
