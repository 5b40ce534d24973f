// What the two sides of Hopper's matrix product (sm90_product.cuh) share: its arguments, its map of
// shared memory, its barriers, and the order of its work.
#pragma once

#include "cuda/activations.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/tile_order.cuh"
#include "cuda/mma.cuh"
#include "cuda/parameter.cuh"
#include "cuda/tma.cuh"
#include "cuda/wgmma.cuh"

namespace fk::cuda_sm90 {

struct ProductArguments {
  CUtensorMap a, b;  // boxes as box_of says
  // The product of a second pair is added to that of the first: K goes on in other tensors behind
  // first_slices of 64. Where there are gates, b and second_b are two weights, of both of which a
  // tile has half of its columns: gates, then what they are multiplied with.
  CUtensorMap second_a, second_b;
  CUtensorMap out, before, before_up, residual;  // boxes of 64 x 64
  bool has_before, has_residual, gated;
  int rows, columns;  // columns: of the product, both of a pair counted
  int slices, first_slices;
  cuda::TileOrder order;
  // K is split into parts of so many slices, whose sums are stored apart (portable_call.cuh adds
  // them up); without partials there is one part.
  int splits, slices_each;
  float* partials;
  int64_t partial_width;
  cuda::Epilogue epilogue;
  // Results that the copy engine does not take, in float or with rows that are not multiples of 16
  // bytes, are stored by the threads: where there is a plain_out, all three are plain.
  cuda::PlainMatrix plain_out, plain_before, plain_residual;

  FK_HOST_DEVICE int items() const { return order.count() * splits; }
};

// What a block does at a time: a tile, and of K the slices [begin, end).
struct ProductItem {
  int row, column, split, begin, end;

  __device__ __forceinline__ ProductItem(const ProductArguments& a, int index) {
    a.order.place(index % a.order.count(), &row, &column);
    split = index / a.order.count();
    begin = split * a.slices_each;
    end = begin + a.slices_each < a.slices ? begin + a.slices_each : a.slices;
  }
  __device__ __forceinline__ int count() const { return end - begin; }
};

constexpr int kPrefetchedSlices = 8;

// A Tile says kColumns, kStages, and for how many times 64 rows of a warpgroup's results there is
// room at once, kRoom.
template <class Tile>
struct ProductPlan {
  static constexpr int kRows = 128, kDepth = 64;  // 64 elements are 128 bytes, the swizzle's row
  static constexpr int kColumns = Tile::kColumns, kStages = Tile::kStages, kRoom = Tile::kRoom;
  static constexpr bool kShared = Tile::kShared;  // by both warpgroups, half of the rows each
  static constexpr int kBlocks = kRows / 64 / (kShared ? 2 : 1);  // of a warpgroup's tile
  static constexpr int kReaders = kShared ? 8 : 4;                // warps that read a stage
  static constexpr int kPieces = kColumns / 64;                   // side by side
  static constexpr bool kOutputAlone = false;  // no parts of K, no gates, no `before`
  static constexpr int kThreads = 384;
  static constexpr int kProducerRegisters = 24, kRegisters = 240;
  static constexpr int kABytes = kRows * 128, kBBytes = kColumns * 128;
  static constexpr int kStageBytes = kABytes + kBBytes;
  static constexpr int kPieceBytes = 64 * 128;
  static constexpr int kPiecesAt = kStages * kStageBytes;
  static constexpr int kBiasAt = kPiecesAt + 2 * kRoom * kPieces * kPieceBytes;
  static constexpr int kBarriersAt = kBiasAt + 2 * kColumns * 4;
  static constexpr int kSharedBytes = kBarriersAt + 256;
  static_assert(kSharedBytes <= 227 * 1024 && kColumns % 64 == 0 && kBlocks * kColumns <= 384);
};

template <class Plan>
struct ProductBarriers {
  uint64_t full[Plan::kStages], empty[Plan::kStages], residual[2][Plan::kRoom];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// A stage of a ring of kCount, and the parity of its barrier.
template <int kCount>
struct Turn {
  int place = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void next() {
    if (++place == kCount) {
      place = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ void skip(int count) {
    const int to = place + count;
    place = to % kCount;
    phase ^= (to / kCount) & 1;
  }
};

#endif

}  // namespace fk::cuda_sm90
