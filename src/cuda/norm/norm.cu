// rms_norm and layer_norm on CUDA: chooses kernel and tile, and launches. The kernels are in
// forward.cuh and backward.cuh beside this.
#include <algorithm>
#include <type_traits>

#include "cuda/norm/backward.cuh"
#include "cuda/norm/forward.cuh"
#include "cuda/norm/norm.h"
#include "cuda/norm/views.cuh"

namespace fk::cuda::norm {

// The tiles of the forward, by the longest rows that they take. Each row of the table says what it
// gained (NOTES.md has the figures).
struct Forward32 : ForwardRow {
  // A warp takes a row: there are no barriers, and four rows per block keep the block scheduler
  // quiet.
  static constexpr int kTeamThreads = 32, kThreads = 128, kVecs = 1, kMinBlocks = 8;
  static constexpr bool kSpecial = true;
};
struct Forward96 : ForwardRow {
  // This does the same for longer rows.
  static constexpr int kTeamThreads = 32, kThreads = 128, kVecs = 3, kMinBlocks = 8;
};
struct Forward256 : ForwardRow {
  // A block takes a row, with just enough threads: the fewer, the shorter the wait at the barrier.
  static constexpr int kTeamThreads = 128, kThreads = 128, kVecs = 2, kMinBlocks = 10;
  static constexpr bool kSpecial = true;
};
struct Forward512 : ForwardRow {
  // With four vectors a thread there are half the warps of 256 x 2 to meet at the barrier, and as
  // many bytes under way.
  static constexpr int kTeamThreads = 128, kThreads = 128, kVecs = 4, kMinBlocks = 9;
};
template <bool kLayer>
struct Forward1024 : ForwardRow {
  // For rms_norm a fifth block is worth more than the registers it takes from the others.
  static constexpr int kTeamThreads = 256, kThreads = 256, kVecs = 4, kMinBlocks = kLayer ? 4 : 5;
};
struct Forward2048 : ForwardRow {
  // These are the longest rows that registers hold.
  static constexpr int kTeamThreads = 512, kThreads = 512, kVecs = 4, kMinBlocks = 2;
};

// These are the tiles of the backward.
template <bool kLayer>
struct Backward32 : BackwardRow {
  // A warp takes a row, as in the forward, and the block's warps share a row of partial sums.
  // Blocks are as many as the sums leave registers for; layer_norm has twice the sums.
  static constexpr int kTeamThreads = 32, kThreads = 256, kVecs = 1, kBlocks = kLayer ? 3 : 4;
  static constexpr bool kSpecial = true;
};
struct Backward96 : BackwardRow {
  // This does the same for longer rows.
  static constexpr int kTeamThreads = 32, kThreads = 256, kVecs = 3, kBlocks = 2;
};
template <bool kLayer>
struct Backward256 : BackwardRow {
  // A block takes a row.
  static constexpr int kTeamThreads = 128, kThreads = 128, kVecs = 2, kBlocks = kLayer ? 5 : 6;
  static constexpr bool kSpecial = true;
};
struct Backward512 : BackwardRow {
  // Beside the sums, registers leave room for too few threads to have enough loads under way: bulk
  // copies need none.
  static constexpr int kTeamThreads = 256, kThreads = 256, kVecs = 2, kBlocks = 2;
  static constexpr bool kBulk = true;
};
struct Backward1024 : BackwardRow {
  // This does the same for longer rows.
  static constexpr int kTeamThreads = 512, kThreads = 512, kVecs = 2, kBlocks = 1;
  static constexpr bool kBulk = true;
};

namespace {

// float32, which few models use here, takes the wider tile where a narrower one would gain little,
// and the general kernel in any case: fewer to compile.
template <class T>
constexpr bool kSpecialType = !std::is_same_v<T, float>;

// Returns whether the special kernels and tiles are there.
bool has_special(const Tensor& x) { return device_properties(x.device_id).code >= kSpecialCode; }

// Calls body(Tile) for the forward of rows of `vectors` 16-byte vectors, at most kMaxForward.
constexpr int64_t kMaxForward = 2048;
template <class T, bool kLayer, class Body>
Status with_forward_tile(int64_t vectors, bool special, const Body& body) {
  if constexpr (kSpecialType<T>) {
    if (special && vectors <= 32) return body(ForwardTile<Forward32>());
  }
  if (vectors <= 96) return body(ForwardTile<Forward96>());
  if constexpr (kSpecialType<T>) {
    if (special && vectors <= 256) return body(ForwardTile<Forward256>());
  }
  if (vectors <= 512) return body(ForwardTile<Forward512>());
  if constexpr (kSpecialType<T>) {
    if (vectors <= 1024) return body(ForwardTile<Forward1024<kLayer>>());
  }
  return body(ForwardTile<Forward2048>());
}

// Calls body(Tile) for the backward, at most kMaxBackward. Longer rows would not fit the registers
// beside the sums of their columns.
constexpr int64_t kMaxBackward = 1024;
template <class T, bool kLayer, class Body>
Status with_backward_tile(int64_t vectors, bool special, const Body& body) {
  if constexpr (kSpecialType<T>) {
    if (special && vectors <= 32) return body(BackwardTile<Backward32<kLayer>>());
  }
  if (vectors <= 96) return body(BackwardTile<Backward96>());
  if constexpr (kSpecialType<T>) {
    if (special && vectors <= 256) return body(BackwardTile<Backward256<kLayer>>());
  }
  if (vectors <= 512) return body(BackwardTile<Backward512>());
  return body(BackwardTile<Backward1024>());
}

// The looped kernels have threads enough for the long rows that come there.
constexpr int kLoopedThreads = 512;

int64_t vectors_of(const Tensor& x) { return x.size(-1) * size_of(x.dtype) / 16; }

// Returns whether the tiled kernels take rows of x, if all tensors are vectorised.
bool fits_tiled(const Tensor& x, int64_t rows, int64_t max_vectors) {
  return x.size(-1) > 0 && vectors_of(x) <= max_vectors && rows < (int64_t{1} << 31);
}

// Returns whether rows need no division to be found.
template <class... Views>
bool unsplit(const Views&... views) {
  return ((views.rows.ndim <= 1) && ...);
}

// Returns whether a kernel may rely on `p` being there and read it as T.
template <class T>
bool given(const Parameter& p) {
  return p.data != nullptr && (std::is_same_v<T, float> || !p.is_float);
}

template <bool kLayer>
Status launch_forward(const Forward& p, const Tensor& x, bool aligned, cudaStream_t stream) {
  return for_dtype(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (aligned && fits_tiled(x, p.rows, kMaxForward)) {
      const bool special = has_special(x);
      return with_forward_tile<T, kLayer>(vectors_of(x), special, [&](auto tile) {
        using Tile = decltype(tile);
        using Team = typename Tile::Team;
        const auto blocks = static_cast<unsigned>(ceil_div(p.rows, Team::kCount));
        const bool all = special && p.inputs[1].data != nullptr && p.y.data != nullptr &&
                         p.sum.data != nullptr && given<T>(p.weight) &&
                         (!kLayer || given<T>(p.bias));
        const auto kernel = kSpecialType<T> && all ? forward_tiled<T, kLayer, kSpecialType<T>, Tile>
                                                   : forward_tiled<T, kLayer, false, Tile>;
        return launch_early(kernel, "norm forward_tiled", {blocks, Team::kThreads}, stream, p);
      });
    }
    const auto kernel = aligned ? forward_looped<T, kVecWidth<T>, kLoopedThreads>
                                : forward_looped<T, 1, kLoopedThreads>;
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(p.rows, 1 << 20));
    return launch_early(kernel, "norm forward_looped", {blocks, kLoopedThreads}, stream, p);
  });
}

// Returns how many blocks a backward launches: as many as run at once, since each leaves a row of
// partial sums. Does not look at pointers: the workspace is asked for before there are any.
template <bool kLayer>
int tiled_backward_blocks(const Tensor& x, int64_t rows) {
  int64_t blocks = 0;
  const Status status = for_dtype(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return with_backward_tile<T, kLayer>(vectors_of(x), has_special(x), [&](auto tile) {
      using Tile = decltype(tile);
      constexpr int kTeams = Tile::Team::kCount;
      const int64_t most = Tile::kBlocks * device_properties(x.device_id).multiprocessors;
      blocks = std::min(ceil_div(rows, kTeams), most);
      return Status();
    });
  });
  return status.ok() ? static_cast<int>(blocks) : 0;
}

template <bool kLayer>
int most_backward_blocks(const Tensor& x, int64_t rows) {
  const int blocks = looped_backward_blocks(x, rows);
  if (!fits_tiled(x, rows, kMaxBackward)) return blocks;
  return std::max(blocks, tiled_backward_blocks<kLayer>(x, rows));
}

// Returns the shared memory for the bulk loader's ring, and its depth: 4 rows, or what blocks that
// share a multiprocessor can have. It is 0 where rows are not loaded so.
template <class Tile>
int ring_bytes(int64_t vectors, int device, int* stages) {
  const DeviceProperties& properties = device_properties(device);
  *stages = 0;
  if (!Tile::kBulk || properties.code < 90) return 0;
  constexpr int kReserved = 4096;  // of each block: the system's, and the kernel's own arrays
  const int room = std::min(properties.shared_bytes_per_block,
                            properties.shared_bytes_per_multiprocessor / Tile::kBlocks) -
                   kReserved;
  const int stage = Tile::Team::kCount * 3 * 16 * static_cast<int>(vectors);
  *stages = std::min(kMaxStages, room / stage);
  return *stages * stage;
}

template <bool kLayer>
Status launch_backward(Backward p, const Tensor& x, bool tiled, bool aligned, unsigned blocks,
                       cudaStream_t stream) {
  return for_dtype(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (tiled) {
      const bool special = has_special(x);
      return with_backward_tile<T, kLayer>(vectors_of(x), special, [&](auto tile) {
        using Tile = decltype(tile);
        const int shared = std::max(ring_bytes<Tile>(vectors_of(x), x.device_id, &p.stages),
                                    partial_bytes<typename Tile::Team>(p.columns));
        const bool plain = special && p.inputs[2].data != nullptr && p.dx.data != nullptr &&
                           given<T>(p.weight) &&
                           unsplit(p.inputs[0], p.inputs[1], p.inputs[2], p.dx, p.mean, p.rstd);
        const auto kernel = kSpecialType<T> && plain
                                ? backward_tiled<T, kLayer, kSpecialType<T>, Tile>
                                : backward_tiled<T, kLayer, false, Tile>;
        return launch_early(kernel, "norm backward_tiled", {blocks, Tile::Team::kThreads, shared},
                            stream, p);
      });
    }
    const auto kernel = aligned ? backward_looped<T, kVecWidth<T>, kLoopedThreads>
                                : backward_looped<T, 1, kLoopedThreads>;
    return launch_early(kernel, "norm backward_looped", {blocks, kLoopedThreads}, stream, p);
  });
}

template <bool kLayer>
Status run_backward(const BackwardCall& call, float* partials, cudaStream_t stream) {
  Backward p;
  p.inputs[0] = view_of(call.dy, 1);
  p.inputs[1] = view_of(call.x, 1);
  p.inputs[2] = view_of(call.dsum, 1);
  p.dx = view_of(call.dx, 1);
  p.weight = parameter_of(call.weight, 1.f, static_cast<float>(call.weight_offset));
  if (kLayer) p.mean = view_of(call.mean, 0);
  p.rstd = view_of(call.rstd, 0);
  p.rows = call.dy ? p.inputs[1].rows.count : 0;
  p.columns = call.dy ? call.x.size(-1) : call.weight.size(0);
  if (p.columns == 0) return {};
  const bool aligned = all_vectorised(call.dy, call.x, call.dsum, call.weight, call.dx);
  const bool tiled = p.rows > 0 && aligned && fits_tiled(call.x, p.rows, kMaxBackward);
  const int blocks = p.rows == 0 ? 0
                     : tiled     ? tiled_backward_blocks<kLayer>(call.x, p.rows)
                                 : looped_backward_blocks(call.x, p.rows);
  Gradients gradients;
  gradients.columns = p.columns;
  gradients.blocks = blocks;
  if (call.dweight) {
    p.dweight = partials;
    gradients.gradients[0] = gradient_of(call.dweight, partials);
    partials += blocks * p.columns;
  }
  if (call.dbias) {
    p.dbias = partials;
    gradients.gradients[1] = gradient_of(call.dbias, partials);
  }
  if (blocks > 0) {
    FK_RETURN_IF_ERROR(
        launch_backward<kLayer>(p, call.x, tiled, aligned, static_cast<unsigned>(blocks), stream));
  }
  if (!call.dweight && !call.dbias) return {};
  return launch_add_partials(gradients, stream);
}

}  // namespace

Status run_forward(const ForwardCall& call, bool layer, cudaStream_t stream) {
  Forward p;
  p.inputs[0] = view_of(call.x, 1);
  p.inputs[1] = view_of(call.residual, 1);
  p.y = view_of(call.y, 1);
  p.sum = view_of(call.sum, 1);
  p.mean = view_of(call.mean, 0);
  p.rstd = view_of(call.rstd, 0);
  p.weight = parameter_of(call.weight, 1.f, static_cast<float>(call.weight_offset));
  p.bias = parameter_of(call.bias, 0.f, 0.f);
  p.rows = p.inputs[0].rows.count;
  p.columns = call.x.size(-1);
  p.eps = static_cast<float>(call.eps);
  p.layer = layer;
  if (p.rows == 0) return {};
  const bool aligned =
      all_vectorised(call.x, call.residual, call.y, call.sum, call.weight, call.bias);
  return layer ? launch_forward<true>(p, call.x, aligned, stream)
               : launch_forward<false>(p, call.x, aligned, stream);
}

size_t backward_bytes(const BackwardCall& call, bool layer) {
  const int64_t rows = rows_of(call.x).count;
  const int blocks =
      layer ? most_backward_blocks<true>(call.x, rows) : most_backward_blocks<false>(call.x, rows);
  return sizeof(float) * ((call.dweight ? 1 : 0) + (call.dbias ? 1 : 0)) * blocks * call.x.size(-1);
}

Status run_backward(const BackwardCall& call, bool layer, float* partials, cudaStream_t stream) {
  return layer ? run_backward<true>(call, partials, stream)
               : run_backward<false>(call, partials, stream);
}

}  // namespace fk::cuda::norm
