// The last large launch of ssd's backward for whole vectors: dB and dC of a chunk, summed over the
// heads of a group or some of them. Blocks that share a group share the parts of V too.
//
//   dC_t = sum over heads of grown_t h^T dy_t   + sum over s of V_ts B_s
//   dB_s = sum over heads of weight_s dh^T x_s  + sum over t of V_ts C_t
//
// Factors of steps are applied to rows of dy and x, so that the sums over heads are one product
// over all channels of all heads. Four warps of a block have 16 steps of dC each, four of dB, and
// all states. The next head is copied while one is multiplied. V comes in parts from the launch
// before; it is multiplied once at the end, in two numbers of the activations' type if that is
// bfloat16, as its rounding would be the largest error of all.
#pragma once

#include "ops/ssd/cuda/backward.h"
#include "ops/ssd/cuda/vector_states.cuh"

namespace fk::cuda::ssd {

template <class Tile>
struct SharedMap {
  static constexpr int kStates = Tile::StatesTile::kBytes, kChannels = Tile::ChannelsTile::kBytes;
  // A stage has two of these pairs: dy and h first, then x and dh.
  static constexpr int kPair = kChannels + kStates;
  static constexpr int kDecays = 2 * kPair;
  static constexpr int kStage = kDecays + static_cast<int>(sizeof(ChunkDecays));
  static constexpr int kBytes = 2 * kStage;
};

// Multiplies the rows lane / 4 and lane / 4 + 8 of a left operand.
template <class T>
__device__ __forceinline__ Fragment<T> scale_rows(const Fragment<T>& f, const float (&by)[2]) {
  Fragment<T> result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = join_pair<T>({f.words[0][i]});
    result.words[0][i] = pack_pair<T>(x.x * by[i % 2], x.y * by[i % 2]);
  }
  return result;
}

template <class Tile>
__global__ void __launch_bounds__(256, 2)
    vector_shared(const __grid_constant__ BackwardArguments a) {
  using T = typename Tile::T;
  using ChannelsTile = typename Tile::ChannelsTile;
  using StatesTile = typename Tile::StatesTile;
  using Map = SharedMap<Tile>;
  constexpr int kStates = Tile::kStates;
  if constexpr (kTakesVectors<T>) {
    extern __shared__ __align__(16) char shared[];
    const Inputs& in = a.in;
    const int64_t row = divide_likely_small(block_index(), a.parts);
    const int64_t part = block_index() - row * a.parts;
    const int64_t slot = divide_likely_small(row, in.groups);
    const int group = static_cast<int>(row - slot * in.groups);
    if (slot >= a.chunks.slots) return;
    const Segment chunk = a.chunks[slot];
    if (!chunk.exists || chunk.first >= chunk.last) return;
    const int group_heads = static_cast<int>(a.group_heads());
    const int first = group * group_heads + static_cast<int>(part * a.heads_each);
    const int heads = min(static_cast<int>(a.heads_each), (group + 1) * group_heads - first);
    const int count = static_cast<int>(chunk.last - chunk.first);
    const int lane = threadIdx.x % 32, strip = threadIdx.x / 32 % 4;
    const int of_B = threadIdx.x / 128;  // 0: this warp has dC, 1: dB
    const int thread = threadIdx.x % 128;

    // Threads of a half copy what they multiply.
    const uint32_t base = shared_address(shared);
    constexpr int kRow = kStates / 8;
    const uint32_t rows_to =
        of_B * Map::kPair + thread / 8 * ChannelsTile::kPitch + thread % 8 * 16;
    const uint32_t states_to = of_B * Map::kPair + Map::kChannels +
                               thread / kRow * StatesTile::kPitch + thread % kRow * 16;
    const bool wanted = thread % kRow * 8 < in.states;
    const Rows& rows = of_B ? in.x : a.dy;
    constexpr int64_t kSize = sizeof(T);
    const int64_t row_bytes = rows.strides[1] * kSize;
    const int state_row = a.state_pitch * static_cast<int>(kSize);
    const char* rows_from = static_cast<const char*>(rows.data) +
                            rows.offset(chunk.batch, chunk.first, first, thread % 8 * 8) * kSize +
                            thread / 8 * row_bytes;
    const char* states_from = static_cast<const char*>(of_B ? a.dstates : a.states) +
                              a.state_at(slot, first) * kSize + thread / kRow * state_row +
                              thread % kRow * 16;
    const char* decays_from =
        reinterpret_cast<const char*>(static_cast<const ChunkDecays*>(a.decays) + slot * in.heads +
                                      first) +
        threadIdx.x * 16;
    const auto copy = [&](int i) {
      const uint32_t to = base + i % 2 * Map::kStage;
      copy_rows<64>(to + rows_to, rows_from, row_bytes, count, true, thread);
      copy_rows<kStates>(to + states_to, states_from, state_row, 64, wanted, thread);
      if (threadIdx.x < sizeof(ChunkDecays) / 16) {
        copy_16_bytes(to + Map::kDecays + threadIdx.x * 16, decays_from, true);
      }
      rows_from += rows.strides[2] * kSize;
      states_from += 64 * state_row;
      decays_from += sizeof(ChunkDecays);
      copies_commit();
    };
    for (int stage = 0; stage < 2; ++stage) {
      clear_missing_states<StatesTile, kStates>(
          base + stage * Map::kStage + of_B * Map::kPair + Map::kChannels, 64, in.states, thread);
    }
    float sums[kStates / 8][4] = {};
    copy(0);
#pragma unroll 1
    for (int i = 0; i < heads; ++i) {
      copies_wait<0>();
      __syncthreads();
      if (i + 1 < heads) copy(i + 1);
      const uint32_t stage = base + i % 2 * Map::kStage + of_B * Map::kPair;
      const ChunkDecays& decays =
          *reinterpret_cast<const ChunkDecays*>(shared + i % 2 * Map::kStage + Map::kDecays);
      const float* const factors = (of_B ? decays.weight : decays.grown) + strip * 16 + lane / 4;
      const float by[2] = {factors[0], factors[8]};
      const ChannelsTile steps{stage};
      const StatesTile states{stage + Map::kChannels};
#pragma unroll
      for (int p = 0; p < 64; p += 16) {
        const Fragment<T> left = scale_rows(steps.left(strip * 16, p), by);
#pragma unroll
        for (int n = 0; n < kStates; n += 16) {
          multiply(sums[n / 8], sums[n / 8 + 1], left, states.right_turned(p, n));
        }
      }
    }

    // V, in two tiles, and C or B. dB takes V turned around, and C.
    __syncthreads();
    const ChannelsTile high{base}, low{base + Map::kChannels};
    const uint32_t other = base + Map::kStage + of_B * Map::kStates;
    const StatesTile shared_rows{other};
    const ChunkRows<T, kStates> from(of_B ? in.C : in.B, chunk.batch, chunk.first, group, 0,
                                     in.states, thread);
    clear_missing_states<StatesTile, kStates>(other, 64, in.states, thread);
    copy_rows<kStates>(other + thread / kRow * StatesTile::kPitch + thread % kRow * 16, from.at,
                       from.row_bytes, count, from.wanted, thread);
    copies_commit();
    const float* const parts =
        a.V_parts + row * a.V_parts_count * (kHalves * 128) + threadIdx.x % 32 * 4;
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < kHalves; i += 8) {
      float V[4] = {};
#pragma unroll 4
      for (int64_t k = part; k < a.V_parts_count; k += a.parts) {
        const Vec<float, 4> four = load<4>(parts + (k * kHalves + i) * 128);
#pragma unroll
        for (int e = 0; e < 4; ++e) V[e] += four.data[e];
      }
      const bool below = i < kHalvesBelow;
      const int square = below ? (i < 2 ? 1 : i < 6 ? 2 : 3) : (i - kHalvesBelow) / 2;
      const int s = below ? (i - square * (square - 1)) * 8 : square * 16 + i % 2 * 8;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int t = square * 16 + 8 * r + lane / 4;
        const uint32_t word = pack_pair<T>(V[2 * r], V[2 * r + 1]);
        const float2 rounded = join_pair<T>({word});
        store_shared(high.at(t, s + lane % 4 * 2), word);
        low.put_pair(t, s + lane % 4 * 2, V[2 * r] - rounded.x, V[2 * r + 1] - rounded.y);
      }
    }
    copies_wait<0>();
    __syncthreads();
#pragma unroll 1
    for (int term = 0; term < (std::is_same_v<T, __nv_bfloat16> ? 2 : 1); ++term) {
      const ChannelsTile tile = term == 0 ? high : low;
#pragma unroll 1
      for (int k = of_B ? strip : 0; k < (of_B ? 4 : strip + 1); ++k) {
        const Fragment<T> left =
            of_B ? tile.left_turned(k * 16, strip * 16) : tile.left(strip * 16, k * 16);
#pragma unroll
        for (int n = 0; n < kStates; n += 16) {
          multiply(sums[n / 8], sums[n / 8 + 1], left, shared_rows.right_turned(k * 16, n));
        }
      }
    }
    const Rows& out = of_B ? a.dB : a.dC;
    if (out.data == nullptr) return;
    float* const own = (of_B ? a.dB_parts : a.dC_parts) + part * a.shared_numbers();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int t = strip * 16 + lane / 4 + 8 * r;
      if (t >= count) continue;
      const int64_t step = chunk.first + t;
#pragma unroll
      for (int i = 0; i < kStates / 8; ++i) {
        const int n = i * 8 + lane % 4 * 2;
        if (n >= in.states) continue;
        if (a.parts == 1) {
          *reinterpret_cast<uint32_t*>(static_cast<T*>(out.data) +
                                       out.offset(chunk.batch, step, group, n)) =
              pack_pair<T>(sums[i][2 * r], sums[i][2 * r + 1]);
        } else {
          const int64_t at =
              ((chunk.batch * a.chunks.sequences.length + step) * in.groups + group) * in.states;
          *reinterpret_cast<float2*>(own + at + n) =
              make_float2(sums[i][2 * r], sums[i][2 * r + 1]);
        }
      }
    }
  }
}

}  // namespace fk::cuda::ssd
