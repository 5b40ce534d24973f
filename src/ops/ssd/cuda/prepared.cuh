// This is what the kernels for whole vectors, forward and backward, find prepared for each chunk by
// a launch of its own: C B^T, which the heads of a group share, and the decays of each head. And
// how they copy a chunk's rows to shared memory.
#pragma once

#include "cuda/row_partition.cuh"
#include "ops/ssd/cuda/chunk_products.cuh"

namespace fk::cuda::ssd {

// Tells whether this architecture has the kernels for whole vectors: from sm_80 on, where copies
// run in the background.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
template <class T>
constexpr bool kTakesVectors = false;
#else
template <class T>
constexpr bool kTakesVectors = true;
#endif

struct PrepareArguments {
  Inputs in;
  Segments chunks;
  int64_t product_blocks;  // the first blocks of the launch
  float* products;         // kHalves half squares for each chunk and group
  void* decays;            // ChunkDecays for each chunk and head
};

// The decays of a chunk's 64 steps in one head, as the walks multiply with them. Squares of 16 x 16
// steps on the diagonal of the chunk's matrix take 2^(log[t] - log[s]) dt[s]. The others take
// since[t] times upto of s times dt[s], products of what decays up to the first step of t's square
// and since it.
struct alignas(16) ChunkDecays {
  float log[64];     // logarithm of the decay since the first step of a step's square
  float since[64];   // the decay itself
  float dt[64];      // 0 behind the last step
  float grown[64];   // the decay since the chunk's begin
  float weight[64];  // what a step's input counts in the state at the chunk's end
  float tail[64];    // the decay from a step to the chunk's end
  float upto[96];    // for each half square below the diagonal, row by row, of its 8 steps s: the
                     // decay from s to the first step of t's square
  float whole;       // the decay of the whole chunk
  float unused[3];
};
constexpr int kHalvesBelow = 12, kHalves = 20;  // half squares of the matrix: below and in all
static_assert(sizeof(ChunkDecays) == 1936);

// The place of a half square, 16 steps t by 8 steps s, among those of a chunk: the ones below the
// diagonal come first, row by row.
__device__ __forceinline__ int half_square(int row, int column, int half) {
  return column < row ? row * (row - 1) + 2 * column + half : kHalvesBelow + 2 * row + half;
}

// A step's log decay is kept within this: its exponential is 0 or infinite in float already, and
// what is left of a float that holds a sum with such steps still tells the steps behind them apart.
constexpr double kMostLogDecayOfFloats = 110;

// Fills in the decays of a chunk; one warp calls it.
template <class T>
__device__ __forceinline__ void prepare_decays(const Inputs& in, const RawSteps<T, 64>& steps,
                                               int count, float A, float bias, ChunkDecays* out) {
  const int lane = threadIdx.x % 32, first = 2 * lane;
  float dt[2];
  double sums[2], sum = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool exists = first + i < count;
    dt[i] = exists ? TimeStep(in, steps.raw[i], bias).dt : 0.f;
    if (exists) sum += within(static_cast<double>(dt[i]) * A, kMostLogDecayOfFloats);
    sums[i] = sum;
  }
  double before = sum;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const double other = __shfl_up_sync(0xffffffffu, before, distance);
    if (lane >= distance) before += other;
  }
  const double last = __shfl_sync(0xffffffffu, before, 31) * kLog2EInDouble;
  before = __shfl_up_sync(0xffffffffu, before, 1);
  if (lane == 0) before = 0;
  double exponents[2], begins[4];
#pragma unroll
  for (int i = 0; i < 2; ++i) exponents[i] = (before + sums[i]) * kLog2EInDouble;
#pragma unroll
  for (int row = 0; row < 4; ++row) begins[row] = __shfl_sync(0xffffffffu, exponents[0], 8 * row);
  const double begin = __shfl_sync(0xffffffffu, exponents[0], lane & 24);
  const auto put = [&](float* to, const float(&both)[2]) {
    *reinterpret_cast<float2*>(to + first) = make_float2(both[0], both[1]);
  };
  float log[2], since[2], grown[2], weight[2], tail[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    log[i] = static_cast<float>(exponents[i] - begin);
    since[i] = exp2_fast(log[i]);
    grown[i] = exp2_fast(static_cast<float>(exponents[i]));
    tail[i] = exp2_fast(static_cast<float>(last - exponents[i]));
    weight[i] = first + i < count ? tail[i] * dt[i] : 0.f;
  }
  put(out->log, log);
  put(out->since, since);
  put(out->dt, dt);
  put(out->grown, grown);
  put(out->weight, weight);
  put(out->tail, tail);
#pragma unroll
  for (int row = 1; row < 4; ++row) {
    if (first >= 16 * row) continue;
    float upto[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      upto[i] = exp2_fast(static_cast<float>(begins[row] - exponents[i]));
    }
    put(out->upto + 8 * row * (row - 1), upto);
  }
  if (lane == 0) out->whole = exp2_fast(static_cast<float>(last));
}

// Multiplies C B^T of a chunk for all heads of a group, and keeps it in half squares.
template <class Tile>
__device__ __forceinline__ void multiply_halves(const PrepareArguments& a, uint32_t shared) {
  using T = typename Tile::T;
  using StatesTile = typename Tile::StatesTile;
  const StatesTile B{shared}, C{shared + StatesTile::kBytes};
  if (!load_shared_operands<T>(a.in, a.chunks, B, C)) return;
  float* const halves = a.products + block_index() * kHalves * 128 + threadIdx.x % 32 * 4;
#pragma unroll 1
  for (int i = threadIdx.x / 32; i < kTriangleTiles<64>; i += blockDim.x / 32) {
    const TriangleTile tile(i);
    TileSums products;
    products.template multiply_rows<T, Tile::kStates>(C, B, tile);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Vec<float, 4> four;
#pragma unroll
      for (int e = 0; e < 4; ++e) four.data[e] = products.sums[half][e];
      store(halves + half_square(tile.row, tile.column, half) * 128, four);
    }
  }
}

constexpr int kPreparedHeads = 8;  // of one block of four warps

template <class Tile>
__global__ void __launch_bounds__(128) prepare_chunks(const __grid_constant__ PrepareArguments a) {
  if constexpr (kTakesVectors<typename Tile::T>) {
    using T = typename Tile::T;
    extern __shared__ __align__(16) char shared[];
    if (block_index() < a.product_blocks) {
      multiply_halves<Tile>(a, shared_address(shared));
      return;
    }
    const int64_t block = block_index() - a.product_blocks;
    const int parts = (a.in.heads + kPreparedHeads - 1) / kPreparedHeads;
    const int64_t slot = divide_likely_small(block, parts);
    if (slot >= a.chunks.slots) return;
    const Segment chunk = a.chunks[slot];
    if (!chunk.exists) return;
    const int count = static_cast<int>(chunk.last - chunk.first);
    const int first = static_cast<int>(block - slot * parts) * kPreparedHeads;
    constexpr int kEach = kPreparedHeads / 4;
    RawSteps<T, 64> steps[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int head = first + threadIdx.x / 32 * kEach + i;
      if (head < a.in.heads) steps[i].load(a.in, chunk.batch, chunk.first, count, head);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int head = first + threadIdx.x / 32 * kEach + i;
      if (head >= a.in.heads) return;
      prepare_decays<T>(a.in, steps[i], count, a.in.A[head * a.in.A_head],
                        number_of_head<T>(a.in.dt_bias, head),
                        static_cast<ChunkDecays*>(a.decays) + slot * a.in.heads + head);
    }
  }
}

// Copies the first `count` rows of kColumns elements of a chunk, and zeros behind them. `from` and
// `to` are the places of the thread's first vector; threads count from 0 to 127. Vectors of columns
// that do not exist (`wanted` is false) are left alone.
template <int kColumns>
__device__ __forceinline__ void copy_rows(uint32_t to, const char* from, int64_t row_bytes,
                                          int count, bool wanted, int thread) {
  constexpr int kRow = kColumns / 8, kStep = 128 / kRow, kCount = 64 / kStep;
  constexpr int kPitch = kColumns * 2 + 16;
  if (!wanted) return;
  if (count == 64) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      copy_16_bytes(to + i * kStep * kPitch, from, true);
      from += kStep * row_bytes;
    }
    return;
  }
  int row = thread / kRow;
  const char* const first = from - row * row_bytes;
#pragma unroll 1
  for (int i = 0; i < kCount; ++i, row += kStep, to += kStep * kPitch) {
    copy_16_bytes(to, row < count ? first + row * row_bytes : first, row < count);
  }
}

// Returns where a thread's first vector of a chunk lies in global memory, and whether it exists.
template <class T, int kColumns>
struct ChunkRows {
  const char* at;
  int64_t row_bytes;
  bool wanted;

  __device__ __forceinline__ ChunkRows(const Rows& t, int64_t batch, int64_t step, int i,
                                       int column, int columns, int thread) {
    const int row = thread / (kColumns / 8), own = thread % (kColumns / 8) * 8;
    wanted = own < columns;
    row_bytes = t.strides[1] * static_cast<int64_t>(sizeof(T));
    at = static_cast<const char*>(t.data) +
         t.offset(batch, step, i, column + own) * static_cast<int64_t>(sizeof(T)) + row * row_bytes;
  }
};

}  // namespace fk::cuda::ssd
