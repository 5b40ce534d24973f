// The backward's tiles, and the kernels that are made of them.
#include "ops/attention/cuda/backward_keys.cuh"
#include "ops/attention/cuda/backward_launch.h"
#include "ops/attention/cuda/backward_queries.cuh"
#include "ops/attention/cuda/plan.h"

namespace fk::cuda::attention {

template <class Tile>
Status launch_keys_tile(Backward p, const DeviceProperties& properties, cudaStream_t stream) {
  p.tiles = static_cast<int>(tile_count(p.problem, p.problem.k_len, Tile::kKeys));
  p.together = heads_together(p.problem, p.tiles, p.problem.kv_heads,
                              properties.multiprocessors * Tile::kBlocks);
  return launch_tile<Tile>(backward_keys<Tile>, "attention backward_keys",
                           tile_grid(p.problem, p.tiles, p.problem.kv_heads), p, stream, 1,
                           Tile::kTerms == 2 && Tile::kBlocks == 1);
}

template <class Tile>
Status launch_queries_tile(Backward p, cudaStream_t stream) {
  p.tiles = static_cast<int>(tile_count(p.problem, p.problem.q_len, Tile::kRows));
  return launch_tile<Tile>(backward_queries<Tile>, "attention backward_queries",
                           tile_grid(p.problem, p.tiles, p.problem.heads), p, stream);
}

template <class Tile>
Status launch_bias_tile(const Backward& p, cudaStream_t stream) {
  const int64_t blocks = ceil_div(p.bias_keys, Tile::kKeys) *
                         ceil_div(p.bias_queries, Tile::kRows) * p.bias_heads * p.bias_batch;
  return launch_tile<Tile>(backward_queries<Tile>, "attention backward_bias", grid_of(blocks), p,
                           stream);
}

// Key tiles a warp, warps over keys, split, queries, a piece of them, stages, blocks a
// multiprocessor; for QueryTile: warps, keys, blocks. kWhole: dk and dv are made at once.
// Small tiles have features always: they serve all calls.
template <class T, int kTerms, int kDim, bool kFeatures>
struct BackwardTiles;

template <class T, bool kFeatures>
struct BackwardTiles<T, 1, 64, kFeatures> {
  static constexpr bool kWhole = true;
  template <int kParts>
  using Large = BackwardTile<T, 1, 64, 2, kFeatures ? 2 : 4, kFeatures ? 2 : 1, 64, 32, 1, 2,
                             kParts, kFeatures, Use::kLarge>;
  template <int kParts>
  using Small = BackwardTile<T, 1, 64, 1, 4, 1, 64, 64, 1, 1, kParts, true, Use::kTuring>;
  using Queries = QueryTile<T, 1, 64, 4, 64, 2, Use::kLarge>;
  using SmallQueries = QueryTile<T, 1, 64, 4, 64, 1, Use::kTuring>;
};
template <class T, bool kFeatures>
struct BackwardTiles<T, 1, 128, kFeatures> {
  static constexpr bool kWhole = true;
  template <int kParts>
  using Large = BackwardTile<T, 1, 128, 2, 4, 2, 64, kFeatures ? 16 : 32, 2, 1, kParts, kFeatures,
                             Use::kLarge>;
  template <int kParts>
  using Small = BackwardTile<T, 1, 128, 1, 4, 2, 32, 16, 1, 1, kParts, true, Use::kSmall>;
  using Queries = QueryTile<T, 1, 128, 4, 32, 2, Use::kLarge>;
  using SmallQueries = QueryTile<T, 1, 128, 4, 32, 1, Use::kTuring>;
};
template <class T, bool kFeatures>
struct BackwardTiles<T, 1, 256, kFeatures> {
  static constexpr bool kWhole = true;
  template <int kParts>
  using Large = BackwardTile<T, 1, 256, 2, 2, 4, 64, 16, 1, 1, kParts, kFeatures, Use::kLarge>;
  template <int kParts>
  using Small = BackwardTile<T, 1, 256, 1, 1, 4, 32, 16, 1, 1, kParts, true, Use::kSmall>;
  using Queries = QueryTile<T, 1, 256, 4, 32, 1, Use::kLarge>;
  using SmallQueries = QueryTile<T, 1, 256, 2, 16, 1, Use::kTuring>;
};
template <class T, bool kFeatures>
struct BackwardTiles<T, 2, 64, kFeatures> {
  static constexpr bool kWhole = true;
  template <int kParts>
  using Large =
      BackwardTile<T, 2, 64, 2, 2, 2, 32, 16, 1, kFeatures ? 2 : 3, kParts, kFeatures, Use::kLarge>;
  template <int kParts>
  using Small = BackwardTile<T, 2, 64, 1, 4, 1, 16, 16, 1, 1, kParts, true, Use::kTuring>;
  using Queries = QueryTile<T, 2, 64, 4, 32, 2, Use::kLarge>;
  using SmallQueries = QueryTile<T, 2, 64, 2, 32, 1, Use::kTuring>;
};
template <class T, bool kFeatures>
struct BackwardTiles<T, 2, 128, kFeatures> {
  static constexpr bool kWhole = true;
  template <int kParts>
  using Large = BackwardTile<T, 2, 128, 1, 4, 2, kFeatures ? 32 : 64, kFeatures ? 16 : 32, 1, 1,
                             kParts, kFeatures, Use::kLarge>;
  template <int kParts>
  using Wide = BackwardTile<T, 2, 128, 2, 4, 2, 32, 16, 1, 1, kParts, false, Use::kHopper>;
  template <int kParts>
  using Small = BackwardTile<T, 2, 128, 1, 1, 2, 32, 16, 1, 1, kParts, true, Use::kSmall>;
  using Queries = QueryTile<T, 2, 128, 4, 32, 1, Use::kLarge>;
  using SmallQueries = QueryTile<T, 2, 128, 2, 16, 1, Use::kTuring>;
};
template <class T, bool kFeatures>
struct BackwardTiles<T, 2, 256, kFeatures> {
  static constexpr bool kWhole = false;
  template <int kParts>
  using Large = BackwardTile<T, 2, 256, 1, 2, 2, 32, 16, 1, 1, kParts, kFeatures, Use::kLarge>;
  template <int kParts>
  using Small = BackwardTile<T, 2, 256, 1, 1, 4, 16, 16, kParts == kValues ? 1 : 0, 1, kParts, true,
                             Use::kSmall>;
  using Queries = QueryTile<T, 2, 256, 4, 16, 1, Use::kLarge>;
  using SmallQueries = QueryTile<T, 2, 256, 1, 16, 1, Use::kSmall, 4, true>;
};

template <class Tiles, int kParts>
Status launch_keys_part(const Backward& p, const DeviceProperties& properties,
                        cudaStream_t stream) {
  using Large = typename Tiles::template Large<kParts>;
  using Small = typename Tiles::template Small<kParts>;
  return takes_large<Large, Small>(properties) ? launch_keys_tile<Large>(p, properties, stream)
                                               : launch_keys_tile<Small>(p, properties, stream);
}

// Whether to take a tile of more keys, which is faster by a tenth where as many multiprocessors
// work.
template <class Wide, class Tile>
bool takes_wide(const Problem& p, const DeviceProperties& properties) {
  const int64_t at_once = properties.multiprocessors;
  const auto blocks = [&](int keys) {
    return tile_count(p, p.k_len, keys) * p.kv_heads * (p.packed ? 1 : p.batch);
  };
  return properties.code >= 90 &&
         11 * ceil_div(blocks(Tile::kKeys), at_once) >=
             20 * ceil_div(blocks(Wide::kKeys), at_once) &&
         (p.mask.unlimited() || blocks(Wide::kKeys) > at_once);
}

template <class T, int kTerms, int kDim, bool kFeatures>
Status launch_keys(const Backward& p, const DeviceProperties& properties, cudaStream_t stream) {
  using Tiles = BackwardTiles<T, kTerms, kDim, kFeatures>;
  if constexpr (kTerms == 2 && kDim == 128 && !kFeatures) {
    using Wide = typename Tiles::template Wide<kAllParts>;
    if (takes_wide<Wide, typename Tiles::template Large<kAllParts>>(p.problem, properties)) {
      return launch_keys_tile<Wide>(p, properties, stream);
    }
  }
  if constexpr (Tiles::kWhole) {
    return launch_keys_part<Tiles, kAllParts>(p, properties, stream);
  } else {
    if (p.dk.data != nullptr || p.dq_sums != nullptr) {
      FK_RETURN_IF_ERROR((launch_keys_part<Tiles, kKeysAndQueries>(p, properties, stream)));
    }
    if (p.dv.data == nullptr) return {};
    return launch_keys_part<Tiles, kValues>(p, properties, stream);
  }
}

template <class T, int kTerms, int kDim>
Status launch_backward_of(const Backward& p, BackwardPass pass, bool features,
                          const DeviceProperties& properties, cudaStream_t stream) {
  if (pass == BackwardPass::kKeys) {
    return features || kAlwaysFeatures<kTerms, kDim>
               ? launch_keys<T, kTerms, kDim, true>(p, properties, stream)
               : launch_keys<T, kTerms, kDim, kAlwaysFeatures<kTerms, kDim>>(p, properties, stream);
  }
  using Tiles = BackwardTiles<T, kTerms, kDim, true>;
  using Large = typename Tiles::Queries;
  using Small = typename Tiles::SmallQueries;
  const bool large = takes_large<Large, Small>(properties);
  if (pass == BackwardPass::kQueries) {
    return large ? launch_queries_tile<Large>(p, stream) : launch_queries_tile<Small>(p, stream);
  }
  return large ? launch_bias_tile<Large>(p, stream) : launch_bias_tile<Small>(p, stream);
}

template <class T, int kTerms>
Status launch_backward(const Backward& p, BackwardPass pass, int dim, bool features,
                       const DeviceProperties& properties, cudaStream_t stream) {
  switch (dim) {
    case 64:
      return launch_backward_of<T, kTerms, 64>(p, pass, features, properties, stream);
    case 128:
      return launch_backward_of<T, kTerms, 128>(p, pass, features, properties, stream);
    default:
      return launch_backward_of<T, kTerms, 256>(p, pass, features, properties, stream);
  }
}

template Status launch_backward<__nv_bfloat16, 1>(const Backward&, BackwardPass, int, bool,
                                                  const DeviceProperties&, cudaStream_t);
template Status launch_backward<__half, 2>(const Backward&, BackwardPass, int, bool,
                                           const DeviceProperties&, cudaStream_t);
template Status launch_backward<__half, 1>(const Backward&, BackwardPass, int, bool,
                                           const DeviceProperties&, cudaStream_t);

}  // namespace fk::cuda::attention
