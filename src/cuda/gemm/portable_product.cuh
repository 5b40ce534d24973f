// A matrix product on the tensor cores of any GPU from Turing on, with an epilogue:
// C[m, n] = sum over k of A[m, k] B[n, k].
//
// Floor: 2 M N K operations; A is read once for each column of tiles and B once for each row of
// them. A block has one tile, of which each warp holds its part in registers (mma.sync).
//
// From sm_80 on, copies of the slices ahead (cp.async) run while one is multiplied. Turing has
// none: there the slice ahead waits in registers. Slices are 64 bytes of K (portable_operand.cuh).
//
// float is multiplied as three bfloat16 numbers, x = p0 + p1 + p2, which have all of its bits, in
// the six products of which p0 p0 to p0 p2 and p1 p1 are made; the others are 2^-26 of a term at
// most. Tensor cores cut off the last bits of their sums, so these run over 16 of K only, and are
// added up in float outside. An infinite input gives NaN.
#pragma once

#include "cuda/gemm/portable_epilogue.cuh"
#include "cuda/gemm/portable_operand.cuh"

namespace fk::cuda {

// A tile and what of it a warp has. The large one needs half of the traffic; the small one is for
// results that would be few tiles. kBlocks: so many shall fit on a multiprocessor.
struct LargeTile {
  static constexpr int kRows = 128, kColumns = 128, kWarpRows = 64, kWarpColumns = 32, kBlocks = 1;
};
struct LargeFloatTile {
  static constexpr int kRows = 128, kColumns = 64, kWarpRows = 32, kWarpColumns = 32, kBlocks = 1;
};
struct SmallTile {
  static constexpr int kRows = 64, kColumns = 64, kWarpRows = 32, kWarpColumns = 32, kBlocks = 2;
};

template <class T, class Tile>
struct PortablePlan {
  static constexpr int kDepth = 64 / static_cast<int>(sizeof(T));
  static constexpr int kWarpsAcross = Tile::kColumns / Tile::kWarpColumns;
  static constexpr int kThreads = 32 * (Tile::kRows / Tile::kWarpRows) * kWarpsAcross;
  static constexpr int kABytes = Tile::kRows * 64;
  static constexpr int kStageBytes = kABytes + Tile::kColumns * 64;
  static constexpr int kStagesFrom80 = 4, kStagesBefore = 2;
  using Staged = StagedSums<Tile::kRows, Tile::kColumns>;

  static constexpr int shared_bytes(int code) {
    const int stages = (code >= 80 ? kStagesFrom80 : kStagesBefore) * kStageBytes;
    return stages > Staged::kBytes ? stages : Staged::kBytes;
  }
};
static_assert(PortablePlan<uint16_t, LargeTile>::shared_bytes(75) <= 64 * 1024);

// The right-hand fragments of a warp, 16 kC columns by a slice of K in two halves, which each of
// its rows meets.
template <class T, int kC>
struct RightFragments {
  uint32_t words[2][kC][4];

  __device__ __forceinline__ void prepare() {}
  // sum += x w^T for 16 rows and the first kCount times 8 columns.
  template <int kCount = 2 * kC>
  __device__ __forceinline__ void multiply(float (&sum)[2 * kC][4],
                                           const uint32_t (&x)[2][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        const uint32_t(&w)[4] = words[half][c / 2];
        mma_16816(sum[c], x[half], w[c % 2], w[c % 2 + 2], T());
      }
    }
  }
};

// The parts of two fragments of float, as three fragments of bfloat16. A lane's numbers become
// pairs as they are: which k an element stands for is the same on both sides.
struct FloatParts {
  uint32_t words[3][4];

  __device__ __forceinline__ explicit FloatParts(const uint32_t (&x)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float low = __uint_as_float(x[i / 2][i % 2]), high = __uint_as_float(x[i / 2][i % 2 + 2]);
#pragma unroll
      for (int part = 0; part < 3; ++part) {
        const uint32_t pair = pack_pair<__nv_bfloat16>(low, high);
        words[part][i] = pair;
        low -= __uint_as_float(pair << 16);
        high -= __uint_as_float(pair & 0xffff0000u);
      }
    }
  }
};

template <int kC>
struct RightFragments<float, kC> {
  uint32_t words[2][kC][4];
  uint32_t parts[kC][3][4];

  __device__ __forceinline__ void prepare() {
#pragma unroll
    for (int c = 0; c < kC; ++c) {
      uint32_t both[2][4];
#pragma unroll
      for (int i = 0; i < 8; ++i) both[i / 4][i % 4] = words[i / 4][c][i % 4];
      const FloatParts split(both);
#pragma unroll
      for (int i = 0; i < 12; ++i) parts[c][i / 4][i % 4] = split.words[i / 4][i % 4];
    }
  }
  template <int kCount = 2 * kC>
  __device__ __forceinline__ void multiply(float (&sum)[2 * kC][4],
                                           const uint32_t (&x)[2][4]) const {
    const FloatParts left(x);
    // The small ones have sums of their own, which round less for being small.
    constexpr int kLeft[] = {0, 2, 0, 1, 1, 0}, kRight[] = {0, 0, 2, 1, 0, 1};
    float large[kCount][4] = {}, small[kCount][4] = {};
#pragma unroll
    for (int i = 0; i < 6; ++i) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        const uint32_t(&w)[4] = parts[c / 2][kRight[i]];
        mma_16816(i == 0 ? large[c] : small[c], left.words[kLeft[i]], w[c % 2], w[c % 2 + 2],
                  __nv_bfloat16());
      }
    }
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[c][i] += large[c][i] + small[c][i];
    }
  }
};

template <class T, class Tile, Major kA, Major kB>
__global__ void __launch_bounds__(PortablePlan<T, Tile>::kThreads, Tile::kBlocks)
    portable_product(const __grid_constant__ PortableArguments a) {
#if __CUDA_ARCH__ >= 800
  constexpr bool kRuns = true;
#else
  constexpr bool kRuns = std::is_same_v<T, __half>;  // Turing has no other tensor cores
#endif
  if constexpr (kRuns) {
    using Plan = PortablePlan<T, Tile>;
    using TileA = OperandTile<T, kA, Tile::kRows, Plan::kThreads>;
    using TileB = OperandTile<T, kB, Tile::kColumns, Plan::kThreads>;
    constexpr int kR = Tile::kWarpRows / 16, kC = Tile::kWarpColumns / 16;
    extern __shared__ __align__(128) char shared[];

    int row_tile, column_tile;
    a.order.place(blockIdx.x, &row_tile, &column_tile);
    const int64_t row = int64_t{row_tile} * Tile::kRows;
    const int64_t column = int64_t{column_tile} * Tile::kColumns;
    const int64_t outputs = a.gated ? column / 2 : column;
    // A split has whole slices.
    const int64_t slices = (a.depth + Plan::kDepth - 1) / Plan::kDepth;
    const int64_t each = (slices + a.splits - 1) / a.splits;
    const int64_t first = blockIdx.y * each;
    const int64_t last = first + each < slices ? first + each : slices;
    const int count = static_cast<int>(last > first ? last - first : 0);
    const int64_t begin = first * Plan::kDepth;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_row = warp / Plan::kWarpsAcross * Tile::kWarpRows;
    const int warp_column = warp % Plan::kWarpsAcross * Tile::kWarpColumns;

    TileA left{a.a, {row, a.rows, 0}};
    TileB right{a.b, {outputs, a.columns, a.gated ? a.columns : 0}};
    left.begin(begin, a.depth);
    right.begin(begin, a.depth);
    float sums[kR][2 * kC][4] = {};
    const auto stage = [&](int i, int stages) { return shared + i % stages * Plan::kStageBytes; };
    const auto multiply = [&](const char* from) {
      RightFragments<T, kC> w;
#pragma unroll
      for (int c = 0; c < 2 * kC; ++c) {
        TileB::load_fragment(w.words[c % 2][c / 2], from + Plan::kABytes,
                             warp_column + 16 * (c / 2), c % 2 * (Plan::kDepth / 2));
      }
      w.prepare();
#pragma unroll
      for (int r = 0; r < kR; ++r) {
        uint32_t x[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          TileA::load_fragment(x[half], from, warp_row + 16 * r, half * (Plan::kDepth / 2));
        }
        w.multiply(sums[r], x);
      }
    };

#if __CUDA_ARCH__ >= 800
    constexpr int kStages = Plan::kStagesFrom80;
    const auto copy = [&](int i) {
      if (i < count) {
        const int64_t k = begin + int64_t{i} * Plan::kDepth;
        left.copy(stage(i, kStages), k, a.depth);
        right.copy(stage(i, kStages) + Plan::kABytes, k, a.depth);
      }
      copies_commit();
    };
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) copy(i);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      copies_wait<kStages - 2>();
      __syncthreads();  // the slice is there for all, and that before it read by all
      copy(i + kStages - 1);
      multiply(stage(i, kStages));
    }
    copies_wait<0>();
#else
    constexpr int kStages = Plan::kStagesBefore;
    uint4 x[TileA::kChunksEach], w[TileB::kChunksEach];
    const auto fetch = [&](int i) {
      const int64_t k = begin + int64_t{i} * Plan::kDepth;
      left.fetch(x, k, a.depth);
      right.fetch(w, k, a.depth);
    };
    const auto put = [&](int i) {
      const int64_t k = begin + int64_t{i} * Plan::kDepth;
      left.put(stage(i, kStages), x, k, a.depth);
      right.put(stage(i, kStages) + Plan::kABytes, w, k, a.depth);
    };
    if (count > 0) {
      fetch(0);
      put(0);
    }
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      __syncthreads();
      if (i + 1 < count) fetch(i + 1);
      multiply(stage(i, kStages));
      if (i + 1 < count) put(i + 1);
    }
#endif

    const typename Plan::Staged staged{reinterpret_cast<float*>(shared)};
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kR * 2 * kC * 2; ++i) {
      const int r = i / (4 * kC), c = i / 2 % (2 * kC), half = i % 2;
      const float* const to =
          staged.at(warp_row + 16 * r + 8 * half + lane / 4, warp_column + 8 * c + 2 * (lane % 4));
      // As one instruction, of which the compiler would make two here and there.
      store_shared(shared_address(to), sums[r][c][2 * half], sums[r][c][2 * half + 1]);
    }
    __syncthreads();
    staged.template finish<T, Plan::kThreads>(a, row, column);
  }
}

}  // namespace fk::cuda
