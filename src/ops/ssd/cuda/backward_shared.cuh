// A task of the second launch of ssd's backward: dB and dC of a chunk, summed over the heads of a
// group (or some of them) for 64 states, and what each step's decay and time step are worth. With h
// and dh the states that the chunk begins and ends with, and E_ts the decay from step s to t:
//
//   dC_t = sum over heads of grown_t h^T dg_t  + sum over s of V_ts B_s
//   dB_s = sum over heads of weight_s dh^T x_s + sum over t of V_ts C_t
//   V_ts = sum over heads of (dg_t x_s) E_ts dt_s                        for s <= t
//
// The logarithm of a step's decay is in every E_ts with s before it and t not, in grown_t from it
// on, in tail_s before it, and in the chunk's whole decay. Its gradient is the sum of what those
// are worth, G_ts dt_s = (dg_t x_s) (C_t B_s) E_ts dt_s for each E_ts. That sum over a rectangle of
// steps is made as such, of terms and never of differences: the difference of two sums over all
// pairs, which is shorter, would cancel. In squares of 16 x 16 steps the rectangle of step j has
// whole squares, rows and columns of squares, and part of one square on the diagonal.
//
// A block has one chunk, keeps dB, dC and V in registers while it walks over heads, and multiplies
// V by B and C once at the end. For each head it loads tiles of dg, x, h and dh once for up to 64
// channels. Floor: 2 P N + P Q / 2 multiply-adds a step and head, Q being 64.
#pragma once

#include "cuda/raw_vec.cuh"
#include "cuda/reduce.cuh"
#include "ops/ssd/cuda/backward_steps.cuh"

namespace fk::cuda::ssd {

// Sums of G dt over squares of 16 x 16 steps, square (I, K) having steps t of strip I and s of K.
struct WorthSums {
  float columns[4][kSide];    // of G, for strip I and step s
  float rows[4][kSide];       // for strip K and step t, K < I
  float diagonal[4][16][17];  // the squares (I, I) themselves
  float quarters[4][kSide];   // four parts of each rectangle
  float states[2][2][kSide];  // from the state and to the state, by halves of columns
  float through[kBackwardThreads / 32];
};

// A warp's fragment of B or C, in the places of its sums.
template <class T>
struct RowsFragment {
  RawVec<T, 2> pairs[4][2];

  __device__ __forceinline__ void fetch(const SquareSource<T>& from, const WarpPlace& place) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const int row = place.row_of(i);
      const T* const p = from.data + row * from.row;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = place.column_of(j, 0);
        if (from.in_vectors && row < from.rows && column < from.columns) {
          pairs[j][i / 2].load(p + column);
        } else {
          const float both[2] = {from.element(row, column), from.element(row, column + 1)};
          pairs[j][i / 2].set(both);
        }
      }
    }
  }
  // Returns the scalar products of a lane's two rows with those of sums, over the lanes of a row.
  __device__ __forceinline__ float2 dot(const WarpSums& sums) const {
    float result[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float own[2];
        pairs[j][i].unpack_to(own);
        result[i] = fmaf(own[0], sums[j][2 * i], result[i]);
        result[i] = fmaf(own[1], sums[j][2 * i + 1], result[i]);
      }
      result[i] = warp_sum<4>(result[i]);
    }
    return make_float2(result[0], result[1]);
  }
};

// Adds factors o sums to `totals`, and stores what steps take from or give to the state.
template <class T>
__device__ __forceinline__ void add_state_part(const WarpPlace& place, const WarpSums& sums,
                                               const RowsFragment<T>& own,
                                               const float* total_factors,
                                               const float* worth_factors, WarpSums& totals,
                                               float* worth) {
  const float2 products = own.dot(sums);
  const bool stores = place.lane % 4 == 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = place.row_of(2 * i);
    const float factor = total_factors[row];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      totals[j][2 * i] = fmaf(factor, sums[j][2 * i], totals[j][2 * i]);
      totals[j][2 * i + 1] = fmaf(factor, sums[j][2 * i + 1], totals[j][2 * i + 1]);
    }
    if (stores) worth[row] = worth_factors[row] * (i == 0 ? products.x : products.y);
  }
}

// Takes a warp's part of dg x^T: adds to V, and unless `products` (C B^T) is null, leaves sums of G
// in shared memory.
template <class T>
__device__ __forceinline__ void take_scores(const WarpPlace& place, const Steps& steps, int count,
                                            const WarpSums& scores, const float* products,
                                            WarpSums& V, WorthSums* worth) {
  const int strip = place.row / 16, lane = place.lane;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    if (c >= place.groups_below()) break;
    const int square = place.column / 16 + c;
    float row_sums[2] = {};
#pragma unroll
    for (int j = 2 * c; j < 2 * c + 2; ++j) {
      float column_sums[2] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int t = place.row_of(i), s = place.column_of(j, i);
        const bool seen = s <= t && t < count;
        const float change = seen ? scores[j][i] * steps.template between<T>(t, s) : 0.f;
        V[j][i] = fmaf(change, steps.dt[s], V[j][i]);
        if (products == nullptr) continue;
        const float G = seen ? change * products[t * kSide + s] : 0.f;
        const float worth_of_pair = G * steps.dt[s];
        column_sums[i % 2] += G;
        row_sums[i / 2] += worth_of_pair;
        if (square == strip) worth->diagonal[strip][t % 16][s % 16] = worth_of_pair;
      }
      if (products == nullptr) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = column_sums[i];
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) sum += shuffle_xor(sum, mask);
        if (lane < 4) worth->columns[strip][place.column_of(j, i)] = sum;
      }
    }
    if (products == nullptr || square == strip) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = warp_sum<4>(row_sums[i]);
      if (lane % 4 == 0) worth->rows[square][place.row_of(2 * i)] = sum;
    }
  }
}

// Adds up a quarter of the rectangle of each step j: pairs of steps s < j <= t.
__device__ __forceinline__ void sum_rectangles(const Steps& steps, WorthSums* worth) {
  const int thread = thread_now();
  const int j = thread % kSide, strip = j / 16, begin = strip * 16;
  const int quarter = thread / kSide;
  float sum = 0;
  if (quarter == 0) {  // t in the strip of j, s in earlier ones
    for (int square = 0; square < strip; ++square) {
      for (int t = j; t < begin + 16; ++t) sum += worth->rows[square][t];
    }
  } else if (quarter == 3) {  // both in the strip of j
    for (int t = j % 16; t < 16; ++t) {
      for (int s = 0; s < j % 16; ++s) sum += worth->diagonal[strip][t][s];
    }
  } else {  // t in later strips, s in the strip of j or in earlier ones
    const int first = quarter == 1 ? begin : 0, last = quarter == 1 ? j : begin;
    for (int s = first; s < last; ++s) {
      float column = 0;
      for (int later = strip + 1; later < 4; ++later) column += worth->columns[later][s];
      sum = fmaf(column, steps.dt[s], sum);
    }
  }
  worth->quarters[quarter][j] = sum;
}

// Adds the products of a thread's numbers with those in the same places elsewhere, rows of vectors.
template <class T>
__device__ __forceinline__ float add_products(const SquareLoader<T>& own,
                                              const SquareSource<T>& other, float sum) {
  using Loader = SquareLoader<T>;
  const int thread = thread_now();
#pragma unroll
  for (int i = 0; i < Loader::kCount; ++i) {
    const int row = Loader::row(thread, i), column = Loader::column(thread);
    if (row >= other.rows || column >= other.columns) continue;
    float x[Loader::kWidth], y[Loader::kWidth];
    unpack(own.values[i], x);
    unpack(load<Loader::kWidth>(other.data + row * other.row + column), y);
#pragma unroll
    for (int e = 0; e < Loader::kWidth; ++e) sum = fmaf(x[e], y[e], sum);
  }
  return sum;
}

// Stores what the steps of a chunk in one head are worth.
__device__ __forceinline__ void store_worth(const BackwardArguments& a, int64_t slot, int head,
                                            int tile, const WorthSums& worth) {
  const int j = thread_now();
  if (j >= kSide) return;
  float* const to = a.worth_of(slot, head);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = (i == 0 ? kFromState : kToState) + 2 * tile;
    to[row * kSide + j] = worth.states[i][0][j] + worth.states[i][1][j];
  }
  if (j == 0) {
    float through = 0;
    for (const float part : worth.through) through += part;
    a.through[(slot * a.in.heads + head) * a.state_tiles + tile] = through;
  }
  if (tile != 0) return;
  to[kRate * kSide + j] =
      (worth.quarters[0][j] + worth.quarters[1][j]) + (worth.quarters[2][j] + worth.quarters[3][j]);
  float column = 0;
  for (int strip = j / 16; strip < 4; ++strip) column += worth.columns[strip][j];
  to[kColumn * kSide + j] = column;
}

// Stores the lower triangle of V, rounded, and leaves in V what the rounding took.
template <class S>
__device__ __forceinline__ void put_term(char* tile, const WarpPlace& place, WarpSums& V) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j >= 2 * place.groups_below()) break;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      put_two<S>(tile, place.row_of(i), place.column_of(j, 0), V[j][i], V[j][i + 1]);
      V[j][i] -= to_float(from_float<S>(V[j][i]));
      V[j][i + 1] -= to_float(from_float<S>(V[j][i + 1]));
    }
  }
}

// Stores dB or dC of a chunk, or one part's sum of it.
template <class T>
__device__ __forceinline__ void store_shared_gradient(const BackwardArguments& a, const Rows& out,
                                                      float* parts, int64_t part,
                                                      const Segment& chunk, int group, int state,
                                                      const WarpPlace& place,
                                                      const WarpSums& sums) {
  if (out.data == nullptr) return;
  if (a.parts == 1) {
    store_steps<T>(out, chunk, group, a.in.states, state, place, sums);
    return;
  }
  Rows own;
  own.data = parts + part * a.shared_numbers();
  own.strides[2] = a.in.states;
  own.strides[1] = a.in.groups * own.strides[2];
  own.strides[0] = a.chunks.sequences.length * own.strides[1];
  own.strides[3] = 1;
  own.vectors = a.in.states % 2 == 0;
  store_steps<float>(own, chunk, group, a.in.states, state, place, sums);
}

template <class T>
__device__ __forceinline__ void shared_gradients(const BackwardArguments& a, int64_t block,
                                                 char* memory) {
  using S = Stored<T>;
  const int tile = static_cast<int>(block % a.state_tiles);
  block /= a.state_tiles;
  const int64_t part = block % a.parts;
  const int group = static_cast<int>(block / a.parts % a.in.groups);
  const int64_t slot = block / a.parts / a.in.groups;
  const Segment chunk = a.chunks[slot];
  if (!chunk.exists || chunk.first >= chunk.last) return;
  char* const left = memory;                         // dg, (step, channel)
  char* const right = memory + kSquareBytes<S>;      // x, (step, channel)
  char* const state_tile = right + kSquareBytes<S>;  // h or dh, (channel, state)
  Steps& steps = *reinterpret_cast<Steps*>(state_tile + kSquareBytes<S>);
  WorthSums* const worth = reinterpret_cast<WorthSums*>(&steps + 1);
  const int state = tile * kSide, channels = a.in.channels;
  const int count = steps_of(chunk);
  const bool one_slice = a.channel_tiles == 1, prepares = threadIdx.x < 32;
  const int first = static_cast<int>(group * a.group_heads() + part * a.heads_each);
  const int last = static_cast<int>(min(first + a.heads_each, (group + 1) * a.group_heads()));

  const auto groups_of = [&](const WarpPlace& place) {
    return place.row < count ? place.groups_of(a.in.states - state) : 0;
  };
  const auto rows_of = [&](const Rows& t, const WarpPlace& place) {
    RowsFragment<T> own;
    own.fetch(steps_source<T>(t, chunk, group, a.in.states, state), place);
    return own;
  };
  WarpSums V = {}, dB = {}, dC = {};
  Times<T> times;
  if (prepares && first < last) load_times<T>(a, chunk, first, &times);
#pragma unroll 1
  for (int head = first; head < last; ++head) {
    WarpSums sums = {};
    {
      WarpSums scores = {};
#pragma unroll 1
      for (int p = 0; p < channels; p += kSide) {
        GradientLoader<T> dg;
        SquareLoader<T> x, h;
        dg.fetch(a, chunk, head, p);
        const SquareSource<T> x_from = steps_source<T>(a.in.x, chunk, head, channels, p);
        x.fetch(x_from);
        const SquareSource<T> h_from =
            state_source<T>(a, a.states, a.state_at(slot, head), p, state);
        h.fetch(h_from);
        __syncthreads();  // what was there has been read
        if (prepares && p == 0) {
          fill_steps<T>(a, chunk, head, times, &steps);
          if (head + 1 < last) load_times<T>(a, chunk, head + 1, &times);
        }
        dg.put(left, a, chunk, head, p);
        x.put(right, x_from);
        h.put(state_tile, h_from);
        __syncthreads();
        const int depth = depth_of(channels - p);
        const WarpPlace place;
        if (place.row < count) {
          multiply_squares<S, Major::kK, Major::kK>(scores, place, left, right,
                                                    place.groups_below(), 0, depth);
        }
        multiply_squares<S, Major::kK, Major::kOuter>(sums, place, left, state_tile,
                                                      groups_of(place), 0, depth);
      }
      const WarpPlace place;
      add_state_part(place, sums, rows_of(a.in.C, place), steps.grown, steps.grown, dC,
                     worth->states[0][place.column / 32]);
      take_scores<T>(place, steps, count, scores, tile == 0 ? a.products_of(slot, group) : nullptr,
                     V, worth);
    }
    clear_sums(sums);
    float through = 0;
#pragma unroll 1
    for (int p = 0; p < channels; p += kSide) {
      SquareLoader<T> dh;
      const SquareSource<T> dh_from =
          state_source<T>(a, a.dstates, a.state_at(slot, head), p, state);
      dh.fetch(dh_from);
      __syncthreads();
      dh.put(state_tile, dh_from);
      through =
          add_products(dh, state_source<T>(a, a.states, a.state_at(slot, head), p, state), through);
      if (!one_slice) {
        SquareLoader<T> x;
        const SquareSource<T> x_from = steps_source<T>(a.in.x, chunk, head, channels, p);
        x.fetch(x_from);
        x.put(right, x_from);
      }
      __syncthreads();
      const WarpPlace place;
      multiply_squares<S, Major::kK, Major::kOuter>(sums, place, right, state_tile,
                                                    groups_of(place), 0, depth_of(channels - p));
    }
    const WarpPlace place;
    add_state_part(place, sums, rows_of(a.in.B, place), steps.weight, steps.tail, dB,
                   worth->states[1][place.column / 32]);
    through = warp_sum(through) * steps.whole;
    if (threadIdx.x % 32 == 0) worth->through[threadIdx.x / 32] = through;
    if (tile == 0) sum_rectangles(steps, worth);
    __syncthreads();
    store_worth(a, slot, head, tile, *worth);
  }

  const WarpPlace place;
  const int groups = groups_of(place);
  SquareLoader<T> B, C;
  const SquareSource<T> B_from = steps_source<T>(a.in.B, chunk, group, a.in.states, state);
  const SquareSource<T> C_from = steps_source<T>(a.in.C, chunk, group, a.in.states, state);
  B.fetch(B_from);
  C.fetch(C_from);
  __syncthreads();
  C.put(left, C_from);
  B.put(right, B_from);
  // A bfloat16 of V, a sum over heads, would be the largest error of all: V goes in two of them.
  constexpr int kTerms = std::is_same_v<S, __nv_bfloat16> ? 2 : 1;
#pragma unroll 1
  for (int term = 0; term < kTerms; ++term) {
    if (term > 0) __syncthreads();
    put_term<S>(state_tile, place, V);
    __syncthreads();
    multiply_squares<S, Major::kK, Major::kOuter>(dC, place, state_tile, right, groups, 0,
                                                  place.row + 16);
    multiply_squares<S, Major::kOuter, Major::kOuter>(dB, place, state_tile, left, groups,
                                                      place.row, depth_of(count));
  }
  store_shared_gradient<T>(a, a.dC, a.dC_parts, part, chunk, group, state, place, dC);
  store_shared_gradient<T>(a, a.dB, a.dB_parts, part, chunk, group, state, place, dB);
}

}  // namespace fk::cuda::ssd
