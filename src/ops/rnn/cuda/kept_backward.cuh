// The backward walk of lstm and gru in one kernel for all steps: the gradients of the gates, from
// each sequence's last step to its first. Each block keeps the columns of W_hh of its hidden units
// in registers.
//
// Floor: the time from a gate's gradient to the last block that multiplies it, as in
// kept_forward.cuh, and the product, which is deeper: gates times the units. Where blocks meet in
// global memory they leave the gradients in the very matrix that the products over all steps read.
// What the forward kept of a block's units was asked for before. W_hh is read once.
#pragma once

#include "ops/rnn/cuda/kept.cuh"
#include "ops/rnn/cuda/kept_kernels.h"

namespace fk::cuda::rnn {

template <class T, class Cell, Exchange kExchange>
struct BackwardWalk {
  static constexpr int kGates = Cell::kGates;
  using TeamOfBlock = Team<T, kExchange>;

  const KeptBackward& a;
  const TeamOfBlock& team;
  const Pairs pairs;
  // A pair has at its step what is loaded, as it lies in memory, what is made of that, and what
  // the unit carries. t is -1 ahead of the first step, and -2 where the pair is nowhere.
  struct Loaded {
    uint32_t kept[kKeptGates], before, cell, dy, dh, dc;
  };
  Loaded loaded[kPairs] = {};
  float by[kPairs][Cell::kFactors] = {}, dh[kPairs] = {}, next[kPairs] = {};
  int t_of[kPairs];

  __device__ __forceinline__ int64_t row(const Place& at, int64_t t) const {
    return at.batch * team.p.length + at.position(team.p, t);
  }
  // Tells whether a pair has a sequence and a unit that are at a step w steps before the last, or
  // ahead of the first.
  __device__ __forceinline__ bool is_at(int i, int64_t w, int first) const {
    return pairs.s[i] < team.round_of(first) && pairs.u[i] < team.units &&
           w <= team.places[first + pairs.s[i]].steps;
  }

  __device__ __forceinline__ float4* bias_sums() const {
    return reinterpret_cast<float4*>(team.bias);
  }

  __device__ __forceinline__ void begin() const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      bias_sums()[threadIdx.x + i * kKeptThreads] = make_float4(0, 0, 0, 0);
    }
  }

  // Adds up what the pairs of a unit have, in the order of sequences.
  __device__ __forceinline__ void end() const {
    __syncthreads();
    for (int n = threadIdx.x; n < kBiasSums * team.units; n += kKeptThreads) {
      const int u = n / kBiasSums, which = n - u * kBiasSums;
      float sum = 0;
      for (int s = 0; s < team.round_of(0); ++s) {
        sum += team.bias[(s * team.plan.units + u) * kBiasSums + which];
      }
      const int64_t unit = team.first_unit + u;
      a.bias_sums[(blockIdx.x * team.p.hidden + unit) * kBiasSums + which] = sum;
    }
  }

  // Asks for what a step needs besides the product.
  __device__ __forceinline__ void ask_for_inputs(int64_t w, int first) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      t_of[i] = -2;
      loaded[i] = {};  // what was there before need not stay in registers
      if (!is_at(i, w, first)) continue;
      const BackwardViews& v = a.views;
      const int s = first + pairs.s[i];
      const Place& at = team.places[s];
      const int64_t t = at.steps - 1 - w;
      const int64_t sequence = team.first_sequence + s, unit = team.first_unit + pairs.u[i];
      t_of[i] = static_cast<int>(t);
      Loaded& own = loaded[i];
      if (w == 0) {
        own.dh = v.dh.bits<T>(sequence, unit);
        if constexpr (Cell::kHasCell) own.dc = v.dc.bits<T>(sequence, unit);
      }
      if (t < 0) continue;
      const int64_t position = at.position(team.p, t);
      own.dy = v.dy.bits<T>(at.batch, position, unit);
#pragma unroll
      for (int g = 0; g < kKeptGates; ++g) {
        own.kept[g] = v.gates.bits<T>(at.batch, position, g * team.p.hidden + unit);
      }
      const StepsView& states = Cell::kHasCell ? v.cells : v.y;
      if constexpr (Cell::kHasCell) own.cell = states.bits<T>(at.batch, position, unit);
      own.before = t == 0 ? (Cell::kHasCell ? v.c0 : v.h0).template bits<T>(sequence, unit)
                          : states.bits<T>(at.batch, at.position(team.p, t - 1), unit);
    }
  }

  // This is what can be made of it ahead of the product's sums.
  __device__ __forceinline__ void prepare(int64_t w, int first) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      dh[i] = next[i] = 0;
#pragma unroll
      for (int f = 0; f < Cell::kFactors; ++f) by[i][f] = 0;
      if (t_of[i] == -2) continue;
      const BackwardViews& v = a.views;
      const Loaded& own = loaded[i];
      if (w == 0) dh[i] = number_of<T>(own.dh, v.dh.is_float);
      if (w > 0) {
        next[i] = team.carried[(first + pairs.s[i]) * team.plan.units + pairs.u[i]];
      } else if constexpr (Cell::kHasCell) {
        next[i] = number_of<T>(own.dc, v.dc.is_float);
      }
      if (t_of[i] < 0) continue;
      dh[i] += number_of<T>(own.dy, v.dy.is_float);
      UnitGradient unit;
#pragma unroll
      for (int g = 0; g < kKeptGates; ++g) {
        unit.kept[g] = number_of<T>(own.kept[g], v.gates.is_float);
      }
      const StepsView& states = Cell::kHasCell ? v.cells : v.y;
      if constexpr (Cell::kHasCell) unit.cell = number_of<T>(own.cell, states.is_float);
      const bool first_is_float = Cell::kHasCell ? v.c0.is_float : v.h0.is_float;
      unit.before = number_of<T>(own.before, t_of[i] == 0 ? first_is_float : states.is_float);
      Cell::template factors<T>(unit, by[i]);
    }
  }

  // The published gradients of sequence s at the step after, or null where there is none.
  __device__ __forceinline__ const T* published(int64_t w, int s) const {
    const Place& at = team.places[s];
    if (w > at.steps) return nullptr;
    return static_cast<const T*>(a.views.of_h) + row(at, at.steps - w) * a.views.pitch;
  }

  // What others wait for comes first, of all pairs.
  __device__ __forceinline__ void finish(int64_t w, int first, const float* sums) {
    const BackwardViews& v = a.views;
    float of_x[kPairs][kGates] = {}, of_h[kPairs][kGates] = {};
    int64_t to_row[kPairs] = {};
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int s = pairs.s[i], u = pairs.u[i];
      const int64_t unit = team.first_unit + u;
      if (t_of[i] != -2 && w > 0) {
        float sum[1] = {dh[i]};
        team.add_sums(sums, u, s, sum);
        dh[i] = sum[0];
        if (!Cell::kHasCell) dh[i] += next[i];
      }
      if (t_of[i] >= 0) {
        Cell::backward(by[i], dh[i], &next[i], of_x[i], of_h[i]);
        to_row[i] = row(team.places[first + s], t_of[i]) * v.pitch + unit;
      }
      if constexpr (TeamOfBlock::kShared) {
        const bool is_there = s < team.round_of(first) && unit < team.plan.gate_stride;
        if (w < team.longest) {
#pragma unroll
          for (int g = 0; g < kGates; ++g) {
            team.share(w + 1, is_there, s, g * team.plan.gate_stride + static_cast<int>(unit),
                       of_h[i][g]);
          }
        }
      } else if (t_of[i] >= 0) {
        T* const to = static_cast<T*>(v.of_h) + to_row[i];
#pragma unroll
        for (int g = 0; g < kGates; ++g) publish(to + g * team.p.hidden, of_h[i][g]);
      }
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int s = first + pairs.s[i], u = pairs.u[i];
      if (t_of[i] == -1) {
        v.dh0.store<T>(team.first_sequence + s, team.first_unit + u, dh[i]);
        v.dc0.store<T>(team.first_sequence + s, team.first_unit + u, next[i]);
      }
      if (t_of[i] < 0) continue;
      team.carried[s * team.plan.units + u] = next[i];
      float4* const sum = bias_sums() + threadIdx.x + i * kKeptThreads;
      const float4 more = Cell::for_biases(of_x[i], of_h[i]);
      *sum = make_float4(sum->x + more.x, sum->y + more.y, sum->z + more.z, sum->w + more.w);
#pragma unroll
      for (int g = 0; g < kGates; ++g) {
        if constexpr (TeamOfBlock::kShared) {
          static_cast<T*>(v.of_h)[to_row[i] + g * team.p.hidden] = from_float<T>(of_h[i][g]);
        }
        if (!Cell::kHasCell) {
          static_cast<T*>(v.of_x)[to_row[i] + g * team.p.hidden] = from_float<T>(of_x[i][g]);
        }
      }
    }
  }
};

template <class T, class Cell, Exchange kExchange>
__global__ void __launch_bounds__(kKeptThreads, 1)
    rnn_kept_backward(const __grid_constant__ KeptBackward a) {
  extern __shared__ __align__(16) char memory[];
  using TeamOfBlock = Team<T, kExchange>;
  using ProductOfBlock = Product<T, Direction::kBackward>;
  wait_for_earlier_kernels();
  const TeamOfBlock team(a.plan, a.views.p, memory);
  KeptWeights weights;
  weights.load(a.packed, a.plan, team.rank);
  BackwardWalk<T, Cell, kExchange> walk{a, team, Pairs(a.plan.units)};
  walk.begin();
  if constexpr (TeamOfBlock::kShared) team.meet(team.longest);
  int turn = 0;
  for (int64_t w = 0; w <= team.longest; ++w) {
    for (int first = 0; first < team.count; first += a.plan.together) {
      const int count = team.round_of(first);
      float* const sums = team.sums + turn * a.plan.sums();
      turn ^= 1;
      walk.ask_for_inputs(w, first);
      const auto row_of = [&](int s) { return walk.published(w, first + s); };
      if (w > 0) {
        if constexpr (TeamOfBlock::kShared) {
          team.wait(w, team.longest);
          ProductOfBlock::run(weights, a.plan, team.set_of(w), count, sums);
        } else if constexpr (TeamOfBlock::kStaged) {
          stage(team.vectors, a.plan.pitch, a.plan.depth(), count, row_of);
          __syncthreads();
          ProductOfBlock::run(weights, a.plan, team.vectors, count, sums);
        } else {
          ProductOfBlock::run_from_global(weights, a.plan, count, row_of, sums);
        }
      }
      walk.prepare(w, first);
      if (w > 0) __syncthreads();
      walk.finish(w, first, sums);
    }
  }
  walk.end();
}

}  // namespace fk::cuda::rnn
