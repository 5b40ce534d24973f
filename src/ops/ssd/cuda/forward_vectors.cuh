// ssd's forward on tensor cores for what models have: float16 or bfloat16, rows that are whole
// vectors, and heads of 64 channels or multiples of it. It multiplies as forward.cuh does, states
// in registers, channels as rows; what it leaves out are the cases, and with them most of the
// instructions.
//
// Three launches, of which the second is for cut sequences only:
//
//   prepare_chunks  C B^T of each chunk and group, and of each chunk and head what its decays are
//                   (ChunkDecays): 1.7 KB where x and y have 16 KB. A walk would wait for these
//                   sums, one step after another, at each of its chunks.
//   walk_vectors    without outputs: what each walk makes of a state of 0
//   walk_vectors    with outputs
//
// A chunk has two phases with a barrier before each. In the first a block multiplies C h^T and
// fills the chunk's matrix, in the second it multiplies the matrix by x and moves the states on.
// Copies to shared memory run in the phase that does not use their place: C in the second, x and B
// in the first. So there is one place for each, and three blocks a multiprocessor.
#pragma once

#include "ops/ssd/cuda/forward.cuh"
#include "ops/ssd/cuda/prepared.cuh"

namespace fk::cuda::ssd {

template <class Tile, bool kOutputs>
struct VectorWalk {
  using T = typename Tile::T;
  static constexpr int kStates = Tile::kStates;
  using XTile = typename Tile::XTile;
  using StatesTile = typename Tile::StatesTile;
  using Matrix = typename Tile::Matrix;
  // Two stages of x and B; with outputs the second is one of C and the matrix. Then the decays of
  // two chunks.
  static constexpr int kStageBytes = XTile::kBytes + StatesTile::kBytes;
  static constexpr int kSharedBytes = 2 * kStageBytes + 2 * static_cast<int>(sizeof(ChunkDecays));

  const ForwardArguments& a;
  const WalkPlace& place;
  char* shared;
  float* skip;  // D of the block's 64 channels

  WarpState<T, kStates> state;

  __device__ __forceinline__ const ChunkDecays& decays(int chunk) const {
    return *reinterpret_cast<const ChunkDecays*>(shared + 2 * kStageBytes +
                                                 chunk % 2 * sizeof(ChunkDecays));
  }

  // y = C h^T, turned around.
  __device__ __forceinline__ void outputs_of_state(const StatesTile& C, float (&y)[8][4]) const {
#pragma unroll
    for (int n = 0; n < kStates; n += 16) {
      const Fragment<T> h = as_left<T>(state.h[n / 8], state.h[n / 8 + 1]);
#pragma unroll
      for (int t = 0; t < 64; t += 16) multiply(y[t / 8], y[t / 8 + 1], h, C.right(t, n));
    }
  }

  // Fills in this warp's five half squares of the chunk's matrix, of which two are on the diagonal.
  __device__ __forceinline__ static void fill_matrix(const Matrix& matrix, const ChunkDecays& own,
                                                     const Vec<float, 4> (&products)[5]) {
    const int warp = threadIdx.x / 32, row = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int index = warp * 3 + i, square = index < 2 ? 1 : index < 6 ? 2 : 3;
      const int s = (index - square * (square - 1)) * 8, t = square * 16 + row;
      const float2 dt = *reinterpret_cast<const float2*>(own.dt + s + pair);
      float2 upto = *reinterpret_cast<const float2*>(own.upto + index * 8 + pair);
      upto = make_float2(upto.x * dt.x, upto.y * dt.y);
      const float low = own.since[t], high = own.since[t + 8];
      const float(&four)[4] = products[i].data;
      matrix.put_pair(t, s + pair, four[0] * (low * upto.x), four[1] * (low * upto.y));
      matrix.put_pair(t + 8, s + pair, four[2] * (high * upto.x), four[3] * (high * upto.y));
    }
    const int begin = warp * 16;
    const float low = own.log[begin + row], high = own.log[begin + row + 8];
    const auto weighted = [&](float product, float log, float from, float dt) {
      return product * (exp2_fast(log - from) * dt);
    };
    const bool first = pair <= row, second = pair < row;
    float2 from = *reinterpret_cast<const float2*>(own.log + begin + pair);
    float2 dt = *reinterpret_cast<const float2*>(own.dt + begin + pair);
    const float(&left)[4] = products[3].data;
    matrix.put_pair(begin + row, begin + pair, first ? weighted(left[0], low, from.x, dt.x) : 0.f,
                    second ? weighted(left[1], low, from.y, dt.y) : 0.f);
    matrix.put_pair(begin + row + 8, begin + pair, weighted(left[2], high, from.x, dt.x),
                    weighted(left[3], high, from.y, dt.y));
    from = *reinterpret_cast<const float2*>(own.log + begin + 8 + pair);
    dt = *reinterpret_cast<const float2*>(own.dt + begin + 8 + pair);
    const float(&right)[4] = products[4].data;
    matrix.put_pair(begin + row, begin + 8 + pair, 0.f, 0.f);
    matrix.put_pair(begin + row + 8, begin + 8 + pair,
                    first ? weighted(right[2], high, from.x, dt.x) : 0.f,
                    second ? weighted(right[3], high, from.y, dt.y) : 0.f);
  }

  // y = grown o y + M x + D x, and moves the state on if `advances`.
  __device__ __forceinline__ void finish(const XTile& x, const StatesTile& B, const Matrix& matrix,
                                         const ChunkDecays& own, bool advances, float (&y)[8][4]) {
    const int warp = threadIdx.x / 32, pair = threadIdx.x % 4 * 2;
    float D[2] = {};
    if constexpr (kOutputs) {
      D[0] = skip[warp * 16 + threadIdx.x % 32 / 4];
      D[1] = skip[warp * 16 + threadIdx.x % 32 / 4 + 8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 grown = *reinterpret_cast<const float2*>(own.grown + i * 8 + pair);
#pragma unroll
        for (int e = 0; e < 4; ++e) y[i][e] *= e % 2 == 0 ? grown.x : grown.y;
      }
    }
    state.scale(own.whole);
#pragma unroll
    for (int s = 0; s < 64; s += 16) {
      const Fragment<T> turned = x.left_turned(s, warp * 16);
      if constexpr (kOutputs) {
#pragma unroll
        for (int t = s; t < 64; t += 16) {
          multiply(y[t / 8], y[t / 8 + 1], turned, matrix.right(t, s));
        }
        Walk<Tile, true>::add_skip(turned, D, y[s / 8], y[s / 8 + 1]);
      }
      if (!advances) continue;
      const Fragment<T> weighted = scale_columns(turned, own.weight + s);
#pragma unroll
      for (int n = 0; n < kStates; n += 16) {
        multiply(state.h[n / 8], state.h[n / 8 + 1], weighted, B.right_turned(s, n));
      }
    }
  }

  // Gates y of `count` steps from `step` on.
  __device__ __forceinline__ static void gate(float (&y)[8][4], const Rows& z, int64_t batch,
                                              int64_t step, const WarpChannels& own, int count) {
    using Turned = TurnedOutputs<T>;
    const int first = static_cast<int>(threadIdx.x) % 32 / 4;
    const T* const from = static_cast<const T*>(z.data) +
                          z.offset(batch, step + first, own.head, own.channel + Turned::channel(0));
    Turned gate[8] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (first + i * 8 < count) {
        gate[i].pieces[0] = *reinterpret_cast<const uint2*>(from + i * 8 * z.strides[1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float by[4];
      gate[i].get(by);
#pragma unroll
      for (int e = 0; e < 4; ++e) y[i][e] = gated_output<T>(y[i][e], by[e]);
    }
  }

  // Stores y of `count` steps; `to` is the lane's place.
  __device__ __forceinline__ static void store(const float (&y)[8][4], T* to, int64_t row,
                                               int count) {
    const int left = count - static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      TurnedOutputs<T> turned;
      turned.set(y[i]);
      if (i * 8 < left) *reinterpret_cast<uint2*>(to) = turned.pieces[0];
      to += 8 * row;
    }
  }

  // Loads the state before the walk; returns false where it is 0.
  __device__ __forceinline__ bool load_state(const WarpChannels& own) {
    state.clear();
    if constexpr (kOutputs) {
      const bool given = a.in.initial_state.data != nullptr;
      if (given) state.load(a.in, a.in.initial_state, place.segment.sequence, own);
      if (place.segment.opens) return given;
      for (int64_t slot = a.walks.first_slot(place.segment.sequence); slot < place.slot; ++slot) {
        const int64_t walk = slot * a.in.heads + place.head;
        state.join(a.walk_states + ((walk * a.slices.count + place.slice) * 4 + threadIdx.x / 32) *
                                       WarpState<T, kStates>::kFloats,
                   a.walk_decays[walk]);
      }
      return true;
    }
    return false;
  }

  __device__ __forceinline__ void run() {
    const Inputs& in = a.in;
    const Segment& segment = place.segment;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int group = in.group(place.head), channel = place.slice * 64;
    const WarpChannels own{place.head, channel + warp * 16};
    const int chunk_steps = static_cast<int>(a.chunks.steps);
    const int length = static_cast<int>(segment.last - segment.first);
    const int chunks = (length + chunk_steps - 1) / chunk_steps;
    const bool last_state = !kOutputs || (a.final_state.data != nullptr && segment.closes);
    const int64_t slot =
        a.chunks.first_slot(segment.sequence) + (segment.first - segment.begin) / chunk_steps;

    const uint32_t base = shared_address(shared);
    constexpr int kStatesRow = kStates / 8;
    const uint32_t x_to = threadIdx.x / 8 * XTile::kPitch + threadIdx.x % 8 * 16;
    const uint32_t B_to = XTile::kBytes + threadIdx.x / kStatesRow * StatesTile::kPitch +
                          threadIdx.x % kStatesRow * 16;
    const Matrix matrix{base + kStageBytes};
    const StatesTile C{base + kStageBytes + XTile::kBytes};
    static_assert(Matrix::kBytes == XTile::kBytes);

    const int64_t batch = segment.batch, step = segment.first;
    ChunkRows<T, 64> x_from(in.x, batch, step, place.head, channel, 64, threadIdx.x);
    ChunkRows<T, kStates> B_from(in.B, batch, step, group, 0, in.states, threadIdx.x);
    ChunkRows<T, kStates> C_from(in.C, batch, step, group, 0, in.states, threadIdx.x);
    const char* decays_from =
        reinterpret_cast<const char*>(static_cast<const ChunkDecays*>(a.decays) + slot * in.heads +
                                      place.head) +
        threadIdx.x * 16;
    const float* products_from =
        a.products + ((slot * in.groups + group) * kHalves + warp * 3) * 128 + lane * 4;
    const auto count = [&](int chunk) { return min(length - chunk * chunk_steps, chunk_steps); };
    const auto copy_inputs = [&](int chunk) {
      const uint32_t to = base + (kOutputs ? 0 : chunk % 2 * kStageBytes);
      copy_rows<64>(to + x_to, x_from.at, x_from.row_bytes, count(chunk), true, threadIdx.x);
      copy_rows<kStates>(to + B_to, B_from.at, B_from.row_bytes, count(chunk), B_from.wanted,
                         threadIdx.x);
      x_from.at += chunk_steps * x_from.row_bytes;
      B_from.at += chunk_steps * B_from.row_bytes;
      copies_commit();
    };
    const auto copy_ahead = [&](int chunk) {
      if (kOutputs) {
        copy_rows<kStates>(base + kStageBytes + B_to, C_from.at, C_from.row_bytes, count(chunk),
                           C_from.wanted, threadIdx.x);
        C_from.at += chunk_steps * C_from.row_bytes;
      }
      if (threadIdx.x < sizeof(ChunkDecays) / 16) {
        copy_16_bytes(base + 2 * kStageBytes + chunk % 2 * sizeof(ChunkDecays) + threadIdx.x * 16,
                      decays_from, true);
      }
      decays_from += in.heads * sizeof(ChunkDecays);
      copies_commit();
    };

    // States that do not exist are zeros, which no copy overwrites.
    if (in.states < kStates) {
      for (int stage = 0; stage < 2; ++stage) {
        if (B_from.wanted) continue;
#pragma unroll 1
        for (int row = threadIdx.x / kStatesRow; row < 64; row += 128 / kStatesRow) {
          store_shared(base + stage * kStageBytes + XTile::kBytes + row * StatesTile::kPitch +
                           threadIdx.x % kStatesRow * 16,
                       make_uint4(0, 0, 0, 0));
        }
      }
    }
    if (chunks > 0) {
      copy_ahead(0);
      if (!kOutputs) copy_inputs(0);
    }
    T* y_at = nullptr;
    int64_t y_row = 0;
    if constexpr (kOutputs) {
      if (threadIdx.x < 64) {
        skip[threadIdx.x] = number_of_head<T>(in.D, place.head, channel + threadIdx.x);
      }
      const int at = own.channel + TurnedOutputs<T>::channel(0);
      y_row = a.y.strides[1];
      y_at = static_cast<T*>(a.y.data) + a.y.offset(batch, step, place.head, at) + lane / 4 * y_row;
    }
    bool is_zero = !load_state(own);
    float decay = 1.f;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      copies_wait<0>();
      __syncthreads();
      float y[8][4] = {};
      if constexpr (kOutputs) {
        copy_inputs(chunk);
        Vec<float, 4> products[5];
#pragma unroll
        for (int i = 0; i < 3; ++i) products[i] = load<4>(products_from + i * 128);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          products[3 + i] = load<4>(products_from + (kHalvesBelow - warp + i) * 128);
        }
        products_from += in.groups * (kHalves * 128);
        if (!is_zero) outputs_of_state(C, y);
        fill_matrix(matrix, decays(chunk), products);
        copies_wait<0>();
        __syncthreads();
      }
      if (chunk + 1 < chunks) {
        copy_ahead(chunk + 1);
        if (!kOutputs) copy_inputs(chunk + 1);
      }
      const uint32_t stage = base + (kOutputs ? 0 : chunk % 2 * kStageBytes);
      finish({stage}, {stage + XTile::kBytes}, matrix, decays(chunk),
             last_state || chunk + 1 < chunks, y);
      if constexpr (kOutputs) {
        if (in.z.data != nullptr) {
          gate(y, in.z, batch, step + chunk * chunk_steps, own, count(chunk));
        }
        store(y, y_at, y_row, count(chunk));
        y_at += chunk_steps * y_row;
      } else {
        decay *= decays(chunk).whole;
      }
      is_zero = false;
    }
    if constexpr (kOutputs) {
      if (last_state) state.store(in, a.final_state, segment.sequence, own);
    } else {
      const int64_t walk = place.slot * in.heads + place.head;
      state.keep(a.walk_states + ((walk * a.slices.count + place.slice) * 4 + warp) *
                                     WarpState<T, kStates>::kFloats);
      if (threadIdx.x == 0 && place.slice == 0) a.walk_decays[walk] = decay;
    }
  }
};

template <class Tile, bool kOutputs>
__global__ void __launch_bounds__(128, 3) walk_vectors(const __grid_constant__ ForwardArguments a) {
  if constexpr (kTakesVectors<typename Tile::T>) {
    extern __shared__ __align__(16) char shared[];
    const WalkPlace& place = WalkPlace::of_block<typename Tile::T>(a, block_index());
    if (!place.segment.exists || (!kOutputs && place.segment.closes)) return;
    __shared__ float skip[64];
    VectorWalk<Tile, kOutputs>{a, place, shared, skip}.run();
  }
}

}  // namespace fk::cuda::ssd
