// The forward of lstm and gru in one kernel for all steps. Each block keeps the rows of W_hh of its
// hidden units in registers.
//
// Floor: one barrier of a team's blocks for each step. Between two barriers a block reads the
// outputs of all units, eight sequences at a time, from shared memory, where it brought them or
// other blocks put them; the products with x, which were asked for ahead of the barrier; and writes
// its units' outputs. W_hh is read once.
#pragma once

#include "ops/rnn/cuda/kept.cuh"
#include "ops/rnn/cuda/kept_kernels.h"

namespace fk::cuda::rnn {

template <class T, class Cell, Exchange kExchange>
struct ForwardWalk {
  static constexpr int kGates = Cell::kGates;
  static constexpr int kPairs = kTogether * kMostUnits / kKeptThreads;  // of a thread
  using TeamOfBlock = Team<T, kExchange>;

  const KeptForward& a;
  const TeamOfBlock& team;
  float from_x[kPairs][kGates] = {};

  __device__ __forceinline__ T* output(int64_t steps_done, int64_t sequence) const {
    return static_cast<T*>(a.outputs[steps_done % 2]) + sequence * team.p.hidden;
  }

  // Calls body(pair, s, u) for this thread's pairs of a sequence and a unit that are at step t.
  template <class Body>
  __device__ __forceinline__ void for_pairs(int64_t t, int chunk, const Body& body) const {
    const int here = min(kTogether, team.count - chunk) * team.plan.units;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int n = threadIdx.x + i * kKeptThreads;
      const int s = n / team.plan.units, u = n - s * team.plan.units;
      if (n < here && u < team.units && t < team.places[chunk + s].steps) body(i, chunk + s, u);
    }
  }

  // What is the same for all steps, and the states ahead of the first.
  __device__ __forceinline__ void begin() const {
    const ForwardViews& v = a.views;
    const int units = team.plan.units;
    for (int i = threadIdx.x; i < kGates * units; i += kKeptThreads) {
      const int g = i / units, u = i - g * units;
      if (u < team.units) {
        team.bias[i] = v.b_hh.load<T>(0, g * team.p.hidden + team.first_unit + u);
      }
    }
    for (int i = threadIdx.x; i < team.count * units; i += kKeptThreads) {
      const int s = i / units, u = i - s * units;
      if (u >= team.units) continue;
      const int64_t sequence = team.first_sequence + s, unit = team.first_unit + u;
      const float h = v.h0.load<T>(sequence, unit), c = v.c0.load<T>(sequence, unit);
      team.carried[i] = Cell::kHasCell ? c : h;
      if (team.places[s].steps > 0) continue;
      v.h.store<T>(sequence, unit, h);
      v.c.store<T>(sequence, unit, c);
    }
    if constexpr (kExchange == Exchange::kShared) first_outputs(0);
  }

  __device__ __forceinline__ void first_outputs(int chunk) const {
    const int here = min(kTogether, team.count - chunk);
    for (int s = threadIdx.x / 32; s < here; s += kKeptWarps) {
      for (int k = threadIdx.x % 32; k < team.p.hidden; k += 32) {
        team.vectors[s * team.plan.pitch + k] =
            from_float<T>(a.views.h0.load<T>(team.first_sequence + chunk + s, k));
      }
    }
  }

  __device__ __forceinline__ void ask_for_inputs(int64_t t, int chunk) {
    for_pairs(t, chunk, [&](int i, int s, int u) {
      const Place& at = team.places[s];
      const int64_t row = at.batch * team.p.length + at.position(team.p, t);
#pragma unroll
      for (int g = 0; g < kGates; ++g) {
        from_x[i][g] = a.views.from_x[(row * kGates + g) * team.p.hidden + team.first_unit + u];
      }
    });
  }

  __device__ __forceinline__ void bring_outputs(int64_t t, int chunk) const {
    if (t == 0) {
      first_outputs(chunk);
    } else {
      const int hidden = static_cast<int>(team.p.hidden);
      stage(team.vectors, team.plan.pitch, hidden, hidden % kVecWidth<T> == 0,
            min(kTogether, team.count - chunk), [&](int s) -> const T* {
              return t < team.places[chunk + s].steps ? output(t, team.first_sequence + chunk + s)
                                                      : nullptr;
            });
    }
    __syncthreads();
  }

  __device__ __forceinline__ void finish(int64_t t, int chunk) const {
    for_pairs(t, chunk, [&](int i, int s, int u) {
      const ForwardViews& v = a.views;
      const Place& at = team.places[s];
      const int64_t position = at.position(team.p, t), unit = team.first_unit + u;
      float h[kGates], kept[kKeptGates];
#pragma unroll
      for (int g = 0; g < kGates; ++g) {
        h[g] = team.sum_of(g * team.plan.units + u, s - chunk) + team.bias[g * team.plan.units + u];
      }
      float* const carried = team.carried + s * team.plan.units + u;
      float state = *carried;
      const float output_now = Cell::template forward<T>(from_x[i], h, &state, kept);
      *carried = state;
      const bool is_last = t + 1 == at.steps;
      const int64_t sequence = team.first_sequence + s;
      if (!is_last) {
        if constexpr (kExchange == Exchange::kShared) {
          team.share(t + 1, s, static_cast<int>(unit), output_now);
        } else {
          output(t + 1, sequence)[unit] = from_float<T>(output_now);
        }
      }
      v.y.store<T>(at.batch, position, unit, output_now);
#pragma unroll
      for (int g = 0; g < kKeptGates; ++g) {
        v.gates.store<T>(at.batch, position, g * team.p.hidden + unit, kept[g]);
      }
      v.cells.store<T>(at.batch, position, unit, state);
      if (!is_last) return;
      v.h.store<T>(sequence, unit, output_now);
      v.c.store<T>(sequence, unit, state);
    });
  }
};

template <class T, class Cell, Exchange kExchange>
__global__ void __launch_bounds__(kKeptThreads, 1)
    rnn_kept_forward(const __grid_constant__ KeptForward a) {
  extern __shared__ __align__(16) char memory[];
  wait_for_earlier_kernels();
  const Team<T, kExchange> team(a.plan, a.views.p, a.counters, memory);
  KeptWeights weights;
  weights.load(a.packed, a.plan, team.rank);
  ForwardWalk<T, Cell, kExchange> walk{a, team};
  walk.begin();
  constexpr bool kShared = kExchange == Exchange::kShared;
  if constexpr (kShared) team.arrive();
  for (int64_t t = 0; t < team.longest; ++t) {
    for (int chunk = 0; chunk < team.count; chunk += kTogether) {
      walk.ask_for_inputs(t, chunk);
      if (chunk == 0 && (kShared || t > 0)) team.wait(t);
      if constexpr (!kShared) walk.bring_outputs(t, chunk);
      Product<T, Direction::kForward>::run(weights, a.plan, team.set_of(t),
                                           min(kTogether, team.count - chunk), team.sums);
      __syncthreads();
      walk.finish(t, chunk);
    }
    if (t + 1 < team.longest) team.arrive();
  }
  if constexpr (kShared) {
    if (team.longest == 0) team.wait(0);
  }
}

}  // namespace fk::cuda::rnn
