// ssd's forward on CUDA: which kernels a call takes, and how sequences are cut. forward.cuh has the
// kernel on tensor cores, forward_steps.cuh the one on FMA units.
#include <algorithm>

#include "core/workspace.h"
#include "cuda/launch.h"
#include "cuda/row_layout.h"
#include "ops/ssd/cuda/forward.cuh"
#include "ops/ssd/cuda/forward_steps.cuh"
#include "ops/ssd/cuda/forward_vectors.cuh"

namespace fk::cuda {
namespace ssd {
namespace {

// A walk has at least so many chunks where sequences are cut.
constexpr int64_t kLeastWalkChunks = 8, kLeastVectorChunks = 4;
// So many blocks of walk_vectors a multiprocessor runs at once, at the registers it takes.
constexpr int64_t kVectorBlocks = 3;
// Products C B^T are kept for blocks to share where so many would make the same ones. For fewer, it
// takes less to make them again than to write and read them.
constexpr int64_t kLeastSharing = 3;

// Calls body(Tile()) with the tile for calls of so many states.
template <class T, template <class, int> class Tile, class Body>
Status with_tile(int64_t states, const Body& body) {
  if (states <= 32) return body(Tile<T, 32>());
  if (states <= 64) return body(Tile<T, 64>());
  return states <= 128 ? body(Tile<T, 128>()) : body(Tile<T, 256>());
}

// Tells whether a tile's states fit the registers. Past 128 states, those of float and what a
// product in parts takes besides are more than a thread has: they would spill.
template <class Tile>
constexpr bool kFitsRegisters = kParts<typename Tile::T> == 1 || Tile::kStates <= 128;

// Launches a kernel when those ahead of it are done. What is compiled for sm_80 and serves sm_90
// too (build.cmake) cannot wait for them by itself.
Status launch_in_turn(void (*kernel)(ForwardArguments), const char* name, const LaunchShape& shape,
                      cudaStream_t stream, const ForwardArguments& a) {
  const void* arguments[] = {&a};
  return launch(reinterpret_cast<const void*>(kernel), name, shape, stream, arguments, false);
}

// Tells whether the walks of forward_vectors.cuh take calls of such sizes, with an aligned tensor
// each.
template <class Tile>
bool sizes_in_vectors(const SsdFwd& op, const DeviceProperties& device) {
  if constexpr (kParts<typename Tile::T> == 1 && Tile::kStates <= 128) {
    constexpr int kShared = VectorWalk<Tile, true>::kSharedBytes;
    return device.code >= 80 && device.shared_bytes_per_block > kShared + 1024 &&
           op.x.size(3) % 64 == 0 && op.B.size(3) % 8 == 0 && op.dt_limit_min >= 0;
  }
  return false;
}

template <class Tile>
bool takes_vectors(const SsdFwd& op, const DeviceProperties& device) {
  return sizes_in_vectors<Tile>(op, device) && step_rows(op.x).vectors && step_rows(op.B).vectors &&
         step_rows(op.C).vectors && step_rows(op.y).vectors && (!op.z || step_rows(op.z).vectors);
}

// This divides one call into launches, and holds the workspace that they share.
template <class Tile>
struct ForwardPlan {
  ForwardArguments a;
  int64_t walk_blocks;
  bool vectors;  // it is for the walks of forward_vectors.cuh

  ForwardPlan(const SsdFwd& op, const DeviceProperties& device, bool vectors, WorkspaceParts* parts)
      : vectors(vectors) {
    const Problem p = fk::ssd::problem_of(op);
    a.in = inputs_of(op);
    a.y = step_rows(op.y);
    a.final_state = view_of(op.final_state);
    a.slices = Slices::of(p.channels, Tile::kMostWarps);
    a.stages = device.code >= 80 && kParts<typename Tile::T> == 1 && fits(device, 2) ? 2 : 1;
    const int64_t chunk = chunk_steps(p, Tile::kSteps);
    a.chunks = segments_of(p.sequences, chunk);
    const int64_t heads = p.heads * a.slices.count;
    a.walks = segments_of(p.sequences, steps_of_walk(p, chunk, heads, device.multiprocessors));
    walk_blocks = a.walks.slots * heads;
    const bool shares =
        vectors || (p.length > chunk && p.heads / p.groups * a.slices.count >= kLeastSharing);
    a.product_blocks = shares ? a.chunks.slots * p.groups : 0;
    a.products =
        parts->take(a.product_blocks * (vectors ? kHalves * 128 : kTriangleFloats<Tile::kSteps>));
    a.decays = parts->take<ChunkDecays>(vectors ? a.chunks.slots * p.heads : 0);
    const bool cut = a.walks.steps < p.length;
    const int64_t walks = cut ? a.walks.slots * p.heads : 0;
    a.walk_decays = parts->take(walks);
    a.walk_states = parts->take(walks * a.slices.count * a.slices.warps *
                                WarpState<typename Tile::T, Tile::kStates>::kFloats);
    if (!shares) a.products = nullptr;
    if (!cut) a.walk_states = a.walk_decays = nullptr;
  }

  static bool fits(const DeviceProperties& device, int stages) {
    constexpr int kStatic = 2 * sizeof(StepDecays<Tile::kSteps>);
    return Tile::shared_bytes(stages) + kStatic <= device.shared_bytes_per_block;
  }

  // Returns the steps of a walk: a sequence's, unless there are so few blocks that parts of it fill
  // the device better, though they are walked twice.
  int64_t steps_of_walk(const Problem& p, int64_t chunk, int64_t heads,
                        int64_t multiprocessors) const {
    const int64_t whole = ceil_div(std::max<int64_t>(p.length, 1), chunk);
    const int64_t blocks = std::max<int64_t>(1, heads * p.sequences.count);
    const int64_t least = vectors ? kLeastVectorChunks : kLeastWalkChunks;
    const int64_t pieces = multiprocessors * (vectors ? kVectorBlocks : 1) / blocks;
    if (pieces < 2 || whole < 2 * least) return whole * chunk;
    return std::max(ceil_div(whole, pieces), least) * chunk;
  }

  Status launch(cudaStream_t stream) const {
    if constexpr (kParts<typename Tile::T> == 1 && Tile::kStates <= 128) {
      if (vectors) return launch_vectors(stream);
    }
    const int threads = a.slices.warps * 32, bytes = Tile::shared_bytes(a.stages);
    const int64_t first = a.product_blocks + (a.walk_states == nullptr ? 0 : walk_blocks);
    if (first > 0) {
      FK_RETURN_IF_ERROR(launch_in_turn(prepare_walks<Tile>, "ssd prepare_walks",
                                        {grid_of(first), dim3(threads), bytes}, stream, a));
    }
    return launch_in_turn(walk_chunks<Tile>, "ssd walk_chunks",
                          {grid_of(walk_blocks), dim3(threads), bytes}, stream, a);
  }

  Status launch_vectors(cudaStream_t stream) const {
    const int64_t preparing =
        a.product_blocks + a.chunks.slots * ceil_div<int64_t>(a.in.heads, kPreparedHeads);
    const PrepareArguments prepare{a.in, a.chunks, a.product_blocks, a.products, a.decays};
    const void* arguments[] = {&prepare};
    FK_RETURN_IF_ERROR(fk::cuda::launch(
        reinterpret_cast<const void*>(prepare_chunks<Tile>), "ssd prepare_chunks",
        {grid_of(preparing), dim3(128), 2 * Tile::StatesTile::kBytes}, stream, arguments, false));
    if (a.walk_states != nullptr) {
      FK_RETURN_IF_ERROR(launch_in_turn(
          walk_vectors<Tile, false>, "ssd walk_vectors without outputs",
          {grid_of(walk_blocks), dim3(128), VectorWalk<Tile, false>::kSharedBytes}, stream, a));
    }
    return launch_in_turn(walk_vectors<Tile, true>, "ssd walk_vectors",
                          {grid_of(walk_blocks), dim3(128), VectorWalk<Tile, true>::kSharedBytes},
                          stream, a);
  }
};

template <class Tile>
Status launch_steps(const SsdFwd& op, cudaStream_t stream) {
  const Problem p = fk::ssd::problem_of(op);
  ForwardArguments a{};
  a.in = inputs_of(op);
  a.y = step_rows(op.y);
  a.final_state = view_of(op.final_state);
  a.walks = segments_of(p.sequences, std::max<int64_t>(p.length, 1));
  a.slices = {static_cast<int>(ceil_div(p.channels, int64_t{Tile::kChannels})), 1};
  return launch_in_turn(walk_step_by_step<Tile>, "ssd walk_step_by_step",
                        {grid_of(p.sequences.count * p.heads * a.slices.count), Tile::kThreads},
                        stream, a);
}

bool empty(const SsdFwd& op) {
  return op.x.size(2) == 0 || fk::ssd::problem_of(op).sequences.count == 0;
}

// Tells whether the device has tensor cores for T, and memory for the tile.
template <class Tile>
bool on_tensor_cores(const DeviceProperties& device) {
  const bool multiplies = device.code >= 80 || std::is_same_v<typename Tile::T, __half>;
  return multiplies && ForwardPlan<Tile>::fits(device, 1);
}

}  // namespace
}  // namespace ssd

size_t workspace(const SsdFwd& op) {
  if (ssd::empty(op)) return 0;
  const DeviceProperties& device = device_properties(op.x.device_id);
  WorkspaceParts parts, in_vectors;
  const Status status = for_dtype(op.x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return ssd::with_tile<T, ssd::WalkTile>(op.B.size(3), [&](auto tile) -> Status {
      using Tile = decltype(tile);
      if constexpr (ssd::kFitsRegisters<Tile>) {
        if (ssd::on_tensor_cores<Tile>(device)) ssd::ForwardPlan<Tile>(op, device, false, &parts);
        if (ssd::sizes_in_vectors<Tile>(op, device)) {
          ssd::ForwardPlan<Tile>(op, device, true, &in_vectors);
        }
      }
      return {};
    });
  });
  return status.ok() ? std::max(parts.bytes(), in_vectors.bytes()) : 0;
}

Status run(const SsdFwd& op, const Exec& exec) {
  if (ssd::empty(op)) return {};
  const DeviceProperties& device = device_properties(op.x.device_id);
  const cudaStream_t stream = stream_of(exec);
  return for_dtype(op.x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return ssd::with_tile<T, ssd::WalkTile>(op.B.size(3), [&](auto tile) -> Status {
      using Tile = decltype(tile);
      if constexpr (ssd::kFitsRegisters<Tile>) {
        if (ssd::on_tensor_cores<Tile>(device)) {
          WorkspaceParts parts(exec.workspace());
          const bool vectors = ssd::takes_vectors<Tile>(op, device);
          return ssd::ForwardPlan<Tile>(op, device, vectors, &parts).launch(stream);
        }
      }
      if constexpr (std::is_same_v<T, __half>) {
        return {FK_INTERNAL, "this device has too little shared memory"};
      } else {
        return ssd::launch_steps<ssd::StepsTile<T, Tile::kStates>>(op, stream);
      }
    });
  });
}

}  // namespace fk::cuda
