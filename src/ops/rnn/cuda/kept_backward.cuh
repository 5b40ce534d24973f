// The backward walk of lstm and gru in one kernel for all steps: the gradients of the gates, from
// each sequence's last step to its first. Each block keeps the columns of W_hh of its hidden units
// in registers.
//
// Floor: one barrier of a team's blocks for each step, and one more for the gradients of the first
// states. Between two barriers a block reads the gradients of all gates at the step after, which
// also lie in memory for the products over all steps that follow; what the forward kept of its own
// units was asked for ahead of the barrier. W_hh is read once.
#pragma once

#include "ops/rnn/cuda/kept.cuh"
#include "ops/rnn/cuda/kept_kernels.h"

namespace fk::cuda::rnn {

template <class T, class Cell, Exchange kExchange>
struct BackwardWalk {
  static constexpr int kGates = Cell::kGates;
  static constexpr int kPairs = kTogether * kMostUnits / kKeptThreads;  // of a thread
  using TeamOfBlock = Team<T, kExchange>;

  const KeptBackward& a;
  const TeamOfBlock& team;
  UnitGradient units[kPairs] = {};

  __device__ __forceinline__ int64_t row(const Place& at, int64_t t) const {
    return at.batch * team.p.length + at.position(team.p, t);
  }

  // Calls body(pair, s, u, t) for this thread's pairs of a sequence and a unit that are at step t,
  // which is w steps before the last, or -1.
  template <class Body>
  __device__ __forceinline__ void for_pairs(int64_t w, int chunk, const Body& body) const {
    const int here = min(kTogether, team.count - chunk) * team.plan.units;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int n = threadIdx.x + i * kKeptThreads;
      const int s = n / team.plan.units, u = n - s * team.plan.units;
      if (n >= here || u >= team.units || w > team.places[chunk + s].steps) continue;
      body(i, chunk + s, u, team.places[chunk + s].steps - 1 - w);
    }
  }

  __device__ __forceinline__ void ask_for_inputs(int64_t w, int chunk) {
    for_pairs(w, chunk, [&](int i, int s, int u, int64_t t) {
      const BackwardViews& v = a.views;
      const Place& at = team.places[s];
      const int64_t sequence = team.first_sequence + s, unit = team.first_unit + u;
      UnitGradient& own = units[i];
      own.dh = w == 0 ? v.dh.load<T>(sequence, unit) : 0.f;
      if (t < 0) return;
      const int64_t position = at.position(team.p, t);
      own.dh += v.dy.load<T>(at.batch, position, unit);
#pragma unroll
      for (int g = 0; g < kKeptGates; ++g) {
        own.kept[g] = v.gates.load<T>(at.batch, position, g * team.p.hidden + unit);
      }
      const StepsView& states = Cell::kHasCell ? v.cells : v.y;
      if constexpr (Cell::kHasCell) own.cell = states.load<T>(at.batch, position, unit);
      own.before = t == 0 ? (Cell::kHasCell ? v.c0 : v.h0).template load<T>(sequence, unit)
                          : states.load<T>(at.batch, at.position(team.p, t - 1), unit);
    });
  }

  __device__ __forceinline__ void bring_gradients(int64_t w, int chunk) const {
    const int depth = kGates * static_cast<int>(team.p.hidden);
    stage(team.vectors, team.plan.pitch, depth, depth % kVecWidth<T> == 0,
          min(kTogether, team.count - chunk), [&](int s) -> const T* {
            const Place& at = team.places[chunk + s];
            if (w > at.steps) return nullptr;
            return static_cast<const T*>(a.views.of_h) + row(at, at.steps - w) * depth;
          });
    __syncthreads();
  }

  __device__ __forceinline__ void finish(int64_t w, int chunk) const {
    for_pairs(w, chunk, [&](int i, int s, int u, int64_t t) {
      const BackwardViews& v = a.views;
      const Place& at = team.places[s];
      const int64_t sequence = team.first_sequence + s, unit = team.first_unit + u;
      float* const carried = team.carried + s * team.plan.units + u;
      UnitGradient own = units[i];
      float next = 0;
      if (w > 0) {
        own.dh += team.sum_of(u, s - chunk);
        next = *carried;
        if (!Cell::kHasCell) own.dh += next;
      } else if (Cell::kHasCell) {
        next = v.dc.load<T>(sequence, unit);
      }
      if (t < 0) {
        v.dh0.store<T>(sequence, unit, own.dh);
        v.dc0.store<T>(sequence, unit, next);
        return;
      }
      float of_x[kGates], of_h[kGates];
      Cell::template backward<T>(own, &next, of_x, of_h);
      *carried = next;
      const int64_t to = row(at, t) * kGates * team.p.hidden + unit;
#pragma unroll
      for (int g = 0; g < kGates; ++g) {
        if constexpr (kExchange == Exchange::kShared) {
          team.share(w + 1, s, static_cast<int>(g * team.p.hidden + unit), of_h[g]);
        }
        if (!Cell::kHasCell) {
          static_cast<T*>(v.of_x)[to + g * team.p.hidden] = from_float<T>(of_x[g]);
        }
        static_cast<T*>(v.of_h)[to + g * team.p.hidden] = from_float<T>(of_h[g]);
      }
    });
  }
};

template <class T, class Cell, Exchange kExchange>
__global__ void __launch_bounds__(kKeptThreads, 1)
    rnn_kept_backward(const __grid_constant__ KeptBackward a) {
  extern __shared__ __align__(16) char memory[];
  wait_for_earlier_kernels();
  const Team<T, kExchange> team(a.plan, a.views.p, a.counters, memory);
  KeptWeights weights;
  weights.load(a.packed, a.plan, team.rank);
  BackwardWalk<T, Cell, kExchange> walk{a, team};
  constexpr bool kShared = kExchange == Exchange::kShared;
  if constexpr (kShared) team.arrive();
  for (int64_t w = 0; w <= team.longest; ++w) {
    for (int chunk = 0; chunk < team.count; chunk += kTogether) {
      walk.ask_for_inputs(w, chunk);
      if (chunk == 0 && (kShared || w > 0)) team.wait(w);
      if (w > 0) {
        if constexpr (!kShared) walk.bring_gradients(w, chunk);
        Product<T, Direction::kBackward>::run(weights, a.plan, team.set_of(w),
                                              min(kTogether, team.count - chunk), team.sums);
        __syncthreads();
      }
      walk.finish(w, chunk);
    }
    if (w < team.longest) team.arrive();
  }
}

}  // namespace fk::cuda::rnn
