// The gradients of the scan, chunk by chunk in reverse.
//
// With g_t = dL/dh_t and a_t = exp(dt_t A): g_t = dy_t silu(z_t) C_t + a_{t+1} g_{t+1}, and every
// gradient is a sum of products of g_t, h_t, h_{t-1} and inputs over states (du, ddelta, dz), over
// channels (dB, dC) or over time (dA, dD, ddelta_bias).
//
// Floor: two exponentials and about 17 multiplications per (step, channel, state), at 128 a clock
// and multiprocessor.
//
// A block takes kT steps (a chunk) of its channels at a time. Half of its threads stage, as in the
// forward; the others scan. From the state before the chunk they first go forward and leave the
// state before every piece of kU steps in shared memory; then, piece by piece in reverse, they go
// forward again with decays and states in registers, and back. Sums over the states of a channel
// are shuffles; sums over the channels of a block go through shared memory, warp by warp, and leave
// the block as one part, summed by another kernel: no atomics, the same bits every time. The sums
// over states replace the inputs they were made from.
#pragma once

#include "ops/selective_scan/cuda_backward_stage.cuh"

namespace fk::cuda {

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    reverse_chunks(const __grid_constant__ ReverseArgs r) {
  constexpr int kC = Tile::kC, kS = Tile::kS, kT = Tile::kT, kU = Tile::kU, kE = Tile::kE;
  extern __shared__ __align__(16) char shared_bytes[];
  const ReverseShared<Tile> shared(shared_bytes);
  const ScanArgs& a = r.scan;

  wait_for_earlier_kernels();
  let_next_kernel_start();
  const Place place = Place::of_block<Tile::kChannels>(a);
  const Segment& segment = place.segment;
  if (place.slot >= a.segments.slots) return;
  const int chunks =
      segment.exists ? static_cast<int>((segment.last - segment.first + kT - 1) / kT) : 0;
  if (threadIdx.x >= Tile::kScan) {
    const int thread = threadIdx.x - Tile::kScan;
    if (a.time_contiguous) {
      const bool vectors = a.vectors && segment.first % (8 / sizeof(T)) == 0;
      using Staging = ReverseStager<T, Tile, true>;
      Staging{r,      place,  shared,  typename Staging::TileUnits(thread),
              thread, chunks, vectors, {},
              {},     {},     {},      {},
              {}}
          .run();
    } else {
      using Staging = ReverseStager<T, Tile, false>;
      Staging{r,      place,  shared,    typename Staging::TileUnits(thread),
              thread, chunks, a.vectors, {},
              {},     {},     {},        {},
              {}}
          .run();
    }
    return;
  }

  const ScanPlace<Tile> mine(threadIdx.x);
  const int first_state = a.first_state + mine.first;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto exists = [&](int j, int s) {
    return mine.channels[j] < place.channels && first_state + s < a.states;
  };
  const auto state_at = [&](const StateView& view, int j, int s) {
    return segment.sequence * view.sequence + (place.channel + mine.channels[j]) * view.channel +
           (first_state + s) * view.state;
  };
  const auto slot_state = [&](int j, int s) {
    return (place.slot * a.channels + place.channel + mine.channels[j]) * a.states + first_state +
           s;
  };
  float A[kE], ag[kE], dA[kE];  // ag: what comes from the step after, a_{t+1} g_{t+1}
#pragma unroll
  for (int e = 0; e < kE; ++e) {
    const int j = e / kS, s = e % kS;
    A[e] = ag[e] = dA[e] = 0;
    if (!exists(j, s)) continue;
    A[e] = kLog2E *
           a.A[(place.channel + mine.channels[j]) * a.A_channel + (first_state + s) * a.A_state];
    if (a.segment_states != nullptr) {
      ag[e] = a.segment_states[slot_state(j, s)];
    } else if (r.dlast_state.data != nullptr) {
      ag[e] = static_cast<const float*>(r.dlast_state.data)[state_at(r.dlast_state, j, s)];
    }
  }
  float* rows = shared.rows + (warp * kU * Tile::kRows + lane / Tile::kLanes) * Tile::kRowPitch;
  const float* row_values = shared.rows + warp * kU * Tile::kRows * Tile::kRowPitch + lane;
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < chunks; ++i) {
    const int buffer = i & 1;
    float2* x = shared.inputs + buffer * kT * Tile::kPitch;
    float* dy = shared.gradients + buffer * kT * Tile::kPitch;
    const float* bc = shared.states + buffer * kT * Tile::kStatePitch + mine.first * 2;
    float* sums = shared.sums + (buffer * Tile::kWarps + warp) * kT * 2 * Tile::kWarpStates + lane;
    {
      float h[kE];
#pragma unroll
      for (int e = 0; e < kE; ++e) {
        h[e] = shared.start(0, buffer, threadIdx.x)[e / 4 * 4 * Tile::kScan + e % 4];
      }
#pragma unroll 1
      for (int piece = 0; piece + 1 < Tile::kPieces; ++piece) {
        float2 v[kU][kC];
        float B[kU][kS], decay[kU][kE];
#pragma unroll
        for (int k = 0; k < kU; ++k) {
          const int l = piece * kU + k;
#pragma unroll
          for (int j = 0; j < kC; ++j) v[k][j] = x[l * Tile::kPitch + mine.channels[j]];
#pragma unroll
          for (int s = 0; s < kS; ++s) B[k][s] = bc[l * Tile::kStatePitch + s];
        }
        // All exponentials before the first is used: there are few warps to hide behind.
#pragma unroll
        for (int k = 0; k < kU; ++k) {
#pragma unroll
          for (int e = 0; e < kE; ++e) decay[k][e] = exp2_fast(v[k][e / kS].x * A[e]);
        }
#pragma unroll
        for (int k = 0; k < kU; ++k) {
#pragma unroll
          for (int e = 0; e < kE; ++e)
            h[e] = fmaf(decay[k][e], h[e], v[k][e / kS].y * B[k][e % kS]);
        }
        float* start = shared.start(piece + 1, buffer, threadIdx.x);
#pragma unroll
        for (int e = 0; e < kE; ++e) start[e / 4 * 4 * Tile::kScan + e % 4] = h[e];
      }
    }
#pragma unroll 1
    for (int piece = Tile::kPieces - 1; piece >= 0; --piece) {
      // Everything the piece reads from shared memory, before the first store.
      float h[kU + 1][kE], decay[kU][kE], B[kU][kS], C[kU][kS], scaled[kU][kC];
      float2 v[kU][kC];
#pragma unroll
      for (int k = 0; k < kU; ++k) {
        const int l = piece * kU + k;
#pragma unroll
        for (int s = 0; s < kS; ++s) {
          B[k][s] = bc[l * Tile::kStatePitch + s];
          C[k][s] = bc[l * Tile::kStatePitch + kS + s];
        }
#pragma unroll
        for (int j = 0; j < kC; ++j) {
          v[k][j] = x[l * Tile::kPitch + mine.channels[j]];
          scaled[k][j] = dy[l * Tile::kPitch + mine.channels[j]];
        }
      }
#pragma unroll
      for (int e = 0; e < kE; ++e) {
        h[0][e] = shared.start(piece, buffer, threadIdx.x)[e / 4 * 4 * Tile::kScan + e % 4];
      }
#pragma unroll
      for (int k = 0; k < kU; ++k) {
#pragma unroll
        for (int e = 0; e < kE; ++e) decay[k][e] = exp2_fast(v[k][e / kS].x * A[e]);
      }
#pragma unroll
      for (int k = 0; k < kU; ++k) {
#pragma unroll
        for (int e = 0; e < kE; ++e) {
          h[k + 1][e] = fmaf(decay[k][e], h[k][e], v[k][e / kS].y * B[k][e % kS]);
        }
      }
      float gB[kU][kC], aghA[kU][kC], Ch[kU][kC];
#pragma unroll
      for (int k = kU - 1; k >= 0; --k) {
        float dB[kS], dC[kS];
#pragma unroll
        for (int j = 0; j < kC; ++j) {
          gB[k][j] = aghA[k][j] = Ch[k][j] = 0;
#pragma unroll
          for (int s = 0; s < kS; ++s) {
            const int e = j * kS + s;
            const float g = fmaf(scaled[k][j], C[k][s], ag[e]);
            Ch[k][j] = fmaf(h[k + 1][e], C[k][s], Ch[k][j]);
            gB[k][j] = fmaf(g, B[k][s], gB[k][j]);
            dB[s] = j == 0 ? g * v[k][j].y : fmaf(g, v[k][j].y, dB[s]);
            dC[s] = j == 0 ? scaled[k][j] * h[k + 1][e] : fmaf(scaled[k][j], h[k + 1][e], dC[s]);
            ag[e] = decay[k][e] * g;
            const float agh = ag[e] * h[k][e];
            aghA[k][j] = fmaf(agh, A[e], aghA[k][j]);
            dA[e] = fmaf(agh, v[k][j].x, dA[e]);
          }
        }
        float* row = rows + k * Tile::kRows * Tile::kRowPitch + mine.lane * kS;
#pragma unroll
        for (int s = 0; s < kS; ++s) {
          row[s] = dB[s];
          row[Tile::kWarpStates + s] = dC[s];
        }
      }
#pragma unroll
      for (int k = 0; k < kU; ++k) {
        mine.sum(gB[k]);
        mine.sum(aghA[k]);
        mine.sum(Ch[k]);
      }
      __syncwarp();
      if (mine.owns_sum()) {
#pragma unroll
        for (int k = 0; k < kU; ++k) {
          const int at = (piece * kU + k) * Tile::kPitch + mine.channels[0];
          if constexpr (Tile::kGroups == 1) {
            x[at] = make_float2(gB[k][0], aghA[k][0]);
            dy[at] = Ch[k][0];
          } else {
            float* set =
                shared.sets + (buffer * Tile::kGroups + mine.group) * 3 * kT * Tile::kPitch + at;
            set[0] = gB[k][0];
            set[kT * Tile::kPitch] = aghA[k][0];
            set[2 * kT * Tile::kPitch] = Ch[k][0];
          }
        }
      }
      float total[kU][2 * Tile::kWarpStates / 32];
#pragma unroll
      for (int k = 0; k < kU; ++k) {
#pragma unroll
        for (int part = 0; part < 2 * Tile::kWarpStates / 32; ++part) {
          total[k][part] = 0;
#pragma unroll
          for (int row = 0; row < Tile::kRows; ++row) {
            total[k][part] += row_values[(k * Tile::kRows + row) * Tile::kRowPitch + part * 32];
          }
        }
      }
#pragma unroll
      for (int k = 0; k < kU; ++k) {
#pragma unroll
        for (int part = 0; part < 2 * Tile::kWarpStates / 32; ++part) {
          sums[(piece * kU + k) * 2 * Tile::kWarpStates + part * 32] = total[k][part];
        }
      }
      __syncwarp();
    }
    __syncthreads();
  }
#pragma unroll
  for (int e = 0; e < kE; ++e) {
    const int j = e / kS, s = e % kS;
    if (!exists(j, s)) continue;
    r.partial_A[slot_state(j, s)] = dA[e];
    if (r.dinitial_state.data != nullptr && segment.exists && segment.opens) {
      store_either<T>(r.dinitial_state.data, r.dinitial_state.is_float,
                      state_at(r.dinitial_state, j, s), ag[e]);
    }
  }
}

using ManyReverseTile = ReverseTile<2, 4, 4, 1, 128, 128, 32, 4>;
using WideReverseTile = ReverseTile<2, 4, 4, 4, 128, 128, 32, 4>;
using SmallReverseTile = ReverseTile<2, 4, 4, 1, 64, 128, 16, 4>;

}  // namespace fk::cuda
