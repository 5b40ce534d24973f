// The third launch of ssd's backward for whole vectors: dx of a chunk, what each step's decay and
// time step are worth (backward_shared.cuh says what that is), and V. With M_ts = (C_t B_s) E_ts
// dt_s and h, dh the states that the chunk begins and ends with,
//
//   dx_s = weight_s dh B_s + sum over t of M_ts dy_t + D dy_s
//   V_ts = sum over heads of (dy_t x_s) E_ts dt_s                  for s <= t
//
// What steps take from the state, grown_t dy_t (h C_t), and give to it, tail_s x_s (dh B_s), are
// products of a head's channels with sums that this kernel has. dB and dC, which are products with
// the same states, follow in a launch of their own (vector_shared.cuh), which walks over all heads.
//
// A block of four warps has one chunk and some heads of a group. B and C stay in shared memory,
// C B^T and V in registers; each head's tiles are copied while the one before is finished. A warp
// has 16 channels, as rows of products, and five of the 20 half squares of steps: three below the
// diagonal and the two of a square on it. The rectangle of a step (backward_shared.cuh) is added up
// of rows and columns of squares below the diagonal and of a part of its own square.
#pragma once

#include "cuda/reduce.cuh"
#include "ops/ssd/cuda/forward_outputs.cuh"
#include "ops/ssd/cuda/vector_states.cuh"

namespace fk::cuda::ssd {

// This is what a block's warps know of sums over steps of one head.
struct StepSums {
  float from[4][64], to[4][64];    // by warp: of a state and to a state, without factors
  float rows[kHalvesBelow][16];    // of G dt over a half square, by t
  float columns[kHalvesBelow][8];  // of G, by s
  float own_rate[64];              // of G dt over s < j <= t in the square of j
  float own_column[64];            // of G over t in the square of s
  float through[4];
};

template <class Tile>
struct InputsMap {
  static constexpr int kStates = Tile::StatesTile::kBytes, kChannels = Tile::ChannelsTile::kBytes;
  static constexpr int kB = 0, kC = kStates, kH = 2 * kStates, kDh = 3 * kStates;
  static constexpr int kX = 4 * kStates, kMatrix = kX + kChannels, kDy = kMatrix + kChannels;
  static constexpr int kDecays = kDy + 2 * kChannels;
  static constexpr int kSums = kDecays + 2 * static_cast<int>(sizeof(ChunkDecays));
  static constexpr int kBytes = kSums + static_cast<int>(sizeof(StepSums));
};

// Adds up sums[i][e], of columns 8 i + 2 (lane % 4) + e, over the rows that the lanes of a column
// have; lane 4 g + t ends with those of columns 8 g + 2 t and the next.
__device__ __forceinline__ float2 add_rows(float (&sums)[8][2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 4; half > 0; half /= 2) {
    const bool upper = (lane / 4 & half) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float gives = upper ? sums[i][e] : sums[i + half][e];
        const float keeps = upper ? sums[i + half][e] : sums[i][e];
        sums[i][e] = keeps + __shfl_xor_sync(0xffffffffu, gives, 4 * half);
      }
    }
  }
  return make_float2(sums[0][0], sums[0][1]);
}

// Returns the sum over the lanes that have other rows of the same columns.
__device__ __forceinline__ float sum_of_rows(float x) {
#pragma unroll
  for (int mask = 4; mask < 32; mask *= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

// The products of 16 steps t of dy and 8 steps s of x, 64 channels each.
template <class T, class ChannelsTile>
__device__ __forceinline__ void multiply_half(const Fragment<T> (&dy)[4], const ChannelsTile& x,
                                              int s, float (&scores)[4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int e = 0; e < 4; ++e) scores[e] = 0.f;
#pragma unroll
  for (int k = 0; k < 64; k += 32) {
    uint32_t words[4];
    load_matrices(words, x.at(s + lane % 8, k + lane / 8 * 8));
    mma_16816(scores, dy[k / 16].words[0], words[0], words[1], T());
    mma_16816(scores, dy[k / 16 + 1].words[0], words[2], words[3], T());
  }
}

// Stores 16 channels of `count` steps, which a warp has as sums, channels as rows.
template <class T>
__device__ __forceinline__ void store_steps_of_channels(const float (&sums)[8][4], T* to,
                                                        int64_t row, int count) {
  const int left = count - static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    TurnedOutputs<T> turned;
    turned.set(sums[i]);
    if (i * 8 < left) *reinterpret_cast<uint2*>(to) = turned.pieces[0];
    to += 8 * row;
  }
}

// Adds up what a chunk's steps are worth in one head and stores it. Threads 0 to 63 call it.
__device__ __forceinline__ void store_step_worth(const BackwardArguments& a, int64_t slot, int head,
                                                 const ChunkDecays& decays, const StepSums& sums) {
  const int j = threadIdx.x, strip = j / 16, lane = j % 32;
  const auto column = [&](int row, int s) { return sums.columns[row * (row - 1) + s / 8][s % 8]; };
  float rows = 0.f, columns = 0.f;
  for (int i = strip * (strip - 1); i < strip * (strip + 1); ++i) rows += sums.rows[i][j % 16];
  for (int row = strip + 1; row < 4; ++row) columns += column(row, j);
  // Squares that a rectangle has whole: strips 2 and 3 by strip 0, and strip 3 by strips 0 and 1.
  float whole = 0.f;
  if (j < 16) {
    whole = decays.dt[j] * (column(2, j) + column(3, j));
  } else if (j >= 32) {
    whole = decays.dt[lane] * column(3, lane);
  }
  whole = warp_sum(whole);
  float before = decays.dt[j] * columns;
#pragma unroll
  for (int distance = 1; distance < 16; distance *= 2) {
    const float later = __shfl_down_sync(0xffffffffu, rows, distance);
    const float earlier = __shfl_up_sync(0xffffffffu, before, distance);
    if (j % 16 + distance < 16) rows += later;
    if (j % 16 >= distance) before += earlier;
  }
  const float earlier = __shfl_up_sync(0xffffffffu, before, 1);
  before = j % 16 == 0 ? 0.f : earlier;
  float rate = rows + before + sums.own_rate[j];
  if (strip == 1 || strip == 2) rate += whole;
  float from = 0.f, to = 0.f;
#pragma unroll
  for (int warp = 0; warp < 4; ++warp) {
    from += sums.from[warp][j];
    to += sums.to[warp][j];
  }
  float* const worth = a.worth_of(slot, head) + j;
  worth[kRate * kSide] = rate;
  worth[kColumn * kSide] = columns + sums.own_column[j];
  worth[kFromState * kSide] = from * decays.grown[j];
  worth[kToState * kSide] = to * decays.tail[j];
  if (j == 0) {
    a.through[slot * a.in.heads + head] =
        (sums.through[0] + sums.through[1] + sums.through[2] + sums.through[3]) * decays.whole;
  }
}

// A warp's half squares of a head: makes sums of G and adds to V, and fills in the matrix M.
template <class Tile>
__device__ __forceinline__ void take_half_squares(const typename Tile::ChannelsTile& dy,
                                                  const typename Tile::ChannelsTile& x,
                                                  const typename Tile::ChannelsTile& matrix,
                                                  const ChunkDecays& decays,
                                                  const Vec<float, 4> (&products)[5],
                                                  float (&V)[5][4], StepSums& sums) {
  using T = typename Tile::T;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4 * 2;
  const auto pair_of = [&](const float* numbers) {
    return *reinterpret_cast<const float2*>(numbers + pair);
  };
  Fragment<T> left[4];
  const auto load_left = [&](int strip) {
#pragma unroll
    for (int k = 0; k < 4; ++k) left[k] = dy.left(strip * 16, k * 16);
  };
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int index = warp * 3 + i, strip = index < 2 ? 1 : index < 6 ? 2 : 3;
    const int s = (index - strip * (strip - 1)) * 8, t = strip * 16 + row;
    if (i != 1) load_left(strip);
    float scores[4];
    multiply_half<T>(left, x, s, scores);
    const float2 dt = pair_of(decays.dt + s), upto = pair_of(decays.upto + index * 8);
    float columns[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float since = decays.since[t + 8 * r];
      float sum = 0.f, m[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float decay = since * (e == 0 ? upto.x : upto.y);
        const float timed = decay * (e == 0 ? dt.x : dt.y);
        const float product = products[i].data[2 * r + e], both = scores[2 * r + e] * product;
        m[e] = product * timed;
        V[i][2 * r + e] = fmaf(scores[2 * r + e], timed, V[i][2 * r + e]);
        sum = fmaf(both, timed, sum);
        columns[e] = fmaf(both, decay, columns[e]);
      }
      matrix.put_pair(t + 8 * r, s + pair, m[0], m[1]);
      sum = warp_sum<4>(sum);
      if (lane % 4 == 0) sums.rows[index][row + 8 * r] = sum;
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float sum = sum_of_rows(columns[e]);
      if (lane < 4) sums.columns[index][pair + e] = sum;
    }
  }

  // The square on the diagonal. `rates` are sums over s < j for j = 8 half + pair + e + 1, at first
  // of a row t.
  const int begin = warp * 16;
  load_left(warp);
  float rates[4] = {}, of_columns[4] = {}, before = 0.f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float scores[4];
    multiply_half<T>(left, x, begin + 8 * half, scores);
    const float2 dt = pair_of(decays.dt + begin + 8 * half);
    const float2 from = pair_of(decays.log + begin + 8 * half);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int t = row + 8 * r;
      float m[2] = {}, rate[2] = {};
      if (r >= half) {
        const float log = decays.log[begin + t];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool seen = r > half || pair + e <= row;
          const float decay = seen ? exp2_fast(log - (e == 0 ? from.x : from.y)) : 0.f;
          const float timed = decay * (e == 0 ? dt.x : dt.y);
          const float product = products[3 + half].data[2 * r + e];
          const float both = scores[2 * r + e] * product;
          m[e] = product * timed;
          V[3 + half][2 * r + e] = fmaf(scores[2 * r + e], timed, V[3 + half][2 * r + e]);
          rate[e] = both * timed;
          of_columns[2 * half + e] = fmaf(both, decay, of_columns[2 * half + e]);
        }
        // Sums over the steps s of the row so far.
        rate[1] += rate[0];
        float upto_lane = rate[1];
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2) {
          const float other = __shfl_up_sync(0xffffffffu, upto_lane, distance, 4);
          if (lane % 4 >= distance) upto_lane += other;
        }
        const float lanes_before = __shfl_up_sync(0xffffffffu, upto_lane, 1, 4);
        const float others = (lane % 4 == 0 ? 0.f : lanes_before) + (half == 1 ? before : 0.f);
        if (r == 1 && half == 0) before = __shfl_sync(0xffffffffu, upto_lane, 3, 4);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (r > half || pair + e < row) rates[2 * half + e] += rate[e] + others;
        }
      }
      matrix.put_pair(begin + t, begin + 8 * half + pair, m[0], m[1]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float rate = sum_of_rows(rates[i]), column = sum_of_rows(of_columns[i]);
    const int s = i / 2 * 8 + pair + i % 2;
    if (lane < 4) {
      if (s < 15) sums.own_rate[begin + s + 1] = rate;
      sums.own_column[begin + s] = column;
    }
  }
  if (lane == 0) sums.own_rate[begin] = 0.f;
}

template <class Tile>
__global__ void __launch_bounds__(128, 2)
    vector_inputs(const __grid_constant__ BackwardArguments a) {
  using T = typename Tile::T;
  using ChannelsTile = typename Tile::ChannelsTile;
  using StatesTile = typename Tile::StatesTile;
  using Map = InputsMap<Tile>;
  constexpr int kStates = Tile::kStates;
  if constexpr (kTakesVectors<T>) {
    extern __shared__ __align__(16) char shared[];
    const Inputs& in = a.in;
    const int64_t row = divide_likely_small(block_index(), a.V_parts_count);
    const int part = static_cast<int>(block_index() - row * a.V_parts_count);
    const int64_t slot = divide_likely_small(row, in.groups);
    const int group = static_cast<int>(row - slot * in.groups);
    if (slot >= a.chunks.slots) return;
    const Segment chunk = a.chunks[slot];
    const int group_heads = static_cast<int>(a.group_heads());
    const int first = group * group_heads + part * a.V_heads;
    const int last = min(first + a.V_heads, (group + 1) * group_heads);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (!chunk.exists || chunk.first >= chunk.last) {
      if (a.dD.data == nullptr || threadIdx.x >= 64) return;
      for (int head = first; head < last; ++head) {
        a.dD_parts[(slot * in.heads + head) * 64 + threadIdx.x] = 0.f;
      }
      return;
    }
    const int count = static_cast<int>(chunk.last - chunk.first);
    const uint32_t base = shared_address(shared);
    StepSums& sums = *reinterpret_cast<StepSums*>(shared + Map::kSums);

    constexpr int kRow = kStates / 8;
    const uint32_t x_to = threadIdx.x / 8 * ChannelsTile::kPitch + threadIdx.x % 8 * 16;
    const uint32_t states_to = threadIdx.x / kRow * StatesTile::kPitch + threadIdx.x % kRow * 16;
    const ChunkRows<T, kStates> B_from(in.B, chunk.batch, chunk.first, group, 0, in.states,
                                       threadIdx.x);
    const ChunkRows<T, kStates> C_from(in.C, chunk.batch, chunk.first, group, 0, in.states,
                                       threadIdx.x);
    const ChunkRows<T, 64> x_from(in.x, chunk.batch, chunk.first, first, 0, 64, threadIdx.x);
    const ChunkRows<T, 64> dy_from(a.dy, chunk.batch, chunk.first, first, 0, 64, threadIdx.x);
    const int64_t state_row = a.state_pitch * static_cast<int64_t>(sizeof(T));
    const int64_t state_from = a.state_at(slot, first) * static_cast<int64_t>(sizeof(T)) +
                               threadIdx.x / kRow * state_row + threadIdx.x % kRow * 16;
    const auto decays_of = [&](int i) {
      return shared + Map::kDecays + i % 2 * static_cast<int>(sizeof(ChunkDecays));
    };
    const auto copy = [&](int i) {
      const int64_t x_at = i * in.x.strides[2] * static_cast<int64_t>(sizeof(T));
      const int64_t dy_at = i * a.dy.strides[2] * static_cast<int64_t>(sizeof(T));
      const int64_t state = state_from + i * 64 * state_row;
      copy_rows<kStates>(base + Map::kH + states_to, static_cast<const char*>(a.states) + state,
                         state_row, 64, B_from.wanted, threadIdx.x);
      copy_rows<kStates>(base + Map::kDh + states_to, static_cast<const char*>(a.dstates) + state,
                         state_row, 64, B_from.wanted, threadIdx.x);
      copy_rows<64>(base + Map::kX + x_to, x_from.at + x_at, x_from.row_bytes, count, true,
                    threadIdx.x);
      copy_rows<64>(base + Map::kDy + i % 2 * Map::kChannels + x_to, dy_from.at + dy_at,
                    dy_from.row_bytes, count, true, threadIdx.x);
      if (threadIdx.x < sizeof(ChunkDecays) / 16) {
        copy_16_bytes(shared_address(decays_of(i)) + threadIdx.x * 16,
                      reinterpret_cast<const char*>(static_cast<const ChunkDecays*>(a.decays) +
                                                    slot * in.heads + first + i) +
                          threadIdx.x * 16,
                      true);
      }
      copies_commit();
    };
    for (int tile = 0; tile < 4; ++tile) {
      clear_missing_states<StatesTile, kStates>(base + tile * Map::kStates, 64, in.states,
                                                threadIdx.x);
    }
    copy_rows<kStates>(base + Map::kB + states_to, B_from.at, B_from.row_bytes, count,
                       B_from.wanted, threadIdx.x);
    copy_rows<kStates>(base + Map::kC + states_to, C_from.at, C_from.row_bytes, count,
                       C_from.wanted, threadIdx.x);
    copy(0);
    const int64_t halves = (slot * in.groups + group) * kHalves;
    Vec<float, 4> products[5];
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      const int half = i < 3 ? warp * 3 + i : kHalvesBelow + warp * 2 + i - 3;
      products[i] = load<4>(a.products + (halves + half) * 128 + lane * 4);
    }
    float V[5][4] = {};
    const StatesTile B{base + Map::kB}, C{base + Map::kC}, h{base + Map::kH}, dh{base + Map::kDh};
    const ChannelsTile x{base + Map::kX}, matrix{base + Map::kMatrix};
    const int channel = warp * 16 + lane / 4;
#pragma unroll 1
    for (int i = 0; first + i < last; ++i) {
      const int head = first + i;
      const ChunkDecays& decays = *reinterpret_cast<const ChunkDecays*>(decays_of(i));
      const ChannelsTile dy{base + Map::kDy + i % 2 * Map::kChannels};
      copies_wait<0>();
      __syncthreads();
      float dx[8][4] = {};
      {
        float y[8][4] = {}, through[2][4] = {};
#pragma unroll
        for (int n = 0; n < kStates; n += 16) {
          const Fragment<T> own = h.left(warp * 16, n), gradient = dh.left(warp * 16, n);
          mma_16816(through[0], own.words[0], gradient.words[0][0], gradient.words[0][2], T());
          mma_16816(through[1], own.words[0], gradient.words[0][1], gradient.words[0][3], T());
#pragma unroll
          for (int t = 0; t < 64; t += 16) {
            multiply(y[t / 8], y[t / 8 + 1], own, C.right(t, n));
            multiply(dx[t / 8], dx[t / 8 + 1], gradient, B.right(t, n));
          }
        }
        // What counts of these products of rows is their diagonal.
        const int off = lane / 4 - lane % 4 * 2;
        float sum = off == 0   ? through[0][0] + through[1][2]
                    : off == 1 ? through[0][1] + through[1][3]
                               : 0.f;
        sum = warp_sum(sum);
        if (lane == 0) sums.through[warp] = sum;
        float from[8][2], to[8][2], D_sums[2] = {};
#pragma unroll
        for (int s = 0; s < 64; s += 16) {
          const Fragment<T> of_x = x.left_turned(s, warp * 16);
          const Fragment<T> of_dy = dy.left_turned(s, warp * 16);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int at = s / 8 + half;
            float2 xs[2], dys[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              xs[r] = join_pair<T>({of_x.words[0][2 * half + r]});
              dys[r] = join_pair<T>({of_dy.words[0][2 * half + r]});
              D_sums[r] = fmaf(xs[r].x, dys[r].x, fmaf(xs[r].y, dys[r].y, D_sums[r]));
            }
            from[at][0] = fmaf(dys[0].x, y[at][0], dys[1].x * y[at][2]);
            from[at][1] = fmaf(dys[0].y, y[at][1], dys[1].y * y[at][3]);
            to[at][0] = fmaf(xs[0].x, dx[at][0], xs[1].x * dx[at][2]);
            to[at][1] = fmaf(xs[0].y, dx[at][1], xs[1].y * dx[at][3]);
          }
        }
        const int step = lane / 4 * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(&sums.from[warp][step]) = add_rows(from);
        *reinterpret_cast<float2*>(&sums.to[warp][step]) = add_rows(to);
        if (a.dD.data != nullptr) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float all = warp_sum<4>(D_sums[r]);
            if (lane % 4 == 0) a.dD_parts[(slot * in.heads + head) * 64 + channel + 8 * r] = all;
          }
        }
      }
#pragma unroll
      for (int s = 0; s < 8; ++s) {
        const float2 weight =
            *reinterpret_cast<const float2*>(decays.weight + s * 8 + lane % 4 * 2);
#pragma unroll
        for (int e = 0; e < 4; ++e) dx[s][e] *= e % 2 == 0 ? weight.x : weight.y;
      }
      take_half_squares<Tile>(dy, x, matrix, decays, products, V, sums);
      __syncthreads();
      if (head + 1 < last) copy(i + 1);
      if (threadIdx.x < 64) store_step_worth(a, slot, head, decays, sums);
      if (a.dx.data == nullptr) continue;
      float D[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) D[r] = number_of_head<T>(in.D, head, channel + 8 * r);
#pragma unroll
      for (int t = 0; t < 64; t += 16) {
        const Fragment<T> turned = dy.left_turned(t, warp * 16);
#pragma unroll
        for (int s = 0; s <= t; s += 16) {
          multiply(dx[s / 8], dx[s / 8 + 1], turned, matrix.right_turned(t, s));
        }
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const float2 of_dy = join_pair<T>({turned.words[0][word]});
          float(&to)[4] = dx[t / 8 + word / 2];
          to[word % 2 * 2] = fmaf(D[word % 2], of_dy.x, to[word % 2 * 2]);
          to[word % 2 * 2 + 1] = fmaf(D[word % 2], of_dy.y, to[word % 2 * 2 + 1]);
        }
      }
      const int at = warp * 16 + TurnedOutputs<T>::channel(0);
      store_steps_of_channels<T>(
          dx,
          static_cast<T*>(a.dx.data) + a.dx.offset(chunk.batch, chunk.first + lane / 4, head, at),
          a.dx.strides[1], count);
    }
    float* const to = a.V_parts + (row * a.V_parts_count + part) * (kHalves * 128) + lane * 4;
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      const int half = i < 3 ? warp * 3 + i : kHalvesBelow + warp * 2 + i - 3;
      store(to + half * 128, Vec<float, 4>{{V[i][0], V[i][1], V[i][2], V[i][3]}});
    }
  }
}

}  // namespace fk::cuda::ssd
