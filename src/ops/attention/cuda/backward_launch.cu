// This file lists the backward's tiles, and the kernels that are made of them.
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

// These are the tiles of dk, dv and dq by atomics. Large ones are for sm_80 and later. Each row
// says how many kilobytes of shared memory a block takes.
template <class T, int kTerms, int kDim, bool kFeatures, int kParts>
struct LargeKeys;

// Small tiles fit the 64 KB of Turing. They serve all calls there, so they have features always.
template <class T, int kTerms, int kDim, int kParts>
struct SmallKeys;

template <class T, bool kFeatures, int kParts>
struct LargeKeys<T, 1, 64, kFeatures, kParts>
    : BackwardRow<T, 1, 64, kFeatures, kParts, Use::kLarge> {
  // This takes 64 KB. A warp owns 32 keys, and P and dS stay in its registers; changing scores
  // takes so many of those that two warps share the queries instead, and the columns of dk and dv.
  static constexpr int kKeyTiles = 2, kKeyWarps = kFeatures ? 2 : 4, kSplit = kFeatures ? 2 : 1;
  static constexpr int kQueries = 64, kPiece = 32, kStages = 1, kBlocks = 2;
};
template <class T, int kParts>
struct SmallKeys<T, 1, 64, kParts> : BackwardRow<T, 1, 64, true, kParts, Use::kTuring> {
  // This takes 41 KB.
  static constexpr int kKeyTiles = 1, kKeyWarps = 4, kSplit = 1;
  static constexpr int kQueries = 64, kPiece = 64, kStages = 1, kBlocks = 1;
};

template <class T, bool kFeatures, int kParts>
struct LargeKeys<T, 1, 128, kFeatures, kParts>
    : BackwardRow<T, 1, 128, kFeatures, kParts, Use::kLarge> {
  // This takes 161 KB, in which the next queries come while these are multiplied.
  static constexpr int kKeyTiles = 2, kKeyWarps = 4, kSplit = 2;
  static constexpr int kQueries = 64, kPiece = kFeatures ? 16 : 32, kStages = 2, kBlocks = 1;
};
template <class T, int kParts>
struct SmallKeys<T, 1, 128, kParts> : BackwardRow<T, 1, 128, true, kParts, Use::kSmall> {
  // This takes 56 KB. sm_86 uses this tile too.
  static constexpr int kKeyTiles = 1, kKeyWarps = 4, kSplit = 2;
  static constexpr int kQueries = 32, kPiece = 16, kStages = 1, kBlocks = 1;
};

template <class T, bool kFeatures, int kParts>
struct LargeKeys<T, 1, 256, kFeatures, kParts>
    : BackwardRow<T, 1, 256, kFeatures, kParts, Use::kLarge> {
  // This takes 145 KB. Four warps share the 256 columns of dk and dv.
  static constexpr int kKeyTiles = 2, kKeyWarps = 2, kSplit = 4;
  static constexpr int kQueries = 64, kPiece = 16, kStages = 1, kBlocks = 1;
};
template <class T, int kParts>
struct SmallKeys<T, 1, 256, kParts> : BackwardRow<T, 1, 256, true, kParts, Use::kSmall> {
  // This takes 50 KB, which leaves 16 keys. sm_86 uses this tile too.
  static constexpr int kKeyTiles = 1, kKeyWarps = 1, kSplit = 4;
  static constexpr int kQueries = 32, kPiece = 16, kStages = 1, kBlocks = 1;
};

template <class T, bool kFeatures, int kParts>
struct LargeKeys<T, 2, 64, kFeatures, kParts>
    : BackwardRow<T, 2, 64, kFeatures, kParts, Use::kLarge> {
  // This takes 64 KB. Where scores are changed, a thread has the registers of two blocks rather
  // than of three.
  static constexpr int kKeyTiles = 2, kKeyWarps = 2, kSplit = 2;
  static constexpr int kQueries = 32, kPiece = 16, kStages = 1, kBlocks = kFeatures ? 2 : 3;
};
template <class T, int kParts>
struct SmallKeys<T, 2, 64, kParts> : BackwardRow<T, 2, 64, true, kParts, Use::kTuring> {
  // This takes 44 KB.
  static constexpr int kKeyTiles = 1, kKeyWarps = 4, kSplit = 1;
  static constexpr int kQueries = 16, kPiece = 16, kStages = 1, kBlocks = 1;
};

template <class T, bool kFeatures, int kParts>
struct LargeKeys<T, 2, 128, kFeatures, kParts>
    : BackwardRow<T, 2, 128, kFeatures, kParts, Use::kLarge> {
  // This takes 161 KB for steps of 64 queries; changing scores takes registers, which then suffice
  // for 32.
  static constexpr int kKeyTiles = 1, kKeyWarps = 4, kSplit = 2;
  static constexpr int kQueries = kFeatures ? 32 : 64, kPiece = kFeatures ? 16 : 32;
  static constexpr int kStages = 1, kBlocks = 1;
};
// This tile has twice the keys, for Hopper, whose shared memory holds its 192 KB (see takes_wide).
template <class T>
struct WideKeys : BackwardRow<T, 2, 128, false, kAllParts, Use::kHopper> {
  static constexpr int kKeyTiles = 2, kKeyWarps = 4, kSplit = 2;
  static constexpr int kQueries = 32, kPiece = 16, kStages = 1, kBlocks = 1;
};
template <class T, int kParts>
struct SmallKeys<T, 2, 128, kParts> : BackwardRow<T, 2, 128, true, kParts, Use::kSmall> {
  // This takes 52 KB, which leaves 16 keys. sm_86 uses this tile too.
  static constexpr int kKeyTiles = 1, kKeyWarps = 1, kSplit = 2;
  static constexpr int kQueries = 32, kPiece = 16, kStages = 1, kBlocks = 1;
};

template <class T, bool kFeatures, int kParts>
struct LargeKeys<T, 2, 256, kFeatures, kParts>
    : BackwardRow<T, 2, 256, kFeatures, kParts, Use::kLarge> {
  // This takes 133 KB for dk and dq, less for dv.
  static constexpr int kKeyTiles = 1, kKeyWarps = 2, kSplit = 2;
  static constexpr int kQueries = 32, kPiece = 16, kStages = 1, kBlocks = 1;
};
template <class T, int kParts>
struct SmallKeys<T, 2, 256, kParts> : BackwardRow<T, 2, 256, true, kParts, Use::kSmall> {
  // This takes 49 KB for dk and dq, in which q takes the place of dout. sm_86 uses this tile too.
  static constexpr int kKeyTiles = 1, kKeyWarps = 1, kSplit = 4;
  static constexpr int kQueries = 16, kPiece = 16, kStages = kParts == kValues ? 1 : 0, kBlocks = 1;
};

// These are the tiles of dq without atomics, and of dbias. They have features always, so one kernel
// serves all calls.
template <class T, int kTerms, int kDim>
struct LargeQueries;
template <class T, int kTerms, int kDim>
struct SmallQueries;

template <class T>
struct LargeQueries<T, 1, 64> : QueryRow<T, 1, 64, Use::kLarge> {
  // This takes 32 KB.
  static constexpr int kRowWarps = 4, kKeys = 64, kBlocks = 2;
};
template <class T>
struct SmallQueries<T, 1, 64> : QueryRow<T, 1, 64, Use::kTuring> {
  // This takes 32 KB.
  static constexpr int kRowWarps = 4, kKeys = 64, kBlocks = 1;
};

template <class T>
struct LargeQueries<T, 1, 128> : QueryRow<T, 1, 128, Use::kLarge> {
  // This takes 48 KB.
  static constexpr int kRowWarps = 4, kKeys = 32, kBlocks = 2;
};
template <class T>
struct SmallQueries<T, 1, 128> : QueryRow<T, 1, 128, Use::kTuring> {
  // This takes 48 KB.
  static constexpr int kRowWarps = 4, kKeys = 32, kBlocks = 1;
};

template <class T>
struct LargeQueries<T, 1, 256> : QueryRow<T, 1, 256, Use::kLarge> {
  // This takes 96 KB.
  static constexpr int kRowWarps = 4, kKeys = 32, kBlocks = 1;
};
template <class T>
struct SmallQueries<T, 1, 256> : QueryRow<T, 1, 256, Use::kTuring> {
  // This takes 48 KB.
  static constexpr int kRowWarps = 2, kKeys = 16, kBlocks = 1;
};

template <class T>
struct LargeQueries<T, 2, 64> : QueryRow<T, 2, 64, Use::kLarge> {
  // This takes 48 KB.
  static constexpr int kRowWarps = 4, kKeys = 32, kBlocks = 2;
};
template <class T>
struct SmallQueries<T, 2, 64> : QueryRow<T, 2, 64, Use::kTuring> {
  // This takes 32 KB.
  static constexpr int kRowWarps = 2, kKeys = 32, kBlocks = 1;
};

template <class T>
struct LargeQueries<T, 2, 128> : QueryRow<T, 2, 128, Use::kLarge> {
  // This takes 96 KB.
  static constexpr int kRowWarps = 4, kKeys = 32, kBlocks = 1;
};
template <class T>
struct SmallQueries<T, 2, 128> : QueryRow<T, 2, 128, Use::kTuring> {
  // This takes 48 KB.
  static constexpr int kRowWarps = 2, kKeys = 16, kBlocks = 1;
};

template <class T>
struct LargeQueries<T, 2, 256> : QueryRow<T, 2, 256, Use::kLarge> {
  // This takes 160 KB.
  static constexpr int kRowWarps = 4, kKeys = 16, kBlocks = 1;
};
template <class T>
struct SmallQueries<T, 2, 256> : QueryRow<T, 2, 256, Use::kSmall> {
  // This takes 48 KB for 16 queries, whose columns of dq four warps share, since k takes the place
  // of v. sm_86 uses this tile too.
  static constexpr int kRowWarps = 1, kKeys = 16, kBlocks = 1, kSplit = 4;
  static constexpr bool kOneTile = true;
};

// Says whether one launch makes dk and dv. With two terms and 256 columns, shared memory does not
// hold what both need.
template <int kTerms, int kDim>
constexpr bool kMadeAtOnce = kTerms == 1 || kDim <= 128;

template <class T, int kTerms, int kDim, bool kFeatures, int kParts>
Status launch_keys_part(const Backward& p, const DeviceProperties& properties,
                        cudaStream_t stream) {
  using Large = BackwardTile<LargeKeys<T, kTerms, kDim, kFeatures, kParts>>;
  using Small = BackwardTile<SmallKeys<T, kTerms, kDim, kParts>>;
  return takes_large<Large, Small>(properties) ? launch_keys_tile<Large>(p, properties, stream)
                                               : launch_keys_tile<Small>(p, properties, stream);
}

// Returns whether to take a tile of more keys, which is faster by a tenth where as many
// multiprocessors work.
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
  if constexpr (kTerms == 2 && kDim == 128 && !kFeatures) {
    using Wide = BackwardTile<WideKeys<T>>;
    using Large = BackwardTile<LargeKeys<T, kTerms, kDim, kFeatures, kAllParts>>;
    if (takes_wide<Wide, Large>(p.problem, properties)) {
      return launch_keys_tile<Wide>(p, properties, stream);
    }
  }
  if constexpr (kMadeAtOnce<kTerms, kDim>) {
    return launch_keys_part<T, kTerms, kDim, kFeatures, kAllParts>(p, properties, stream);
  } else {
    if (p.dk.data != nullptr || p.dq_sums != nullptr) {
      FK_RETURN_IF_ERROR(
          (launch_keys_part<T, kTerms, kDim, kFeatures, kKeysAndQueries>(p, properties, stream)));
    }
    if (p.dv.data == nullptr) return {};
    return launch_keys_part<T, kTerms, kDim, kFeatures, kValues>(p, properties, stream);
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
  using Large = QueryTile<LargeQueries<T, kTerms, kDim>>;
  using Small = QueryTile<SmallQueries<T, kTerms, kDim>>;
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
