// The forward's tiles, and the kernels that are made of them.
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

// Row tiles a warp, warps, keys, blocks a multiprocessor, queries in registers. Large tiles: two
// row tiles a warp halve the reads of k and v from shared memory, which else take longer than the
// products. Small tiles fit 64 KB and have features always: they serve all calls.
template <class T, int kTerms, int kDim, bool kFeatures>
struct ForwardTiles;

template <class T, bool kFeatures>
struct ForwardTiles<T, 1, 64, kFeatures> {
  using Large = ForwardTile<T, 1, 64, 2, 4, kFeatures ? 32 : 128, 2, false, kFeatures, Use::kLarge>;
  using Small = ForwardTile<T, 1, 64, 1, 4, 64, 2, true, true, Use::kTuring>;
};
template <class T, bool kFeatures>
struct ForwardTiles<T, 1, 128, kFeatures> {
  using Large = ForwardTile<T, 1, 128, 2, 4, kFeatures ? 32 : 64, 2, false, kFeatures, Use::kLarge>;
  using Small = ForwardTile<T, 1, 128, 1, 4, 64, 1, false, true, Use::kTuring>;
};
template <class T, bool kFeatures>
struct ForwardTiles<T, 1, 256, kFeatures> {
  using Large = ForwardTile<T, 1, 256, 1, 4, 64, 2, false, kFeatures, Use::kLarge>;
  using Small = ForwardTile<T, 1, 256, 1, 2, 32, 1, false, true, Use::kTuring>;
};
template <class T, bool kFeatures>
struct ForwardTiles<T, 2, 64, kFeatures> {
  using Large =
      ForwardTile<T, 2, 64, 1, 4, 64, kFeatures ? 2 : 3, kFeatures, kFeatures, Use::kLarge>;
  using Small = ForwardTile<T, 2, 64, 1, 4, 32, 1, false, true, Use::kTuring>;
};
template <class T, bool kFeatures>
struct ForwardTiles<T, 2, 128, kFeatures> {
  using Large = ForwardTile<T, 2, 128, kFeatures ? 1 : 2, kFeatures ? 8 : 4, 32, kFeatures ? 1 : 2,
                            false, kFeatures, Use::kLarge>;
  using Small = ForwardTile<T, 2, 128, 1, 2, 32, 1, false, true, Use::kTuring>;
};
template <class T, bool kFeatures>
struct ForwardTiles<T, 2, 256, kFeatures> {
  using Large = ForwardTile<T, 2, 256, 1, 8, kFeatures ? 32 : 16, 1, false, kFeatures, Use::kLarge,
                            kFeatures ? 2 : 1>;
  using Small = ForwardTile<T, 2, 256, 1, 4, 16, 1, false, true, Use::kSmall, 4>;
};

template <class T, int kTerms, int kDim, bool kFeatures>
Status launch_forward_of(const Forward& p, const DeviceProperties& properties,
                         cudaStream_t stream) {
  using Tiles = ForwardTiles<T, kTerms, kDim, kFeatures || kAlwaysFeatures<kTerms, kDim>>;
  if (takes_large<typename Tiles::Large, typename Tiles::Small>(properties)) {
    return launch_forward_tile<typename Tiles::Large>(p, properties, stream);
  }
  return launch_forward_tile<typename Tiles::Small>(p, properties, stream);
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
