// The first launch of ssd's backward: what each chunk begins with, the gradient of what it ends
// with, and the products C B^T that the heads of a group share.
//
//   h_next  = decay h  + sum over s of weight_s x_s B_s^T   from a sequence's first chunk on
//   dh_prev = decay dh + sum over t of grown_t dg_t C_t^T   from its last chunk back
//
// with dg the gradient of outputs before the gate. Floor: 2 P N multiply-adds a step and head, x,
// dy, z, B and C once, and the states of both directions written once.
//
// A block walks the chunks of one sequence with one tile of 64 channels by 64 states of one head,
// in one direction; the tile stays in registers. What the next chunk needs is loaded while one is
// multiplied, and warp 0 prepares the next chunk's decays besides. So there are as many walks as
// tiles of heads' states, twice, and no second pass over states: they are written once, and read
// once by the next launch. Other blocks of the launch have a chunk's C B^T each, up to its
// diagonal.
#pragma once

#include "ops/ssd/cuda/backward_steps.cuh"

namespace fk::cuda::ssd {

// Multiplies C B^T of one chunk and group.
template <class T>
__device__ __forceinline__ void multiply_shared(const BackwardArguments& a, int64_t block,
                                                char* memory) {
  using S = Stored<T>;
  const int64_t slot = block / a.in.groups;
  const int group = static_cast<int>(block % a.in.groups);
  const Segment chunk = a.chunks[slot];
  if (!chunk.exists || chunk.first >= chunk.last) return;
  const WarpPlace place;
  char* const left = memory;
  char* const right = memory + kSquareBytes<S>;
  WarpSums sums = {};
  SquareLoader<T> C, B;
#pragma unroll 1
  for (int n = 0; n < a.in.states; n += kSide) {
    const SquareSource<T> C_from = steps_source<T>(a.in.C, chunk, group, a.in.states, n);
    const SquareSource<T> B_from = steps_source<T>(a.in.B, chunk, group, a.in.states, n);
    C.fetch(C_from);
    B.fetch(B_from);
    __syncthreads();
    C.put(left, C_from);
    B.put(right, B_from);
    __syncthreads();
    if (place.row < steps_of(chunk)) {
      multiply_squares<S, Major::kK, Major::kK>(sums, place, left, right, place.groups_below(), 0,
                                                depth_of(a.in.states - n));
    }
  }
  float* const to = a.products_of(slot, group);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j >= 2 * place.groups_below()) break;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      store(to + place.row_of(i) * kSide + place.column_of(j, 0),
            Vec<float, 2>{{sums[j][i], sums[j][i + 1]}});
    }
  }
}

// This is one walk: which tile of which state, and which way.
template <class T>
struct StateWalk {
  const BackwardArguments& a;
  bool back;
  int64_t sequence;
  int head, channel, state;  // the tile's first

  __device__ __forceinline__ StateWalk(const BackwardArguments& a, int64_t block) : a(a) {
    state = static_cast<int>(block % a.state_tiles) * kSide;
    block /= a.state_tiles;
    channel = static_cast<int>(block % a.channel_tiles) * kSide;
    block /= a.channel_tiles;
    head = static_cast<int>(block % a.in.heads);
    block /= a.in.heads;
    back = block % 2 != 0;
    sequence = block / 2;
  }
  // Loads what the walk begins with, or stores what a walk back ends with.
  __device__ __forceinline__ void begin(const WarpPlace& place, WarpSums& sums) const {
    const View& from = back ? a.dfinal_state : a.in.initial_state;
    clear_sums(sums);
    if (from.data == nullptr) return;
    for_each(place, [&](int j, int i, int p, int n) {
      sums[j][i] = load_either<T>(from.data, from.dtype == DType::kFloat32,
                                  from.offset(sequence, head, p, n));
    });
  }
  __device__ __forceinline__ void end(const WarpPlace& place, const WarpSums& sums) const {
    const View& to = a.dinitial_state;
    for_each(place, [&](int j, int i, int p, int n) {
      store_either<T>(to.data, to.dtype == DType::kFloat32, to.offset(sequence, head, p, n),
                      sums[j][i]);
    });
  }
  // Keeps the state for the next launch, with zeros up to the end of its rows.
  __device__ __forceinline__ void keep(int64_t slot, const WarpPlace& place,
                                       const WarpSums& sums) const {
    T* const to = static_cast<T*>(back ? a.dstates : a.states) + a.state_at(slot, head);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const int p = channel + place.row_of(i);
      if (p >= a.in.channels) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        store_two(to + p * a.state_pitch, 1, true, state + place.column_of(j, 0), a.state_pitch,
                  sums[j][i], sums[j][i + 1]);
      }
    }
  }

 private:
  template <class Body>
  __device__ __forceinline__ void for_each(const WarpPlace& place, const Body& body) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int p = channel + place.row_of(i), n = state + place.column_of(j, i);
        if (p < a.in.channels && n < a.in.states) body(j, i, p, n);
      }
    }
  }
};

template <class T>
__device__ __forceinline__ void walk_states(const BackwardArguments& a, int64_t block,
                                            char* memory) {
  using S = Stored<T>;
  char* const left = memory;                     // (step, channel)
  char* const right = memory + kSquareBytes<S>;  // (step, state)
  Steps* const steps = reinterpret_cast<Steps*>(memory + 2 * kSquareBytes<S>);
  const StateWalk<T> walk(a, block);
  const WarpPlace place;
  const int group = a.in.group(walk.head);
  const int64_t first = a.chunks.first_slot(walk.sequence);
  const int64_t count = a.chunks.count_of(walk.sequence);
  const bool prepares = threadIdx.x < 32;
  // What follows upon the last chunk of a walk is needed only as a gradient.
  const int64_t moves = walk.back && a.dinitial_state.data != nullptr ? count : count - 1;
  const SequenceSteps whole = a.chunks.sequences[walk.sequence];
  const auto chunk_of = [&](int64_t i) {
    Segment chunk;
    chunk.batch = whole.batch;
    chunk.first = whole.begin + (walk.back ? count - 1 - i : i) * a.chunks.steps;
    chunk.last = min(chunk.first + a.chunks.steps, whole.end);
    return chunk;
  };

  SquareLoader<T> x, shared;
  GradientLoader<T> dg;
  Times<T> times;
  const auto x_source = [&](int64_t i) {
    return steps_source<T>(a.in.x, chunk_of(i), walk.head, a.in.channels, walk.channel);
  };
  const auto shared_source = [&](int64_t i) {
    return steps_source<T>(walk.back ? a.in.C : a.in.B, chunk_of(i), group, a.in.states,
                           walk.state);
  };
  const auto fetch = [&](int64_t i) {
    shared.fetch(shared_source(i));
    if (walk.back) {
      dg.fetch(a, chunk_of(i), walk.head, walk.channel);
    } else {
      x.fetch(x_source(i));
    }
  };
  WarpSums sums;
  walk.begin(place, sums);
  if (moves > 0) {
    fetch(0);
    if (prepares) {
      load_times<T>(a, chunk_of(0), walk.head, &times);
      fill_steps<T>(a, chunk_of(0), walk.head, times, steps);
      if (moves > 1) load_times<T>(a, chunk_of(1), walk.head, &times);
    }
  }
#pragma unroll 1
  for (int64_t i = 0; i < count; ++i) {
    walk.keep(first + (walk.back ? count - 1 - i : i), place, sums);
    if (i >= moves) break;
    const Steps& own = steps[i % 2];
    __syncthreads();  // the steps are there, and the tiles before were read
    if (walk.back) {
      dg.put(left, a, chunk_of(i), walk.head, walk.channel, own.grown);
    } else {
      x.put(left, x_source(i), own.weight);
    }
    shared.put(right, shared_source(i));
    __syncthreads();
    if (i + 1 < moves) {
      fetch(i + 1);
      if (prepares) {
        fill_steps<T>(a, chunk_of(i + 1), walk.head, times, steps + (i + 1) % 2);
        if (i + 2 < moves) load_times<T>(a, chunk_of(i + 2), walk.head, &times);
      }
    }
    const float decay = own.whole;
#pragma unroll
    for (int e = 0; e < 16; ++e) sums[e / 4][e % 4] *= decay;
    const Segment chunk = chunk_of(i);
    if (place.row + walk.channel < a.in.channels) {
      multiply_squares<S, Major::kOuter, Major::kOuter>(sums, place, left, right,
                                                        place.groups_of(a.in.states - walk.state),
                                                        0, depth_of(steps_of(chunk)));
    }
  }
  if (walk.back && a.dinitial_state.data != nullptr) walk.end(place, sums);
}

template <class T>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    backward_states(const __grid_constant__ BackwardArguments a) {
  extern __shared__ __align__(128) char memory[];
  const int64_t block = blockIdx.x + int64_t{blockIdx.y} * gridDim.x;
  if (block < a.walks()) {
    walk_states<T>(a, block, memory);
  } else if (block < a.walks() + a.product_blocks()) {
    multiply_shared<T>(a, block - a.walks(), memory);
  }
}

}  // namespace fk::cuda::ssd
