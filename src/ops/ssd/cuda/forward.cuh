// ssd's forward on tensor cores (mma.sync). A block takes up to 64 channels of a head and walks
// through a sequence, or a part of one, chunk by chunk; its states stay in registers:
//
//   y = M x + grown o (C h^T),  M = C B^T o decays o dt,  then  h = decay h + (weight x)^T B.
//
// All three products are made turned around, with channels as rows: a warp has 16 channels, and the
// states that it has as sums of the last product are the left operand of h C^T as they stand; x^T,
// loaded once, is the left operand of the other two. So states never leave the registers, and only
// M, which all warps need, passes through shared memory.
//
// Floor for each token, with chunks of Q steps: H (Q P + 4 P N) + G Q N operations, where masked
// halves count as nothing. Tiles of 16 x 16 on M's diagonal are multiplied whole, 5/8 of the square
// at Q = 64. Heads that share B and C share their products C B^T too, by a launch of their own that
// leaves them in workspace (chunk_products.cuh). Bytes: x, B, C, dt, z and y once; a state moves
// only where a sequence begins, ends or is cut. Where there are fewer blocks than multiprocessors,
// long sequences are cut into walks: the first launch finds what each walk makes of a state of 0,
// for 2 P N operations more, and the second joins these at its begin.
#pragma once

#include "cuda/row_partition.cuh"
#include "ops/ssd/cuda/chunk_products.cuh"
#include "ops/ssd/cuda/forward_outputs.cuh"
#include "ops/ssd/cuda/states.cuh"

namespace fk::cuda::ssd {

// Chunks have 64 steps where the tiles of two leave room for a second block, as 227 KB do.
template <class T_, int kStates_>
struct WalkTile {
  using T = T_;
  static constexpr int kStates = kStates_;
  static constexpr int kSteps = sizeof(T) == 4 || kStates == 256 ? 32 : 64;
  static constexpr int kChannels = 64, kMostWarps = kChannels / 16;
  using XTile = Tile<T, kSteps, kChannels>;
  using StatesTile = Tile<T, kSteps, kStates>;
  using Matrix = Tile<T, kSteps, kSteps>;
  // A stage has x, B and C; the chunk's matrix lies behind all stages.
  static constexpr int kStageBytes = XTile::kBytes + 2 * StatesTile::kBytes;
  static constexpr int shared_bytes(int stages) { return stages * kStageBytes + Matrix::kBytes; }
};

// This is where a block works: a slice of a head's channels in the steps of a walk. It lies in
// shared memory, since registers are short.
struct WalkPlace {
  Segment segment;
  int64_t slot;
  int head, slice;
  float A, bias;  // the head's

  // Returns the place of a block; all threads call it.
  template <class T>
  __device__ __forceinline__ static const WalkPlace& of_block(const ForwardArguments& a,
                                                              int64_t block) {
    __shared__ WalkPlace place;
    if (threadIdx.x == 0) {
      const int64_t row = divide_likely_small(block, a.slices.count);
      place.slice = static_cast<int>(block - row * a.slices.count);
      place.slot = divide_likely_small(row, a.in.heads);
      place.head = static_cast<int>(row - place.slot * a.in.heads);
      place.A = a.in.A[place.head * a.in.A_head];
      place.bias = number_of_head<T>(a.in.dt_bias, place.head);
      place.segment.exists = false;
      if (place.slot < a.walks.slots) place.segment = a.walks[place.slot];
    }
    __syncthreads();
    return place;
  }
};

// A walk of one block, with outputs or without.
template <class Tile, bool kOutputs>
struct Walk {
  using T = typename Tile::T;
  static constexpr int kSteps = Tile::kSteps, kStates = Tile::kStates;

  const ForwardArguments& a;
  const WalkPlace& place;
  uint32_t shared;
  StepDecays<kSteps>* decays;  // two, which take turns

  int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int group = a.in.group(place.head);
  int first_channel = place.slice * a.slices.warps * 16;
  int chunk_steps = static_cast<int>(a.chunks.steps);
  int chunks =
      static_cast<int>(ceil_div(place.segment.last - place.segment.first, int64_t{chunk_steps}));
  WarpState<T, kStates> state;

  __device__ __forceinline__ int64_t begin(int chunk) const {
    return place.segment.first + int64_t{chunk} * chunk_steps;
  }
  __device__ __forceinline__ int count(int chunk) const {
    const int64_t left = place.segment.last - begin(chunk);
    return left < chunk_steps ? static_cast<int>(left) : chunk_steps;
  }
  // Floats are split on their way to shared memory, which takes threads.
  __device__ __forceinline__ bool copies_ahead() const { return kParts<T> == 1 && a.stages == 2; }
  __device__ __forceinline__ uint32_t stage(int chunk) const {
    return shared + (copies_ahead() ? chunk % 2 : 0) * Tile::kStageBytes;
  }
  __device__ __forceinline__ typename Tile::XTile x(int chunk) const { return {stage(chunk)}; }
  __device__ __forceinline__ typename Tile::StatesTile B(int chunk) const {
    return {stage(chunk) + Tile::XTile::kBytes};
  }
  __device__ __forceinline__ typename Tile::StatesTile C(int chunk) const {
    return {stage(chunk) + Tile::XTile::kBytes + Tile::StatesTile::kBytes};
  }
  __device__ __forceinline__ typename Tile::Matrix matrix() const {
    return {shared + a.stages * Tile::kStageBytes};
  }
  __device__ __forceinline__ WarpChannels channels() const {
    return {place.head, first_channel + warp * 16};
  }
  __device__ __forceinline__ int64_t walk_at(int64_t slot) const {
    return slot * a.in.heads + place.head;
  }
  __device__ __forceinline__ float* walk_state(int64_t slot) const {
    const int64_t warps_before =
        (walk_at(slot) * a.slices.count + place.slice) * a.slices.warps + warp;
    return a.walk_states + warps_before * WarpState<T, kStates>::kFloats;
  }

  // Starts to copy a chunk's tiles.
  __device__ __forceinline__ void copy(int chunk) const {
    const Inputs& in = a.in;
    const int64_t batch = place.segment.batch, step = begin(chunk);
    const int rows = count(chunk), end = first_channel + warps * 16;
    x(chunk).load(RowsFrom<T>(in.x, batch, step, place.head, first_channel,
                              end < in.channels ? end : in.channels),
                  rows, threadIdx.x, blockDim.x);
    B(chunk).load(RowsFrom<T>(in.B, batch, step, group, 0, in.states), rows, threadIdx.x,
                  blockDim.x);
    if (kOutputs) {
      C(chunk).load(RowsFrom<T>(in.C, batch, step, group, 0, in.states), rows, threadIdx.x,
                    blockDim.x);
    }
    copies_commit();
  }

  // Loads the state before the walk, with outputs; returns false where it is 0.
  __device__ __forceinline__ bool load_state() {
    state.clear();
    if constexpr (kOutputs) {
      const bool given = a.in.initial_state.data != nullptr;
      if (given) state.load(a.in, a.in.initial_state, place.segment.sequence, channels());
      if (place.segment.opens) return given;
      for (int64_t slot = a.walks.first_slot(place.segment.sequence); slot < place.slot; ++slot) {
        state.join(walk_state(slot), a.walk_decays[walk_at(slot)]);
      }
      return true;
    }
    return false;
  }

  // Fills in the chunk's matrix, whose tiles the warps share.
  __device__ __forceinline__ void fill_matrix(int chunk) const {
    const float* triangle = nullptr;
    if (a.products != nullptr) {
      const Segment& s = place.segment;
      const int64_t slot = a.chunks.first_slot(s.sequence) + (s.first - s.begin) / chunk_steps;
      triangle = a.products + ((slot + chunk) * a.in.groups + group) * kTriangleFloats<kSteps>;
    }
#pragma unroll 1
    for (int i = warp; i < kTriangleTiles<kSteps>; i += warps) {
      const TriangleTile tile(i);
      TileSums products;
      if (triangle != nullptr) {
        products.load_kept(triangle, i);
      } else {
        products.template multiply_rows<T, kStates>(C(chunk), B(chunk), tile);
      }
      products.template put_matrix<T>(matrix(), decays[chunk % 2], tile);
    }
  }

  // y = grown o (C h^T), turned around.
  __device__ __forceinline__ void outputs_of_state(int chunk, float (&y)[kSteps / 8][4]) const {
#pragma unroll
    for (int n = 0; n < kStates; n += 16) {
      if (kHoldsLoads<T, kStates>) __syncwarp();
      const Fragment<T> h = as_left<T>(state.h[n / 8], state.h[n / 8 + 1]);
#pragma unroll
      for (int t = 0; t < kSteps; t += 16) {
        multiply(y[t / 8], y[t / 8 + 1], h, C(chunk).right(t, n));
      }
    }
#pragma unroll
    for (int i = 0; i < kSteps / 8; ++i) {
      const float* const grown = decays[chunk % 2].grown + i * 8 + threadIdx.x % 4 * 2;
#pragma unroll
      for (int e = 0; e < 4; ++e) y[i][e] *= grown[e % 2];
    }
  }

  // y += M x + D x, and moves the state on where somebody asks for it.
  __device__ __forceinline__ void finish(int chunk, bool advances, float (&y)[kSteps / 8][4]) {
    const StepDecays<kSteps>& own = decays[chunk % 2];
    float D[2] = {};
    if (kOutputs) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int c = channels().channel + threadIdx.x % 32 / 4 + r * 8;
        if (c < a.in.channels) D[r] = number_of_head<T>(a.in.D, place.head, c);
      }
    }
    if (advances) state.scale(own.whole);
#pragma unroll(kOutputs ? kSteps / 16 : 1)
    for (int s = 0; s < kSteps; s += 16) {
      if (kHoldsLoads<T, kStates>) __syncwarp();
      const Fragment<T> turned = x(chunk).left_turned(s, warp * 16);
      if (kOutputs) {
#pragma unroll
        for (int t = s; t < kSteps; t += 16) {
          multiply(y[t / 8], y[t / 8 + 1], turned, matrix().right(t, s));
        }
        add_skip(turned, D, y[s / 8], y[s / 8 + 1]);
      }
      if (advances) state.add(s, turned, B(chunk), own);
    }
  }

  // Adds D x of 16 steps.
  __device__ __forceinline__ static void add_skip(const Fragment<T>& turned, const float (&D)[2],
                                                  float (&first)[4], float (&second)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t words[kParts<T>];
#pragma unroll
      for (int part = 0; part < kParts<T>; ++part) words[part] = turned.words[part][i];
      const float2 pair = join_pair<T>(words);
      float(&y)[4] = i < 2 ? first : second;
      y[i % 2 * 2] = fmaf(D[i % 2], pair.x, y[i % 2 * 2]);
      y[i % 2 * 2 + 1] = fmaf(D[i % 2], pair.y, y[i % 2 * 2 + 1]);
    }
  }

  __device__ __forceinline__ void run() {
    const bool fills = warp == warps - 1;  // this warp fills in decays
    const bool last_state = kOutputs ? a.final_state.data != nullptr && place.segment.closes : true;
    RawSteps<T, kSteps> steps;
    const auto fetch = [&](int chunk) {
      copy(chunk);
      if (fills) steps.load(a.in, place.segment.batch, begin(chunk), count(chunk), place.head);
    };
    if (chunks > 0) fetch(0);
    bool is_zero = !load_state();
    float decay = 1.f;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      if (fills) decays[chunk % 2].fill(a.in, steps, count(chunk), place.A, place.bias);
      copies_wait<0>();
      __syncthreads();  // the chunk is there for all, and the one before read by all
      if (copies_ahead() && chunk + 1 < chunks) fetch(chunk + 1);
      const bool advances = last_state || chunk + 1 < chunks;
      float y[kSteps / 8][4] = {};
      if (kOutputs) {
        fill_matrix(chunk);
        if (!is_zero) outputs_of_state(chunk, y);
        __syncthreads();
      }
      finish(chunk, advances, y);
      if (kOutputs) {
        store_outputs<T, kSteps>(a, y, place.segment.batch, begin(chunk), count(chunk), place.head,
                                 channels().channel);
      }
      decay *= decays[chunk % 2].whole;
      is_zero = false;
      if (!copies_ahead() && chunk + 1 < chunks) {
        __syncthreads();
        fetch(chunk + 1);
      }
    }
    if (!kOutputs) {
      state.keep(walk_state(place.slot));
      if (threadIdx.x == 0 && place.slice == 0) a.walk_decays[walk_at(place.slot)] = decay;
    } else if (last_state) {
      state.store(a.in, a.final_state, place.segment.sequence, channels());
    }
  }
};

// Multiplies C B^T of a chunk for all heads of a group, and keeps it.
template <class Tile>
__device__ __forceinline__ void multiply_chunk(const ForwardArguments& a, uint32_t shared) {
  using T = typename Tile::T;
  using StatesTile = typename Tile::StatesTile;
  const StatesTile B{shared}, C{shared + StatesTile::kBytes};
  if (!load_shared_operands<T>(a.in, a.chunks, B, C)) return;
  float* const triangle = a.products + block_index() * kTriangleFloats<Tile::kSteps>;
#pragma unroll 1
  for (int i = threadIdx.x / 32; i < kTriangleTiles<Tile::kSteps>; i += blockDim.x / 32) {
    TileSums products;
    products.template multiply_rows<T, Tile::kStates>(C, B, TriangleTile(i));
    products.keep(triangle, i);
  }
}

// The launch before: its first blocks multiply C B^T of chunks, the others walk, all walks but the
// last of each sequence, without outputs.
template <class Tile>
__global__ void __launch_bounds__(Tile::kMostWarps * 32, 2)
    prepare_walks(const __grid_constant__ ForwardArguments a) {
  if constexpr (kMultiplies<typename Tile::T>) {
    extern __shared__ __align__(16) char shared[];
    __shared__ StepDecays<Tile::kSteps> decays[2];
    if (block_index() < a.product_blocks) {
      multiply_chunk<Tile>(a, shared_address(shared));
      return;
    }
    const WalkPlace& place =
        WalkPlace::of_block<typename Tile::T>(a, block_index() - a.product_blocks);
    if (!place.segment.exists || place.segment.closes) return;
    Walk<Tile, false>{a, place, shared_address(shared), decays}.run();
  }
}

// For float32 and 128 states the assembler needs all 255 registers, and for sm_90 keeps 52 bytes in
// memory besides; for sm_80 the same instructions fit.
template <class Tile>
__global__ void __launch_bounds__(Tile::kMostWarps * 32, 2)
    walk_chunks(const __grid_constant__ ForwardArguments a) {
  if constexpr (kMultiplies<typename Tile::T>) {
    extern __shared__ __align__(16) char shared[];
    __shared__ StepDecays<Tile::kSteps> decays[2];
    const WalkPlace& place = WalkPlace::of_block<typename Tile::T>(a, block_index());
    if (!place.segment.exists) return;
    Walk<Tile, true>{a, place, shared_address(shared), decays}.run();
  }
}

}  // namespace fk::cuda::ssd
