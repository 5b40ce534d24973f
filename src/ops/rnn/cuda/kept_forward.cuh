// The forward of lstm and gru in one kernel for all steps. Each block keeps the rows of W_hh of its
// hidden units in registers.
//
// Floor: the time from a unit's output to the last block that multiplies it, through global memory
// or into the shared memory of a cluster's blocks; then the product, one barrier of the block, and
// the formulas of a unit. What comes from the product with x was asked for before; what only goes
// to memory is stored behind what others wait for. W_hh is read once.
#pragma once

#include "ops/rnn/cuda/kept.cuh"
#include "ops/rnn/cuda/kept_kernels.h"

namespace fk::cuda::rnn {

template <class T, class Cell, Exchange kExchange>
struct ForwardWalk {
  static constexpr int kGates = Cell::kGates;
  using TeamOfBlock = Team<T, kExchange>;

  const KeptForward& a;
  const TeamOfBlock& team;
  const Pairs pairs;
  float from_x[kPairs][kGates] = {}, from_h[kPairs][kGates] = {}, state[kPairs] = {};
  bool active[kPairs] = {};    // is_at
  T* publish_at[kPairs] = {};  // null: nobody waits for the output

  // The row of a matrix with one for each position.
  __device__ __forceinline__ int64_t row(const Place& at, int64_t t) const {
    return at.batch * team.p.length + at.position(team.p, t);
  }
  // Tells whether a pair has a sequence and a unit that are at step t in the round from `first` on.
  __device__ __forceinline__ bool is_at(int i, int64_t t, int first) const {
    return pairs.s[i] < team.round_of(first) && pairs.u[i] < team.units &&
           t < team.places[first + pairs.s[i]].steps;
  }

  // This is what is the same for all steps, and the states ahead of the first.
  __device__ __forceinline__ void begin() const {
    const ForwardViews& v = a.views;
    const int units = team.plan.units;
    for (int i = threadIdx.x; i < kGates * units; i += kKeptThreads) {
      const int u = i / kGates, g = i - u * kGates;
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
    if constexpr (TeamOfBlock::kShared) {
      for (int s = threadIdx.x / 32; s < team.count; s += kKeptWarps) {
        for (int k = threadIdx.x % 32; k < team.p.hidden; k += 32) {
          team.vectors[s * team.plan.pitch + k] =
              from_float<T>(v.h0.load<T>(team.first_sequence + s, k));
        }
      }
    }
    __syncthreads();
  }

  // Loads what a step needs besides the product with h.
  __device__ __forceinline__ void ask_for_inputs(int64_t t, int first) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      active[i] = is_at(i, t, first);
      publish_at[i] = nullptr;
#pragma unroll
      for (int g = 0; g < kGates; ++g) from_x[i][g] = from_h[i][g] = 0;
      if (!active[i]) continue;
      const int s = first + pairs.s[i], u = pairs.u[i];
      const Place& at = team.places[s];
      const int64_t r = row(at, t);
      if (t + 1 < at.steps) {
        publish_at[i] = static_cast<T*>(a.published) + r * team.plan.depth() + team.first_unit + u;
      }
      const float* const from = a.views.from_x + r * kGates * team.p.hidden + team.first_unit + u;
#pragma unroll
      for (int g = 0; g < kGates; ++g) {
        from_x[i][g] = from[g * team.p.hidden];
        from_h[i][g] = team.bias[u * kGates + g];
      }
      state[i] = team.carried[s * team.plan.units + u];
    }
  }

  // The published h of sequence s of the round ahead of step t, or null where it has ended.
  __device__ __forceinline__ const T* published(int64_t t, int s) const {
    const Place& at = team.places[s];
    if (t >= at.steps) return nullptr;
    const int64_t r =
        t == 0 ? team.p.batch * team.p.length + team.first_sequence + s : row(at, t - 1);
    return static_cast<const T*>(a.published) + r * team.plan.depth();
  }

  // What others wait for comes first, of all pairs; then what only goes to memory.
  __device__ __forceinline__ void finish(int64_t t, int first, const float* sums) {
    float kept[kPairs][kKeptGates], output_now[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int s = pairs.s[i], u = pairs.u[i];
      const int64_t unit = team.first_unit + u;
      output_now[i] = 0;
      if (active[i]) {
        team.add_sums(sums, u, s, from_h[i]);
        output_now[i] = Cell::template forward<T>(from_x[i], from_h[i], &state[i], kept[i]);
      }
      if constexpr (TeamOfBlock::kShared) {
        const bool is_there = s < team.round_of(first) && unit < team.plan.gate_stride;
        if (t + 1 < team.longest) {
          team.share(t + 1, is_there, s, static_cast<int>(unit), output_now[i]);
        }
      } else if (publish_at[i] != nullptr) {
        publish(publish_at[i], output_now[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (!active[i]) continue;
      const ForwardViews& v = a.views;
      const int s = first + pairs.s[i], u = pairs.u[i];
      const int64_t unit = team.first_unit + u;
      const Place& at = team.places[s];
      team.carried[s * team.plan.units + u] = state[i];
      const int64_t position = at.position(team.p, t);
      v.y.store<T>(at.batch, position, unit, output_now[i]);
#pragma unroll
      for (int g = 0; g < kKeptGates; ++g) {
        v.gates.store<T>(at.batch, position, g * team.p.hidden + unit, kept[i][g]);
      }
      v.cells.store<T>(at.batch, position, unit, state[i]);
      if (t + 1 < at.steps) continue;
      v.h.store<T>(team.first_sequence + s, unit, output_now[i]);
      v.c.store<T>(team.first_sequence + s, unit, state[i]);
    }
  }
};

template <class T, class Cell, Exchange kExchange>
__global__ void __launch_bounds__(kKeptThreads, 1)
    rnn_kept_forward(const __grid_constant__ KeptForward a) {
  extern __shared__ __align__(16) char memory[];
  using TeamOfBlock = Team<T, kExchange>;
  using ProductOfBlock = Product<T, Direction::kForward>;
  wait_for_earlier_kernels();
  const TeamOfBlock team(a.plan, a.views.p, memory);
  KeptWeights weights;
  if (a.packed != nullptr) {
    weights.load(a.packed, a.plan, team.rank);
  } else {
    weights.load_rows<T, Cell::kGates>({a.w_hh, a.w_hh_row}, a.plan, team.rank,
                                       static_cast<int>(team.p.hidden));
  }
  ForwardWalk<T, Cell, kExchange> walk{a, team, Pairs(a.plan.units)};
  walk.begin();
  const int64_t last = team.longest - 1;
  if constexpr (TeamOfBlock::kShared) team.meet(last);
  int turn = 0;
  for (int64_t t = 0; t < team.longest; ++t) {
    for (int first = 0; first < team.count; first += a.plan.together) {
      const int count = team.round_of(first);
      float* const sums = team.sums + turn * a.plan.sums();
      turn ^= 1;
      walk.ask_for_inputs(t, first);
      const auto row_of = [&](int s) { return walk.published(t, first + s); };
      if constexpr (TeamOfBlock::kShared) {
        if (t > 0) team.wait(t, last);
        ProductOfBlock::run(weights, a.plan, team.set_of(t), count, sums);
      } else if constexpr (TeamOfBlock::kStaged) {
        stage(team.vectors, a.plan.pitch, a.plan.depth(), count, row_of);
        __syncthreads();
        ProductOfBlock::run(weights, a.plan, team.vectors, count, sums);
      } else {
        ProductOfBlock::run_from_global(weights, a.plan, count, row_of, sums);
      }
      __syncthreads();
      walk.finish(t, first, sums);
    }
  }
}

}  // namespace fk::cuda::rnn
