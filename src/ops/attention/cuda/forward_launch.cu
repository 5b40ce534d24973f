// This file lists the forward's tiles, and the kernels that are made of them.
#include "ops/attention/cuda/forward_launch.h"
#include "ops/attention/cuda/plan.h"

namespace fk::cuda::attention {

template <class Tile>
Status launch_forward_tile(Forward p, const DeviceProperties& properties, cudaStream_t stream) {
  p.tiles = static_cast<int>(tile_count(p.problem, p.problem.q_len, Tile::kRows));
  p.together = heads_together(p.problem, p.tiles, p.problem.heads,
                              properties.multiprocessors * Tile::kBlocks);
  return launch_tile<Tile>(forward<Tile>, "attention forward",
                           tile_grid(p.problem, p.tiles, p.problem.heads), p, stream);
}

// Large tiles are for sm_80 and later. Two row tiles a warp halve the reads of k and v from shared
// memory, which else take longer than the products; where out has too many columns for that, a warp
// has one. The kilobytes are those of shared memory that a block takes.
template <class T, int kTerms, int kDim, bool kFeatures>
struct LargeForward;

// Small tiles fit the 64 KB of Turing. They serve all calls there, so they have features always.
template <class T, int kTerms, int kDim>
struct SmallForward;

template <class T, bool kFeatures>
struct LargeForward<T, 1, 64, kFeatures> : ForwardRow<T, 1, 64, kFeatures, Use::kLarge> {
  // This takes 48 KB. Changing scores takes registers, which then suffice for 32 keys.
  static constexpr int kRowTiles = 2, kWarps = 4, kKeys = kFeatures ? 32 : 128, kBlocks = 2;
};
template <class T>
struct SmallForward<T, 1, 64> : ForwardRow<T, 1, 64, true, Use::kTuring> {
  // This takes 24 KB, of which two blocks fit; queries of 64 columns fit the registers besides.
  static constexpr int kRowTiles = 1, kWarps = 4, kKeys = 64, kBlocks = 2;
  static constexpr bool kQueriesInRegisters = true;
};

template <class T, bool kFeatures>
struct LargeForward<T, 1, 128, kFeatures> : ForwardRow<T, 1, 128, kFeatures, Use::kLarge> {
  // This takes 64 KB. Sums of 128 columns leave registers for 64 keys, and for 32 where scores are
  // changed.
  static constexpr int kRowTiles = 2, kWarps = 4, kKeys = kFeatures ? 32 : 64, kBlocks = 2;
};
template <class T>
struct SmallForward<T, 1, 128> : ForwardRow<T, 1, 128, true, Use::kTuring> {
  // This takes 48 KB, so there is one block.
  static constexpr int kRowTiles = 1, kWarps = 4, kKeys = 64, kBlocks = 1;
};

template <class T, bool kFeatures>
struct LargeForward<T, 1, 256, kFeatures> : ForwardRow<T, 1, 256, kFeatures, Use::kLarge> {
  // This takes 96 KB. A row tile's sums alone take 128 registers a thread.
  static constexpr int kRowTiles = 1, kWarps = 4, kKeys = 64, kBlocks = 2;
};
template <class T>
struct SmallForward<T, 1, 256> : ForwardRow<T, 1, 256, true, Use::kTuring> {
  // This takes 48 KB. Rows are twice as long, so there are half as many queries and keys.
  static constexpr int kRowTiles = 1, kWarps = 2, kKeys = 32, kBlocks = 1;
};

template <class T, bool kFeatures>
struct LargeForward<T, 2, 64, kFeatures> : ForwardRow<T, 2, 64, kFeatures, Use::kLarge> {
  // This takes 48 KB. Where scores are changed, a thread has the registers of two blocks rather
  // than of three, and keeps its queries there.
  static constexpr int kRowTiles = 1, kWarps = 4, kKeys = 64, kBlocks = kFeatures ? 2 : 3;
  static constexpr bool kQueriesInRegisters = kFeatures;
};
template <class T>
struct SmallForward<T, 2, 64> : ForwardRow<T, 2, 64, true, Use::kTuring> {
  // This takes 32 KB.
  static constexpr int kRowTiles = 1, kWarps = 4, kKeys = 32, kBlocks = 1;
};

template <class T, bool kFeatures>
struct LargeForward<T, 2, 128, kFeatures> : ForwardRow<T, 2, 128, kFeatures, Use::kLarge> {
  // This takes 96 KB for 128 queries. Where scores are changed, twice as many warps own one row
  // tile each.
  static constexpr int kRowTiles = kFeatures ? 1 : 2, kWarps = kFeatures ? 8 : 4, kKeys = 32;
  static constexpr int kBlocks = kFeatures ? 1 : 2;
};
template <class T>
struct SmallForward<T, 2, 128> : ForwardRow<T, 2, 128, true, Use::kTuring> {
  // This takes 48 KB.
  static constexpr int kRowTiles = 1, kWarps = 2, kKeys = 32, kBlocks = 1;
};

template <class T>
struct LargeForward<T, 2, 256, true> : ForwardRow<T, 2, 256, true, Use::kLarge> {
  // This takes 128 KB for 64 queries; two warps share a row tile, whose sums are too many for one.
  static constexpr int kRowTiles = 1, kWarps = 8, kKeys = 32, kBlocks = 1, kSplit = 2;
};
template <class T>
struct SmallForward<T, 2, 256> : ForwardRow<T, 2, 256, true, Use::kSmall> {
  // This takes 48 KB for 16 queries, which four warps share. sm_86 uses this tile too.
  static constexpr int kRowTiles = 1, kWarps = 4, kKeys = 16, kBlocks = 1, kSplit = 4;
};

template <class T, int kTerms, int kDim, bool kFeatures>
Status launch_forward_of(const Forward& p, const DeviceProperties& properties,
                         cudaStream_t stream) {
  constexpr bool kWithFeatures = kFeatures || kAlwaysFeatures<kTerms, kDim>;
  using Large = ForwardTile<LargeForward<T, kTerms, kDim, kWithFeatures>>;
  using Small = ForwardTile<SmallForward<T, kTerms, kDim>>;
  return takes_large<Large, Small>(properties) ? launch_forward_tile<Large>(p, properties, stream)
                                               : launch_forward_tile<Small>(p, properties, stream);
}

template <class T, int kTerms>
Status launch_forward(const Forward& p, int dim, bool features, const DeviceProperties& properties,
                      cudaStream_t stream) {
  const auto with_dim = [&](auto kFeatures) {
    constexpr bool kWithFeatures = decltype(kFeatures)::value;
    switch (dim) {
      case 64:
        return launch_forward_of<T, kTerms, 64, kWithFeatures>(p, properties, stream);
      case 128:
        return launch_forward_of<T, kTerms, 128, kWithFeatures>(p, properties, stream);
      default:
        return launch_forward_of<T, kTerms, 256, kWithFeatures>(p, properties, stream);
    }
  };
  return features ? with_dim(std::true_type()) : with_dim(std::false_type());
}

template Status launch_forward<__nv_bfloat16, 1>(const Forward&, int, bool, const DeviceProperties&,
                                                 cudaStream_t);
template Status launch_forward<__half, 2>(const Forward&, int, bool, const DeviceProperties&,
                                          cudaStream_t);
template Status launch_forward<__half, 1>(const Forward&, int, bool, const DeviceProperties&,
                                          cudaStream_t);

}  // namespace fk::cuda::attention
