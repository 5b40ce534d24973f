// ssd on CUDA, backward: what the kernels are given, the memory they need, and their three
// launches.
//
// Floor: in a chunk of Q steps of one head, N P Q multiply-adds each for h, dh, what dx takes from
// dh, dB and dC, and Q Q P / 2 each for dy x^T and dx; with a gate N P Q and Q Q P / 2 more for the
// outputs. The states of both directions, which are kept for each chunk, are written and read once:
// 4 N P / Q numbers a step and head beside the 3 P of x, dy and dx.
//
// Chunks have at most 64 steps: a longer one computes more inside and keeps fewer states, a shorter
// one the reverse. Which steps a chunk has, is found on the GPU, also where sequences are packed.
#include <algorithm>

#include "core/workspace.h"
#include "cuda/launch.h"
#include "cuda/row_layout.h"
#include "ops/ssd/cuda/backward.h"
#include "ops/ssd/cuda/backward_chunks.cuh"
#include "ops/ssd/cuda/backward_states.cuh"
#include "ops/ssd/cuda/backward_sums.cuh"
#include "ops/ssd/cuda/vector_inputs.cuh"
#include "ops/ssd/cuda/vector_shared.cuh"

namespace fk::cuda {
namespace ssd {
namespace {

// Groups whose chunks are few are shared by several blocks, so that each multiprocessor has one; by
// no more, since each stores sums of its own.
void share_heads(BackwardArguments* a, int multiprocessors) {
  const int64_t heads = std::max<int64_t>(1, a->group_heads());
  const int64_t blocks = std::max<int64_t>(1, a->chunks.slots * a->in.groups * a->state_tiles);
  const int64_t parts = std::clamp<int64_t>(multiprocessors / blocks, 1, heads);
  a->heads_each = ceil_div(heads, parts);
  a->parts = ceil_div(heads, a->heads_each);
}

// Heads of a block of vector_inputs: so many that V comes in few parts, and so few that every
// multiprocessor has several blocks.
void share_V(BackwardArguments* a, int multiprocessors) {
  const int64_t heads = std::max<int64_t>(1, a->group_heads());
  const int64_t tasks = a->product_blocks() * heads;
  a->V_heads = static_cast<int>(
      std::clamp<int64_t>(tasks / (8 * multiprocessors), 1, std::min<int64_t>(heads, 16)));
  a->V_parts_count = static_cast<int>(ceil_div<int64_t>(heads, a->V_heads));
}

// Tells whether the kernels for whole vectors (vector_inputs.cuh) take calls of such sizes, with an
// aligned tensor each.
bool sizes_in_vectors(const SsdBwd& op, const DeviceProperties& device) {
  constexpr int kMost = InputsMap<VectorTile<__half, 128>>::kBytes;
  return op.x.dtype != DType::kFloat32 && device.code >= 80 &&
         device.shared_bytes_per_block >= kMost && op.x.size(3) == 64 && op.B.size(3) <= 128 &&
         op.B.size(3) % 8 == 0 && op.x.size(2) > 0 && !op.z && op.dt_limit_min >= 0;
}
bool takes_vectors(const SsdBwd& op, const DeviceProperties& device) {
  const auto fits = [](const Tensor& t) { return !t || step_rows(t).vectors; };
  return sizes_in_vectors(op, device) && fits(op.x) && fits(op.B) && fits(op.C) && fits(op.dy) &&
         fits(op.dx) && fits(op.dB) && fits(op.dC);
}

BackwardArguments arguments_of(const SsdBwd& op, bool vectors, WorkspaceParts& parts) {
  const Problem p = fk::ssd::problem_of(op);
  const int multiprocessors = device_properties(op.x.device_id).multiprocessors;
  BackwardArguments a{};
  a.in = inputs_of(op);
  a.chunks = segments_of(p.sequences, chunk_steps(p, kSide));
  a.batch = p.batch;
  a.dy = step_rows(op.dy);
  a.dx = step_rows(op.dx);
  a.dB = step_rows(op.dB);
  a.dC = step_rows(op.dC);
  a.dz = step_rows(op.dz);
  a.dfinal_state = view_of(op.dfinal_state);
  a.ddt = view_of(op.ddt);
  a.dinitial_state = view_of(op.dinitial_state);
  a.dA = head_numbers(op.dA);
  a.dD = head_numbers(op.dD);
  a.ddt_bias = head_numbers(op.ddt_bias);
  a.dD_has_channels = op.dD && op.dD.ndim == 2;
  a.channel_tiles = static_cast<int>(ceil_div(p.channels, int64_t{kSide}));
  a.state_tiles = vectors ? 1 : static_cast<int>(ceil_div(p.states, int64_t{kSide}));
  a.state_pitch = static_cast<int>(round_up(p.states, int64_t{8}));
  share_heads(&a, vectors ? 2 * multiprocessors : multiprocessors);

  const int64_t chunk_heads = a.chunks.slots * p.heads;
  const int64_t state_bytes = chunk_heads * p.channels * a.state_pitch * size_of(op.x.dtype);
  a.states = parts.take<char>(state_bytes);
  a.dstates = parts.take<char>(state_bytes);
  a.products = parts.take(a.product_blocks() * (vectors ? kHalves * 128 : kSide * kSide));
  a.worth = parts.take(chunk_heads * a.worth_rows() * kSide);
  a.through = parts.take(chunk_heads * a.state_tiles);
  a.dD_parts = parts.take(op.D ? chunk_heads * p.channels : 0);
  const int64_t shared = a.parts == 1 ? 0 : a.parts * a.shared_numbers();
  a.dB_parts = parts.take(shared);
  a.dC_parts = parts.take(shared);
  if (vectors) {
    share_V(&a, multiprocessors);
    a.decays = parts.take<ChunkDecays>(chunk_heads);
    a.V_parts = parts.take(a.product_blocks() * a.V_parts_count * kHalves * 128);
  }
  return a;
}

Status launch_kernel(void (*kernel)(BackwardArguments), const char* name, int64_t blocks,
                     int threads, int shared_bytes, const BackwardArguments& a,
                     cudaStream_t stream) {
  if (blocks == 0) return {};
  const LaunchShape shape{grid_of(blocks), {static_cast<unsigned>(threads)}, shared_bytes};
  const void* const arguments[] = {&a};
  // Not early: for Hopper, these kernels are compiled as for sm_80 (build.cmake).
  return launch(reinterpret_cast<const void*>(kernel), name, shape, stream, arguments, false);
}

// The shared memory of kernels whose squares are of Stored.
template <class Stored>
constexpr int kStatesBytes = 2 * kSquareBytes<Stored> + 2 * static_cast<int>(sizeof(Steps));
template <class Stored>
constexpr int kChunksBytes = 3 * kSquareBytes<Stored> +
                             static_cast<int>(sizeof(Steps) + sizeof(WorthSums));
static_assert(kChunksBytes<float> <= 64 * 1024, "Turing has no more");

template <class T>
Status launch_sums(const BackwardArguments& a, cudaStream_t stream) {
  const int64_t adding = a.parts == 1 ? 0 : ceil_div(a.shared_numbers(), int64_t{kAddingThreads});
  return launch_kernel(backward_sums<T>, "ssd backward_sums", a.in.heads + adding, kAddingThreads,
                       0, a, stream);
}

template <class T>
Status launch_all(const BackwardArguments& a, int device, cudaStream_t stream) {
  const bool as_float = std::is_same_v<T, float> ||
                        (std::is_same_v<T, __nv_bfloat16> && device_properties(device).code < 80);
  FK_RETURN_IF_ERROR(launch_kernel(backward_states<T>, "ssd backward_states",
                                   a.walks() + a.product_blocks(), kBackwardThreads,
                                   as_float ? kStatesBytes<float> : kStatesBytes<T>, a, stream));
  FK_RETURN_IF_ERROR(launch_kernel(backward_chunks<T>, "ssd backward_chunks",
                                   a.chunks.slots * (a.shared_blocks_of_chunk() + a.in.heads),
                                   kBackwardThreads,
                                   as_float ? kChunksBytes<float> : kChunksBytes<T>, a, stream));
  return launch_sums<T>(a, stream);
}

// The launches for whole vectors, of calls with up to Tile::kStates states.
template <class Tile>
Status launch_vectors(const BackwardArguments& a, cudaStream_t stream) {
  using T = typename Tile::T;
  const PrepareArguments prepare{a.in, a.chunks, a.product_blocks(), a.products, a.decays};
  const int64_t preparing =
      a.product_blocks() + a.chunks.slots * ceil_div<int64_t>(a.in.heads, kPreparedHeads);
  const void* const arguments[] = {&prepare};
  if (preparing > 0) {
    FK_RETURN_IF_ERROR(fk::cuda::launch(
        reinterpret_cast<const void*>(prepare_chunks<Tile>), "ssd prepare_chunks",
        {grid_of(preparing), dim3(128), 2 * Tile::StatesTile::kBytes}, stream, arguments, false));
  }
  FK_RETURN_IF_ERROR(launch_kernel(keep_states<Tile>, "ssd keep_states",
                                   2 * a.chunks.sequences.count * a.in.heads, 128, Tile::kWalkBytes,
                                   a, stream));
  FK_RETURN_IF_ERROR(launch_kernel(vector_inputs<Tile>, "ssd vector_inputs",
                                   a.product_blocks() * a.V_parts_count, 128,
                                   InputsMap<Tile>::kBytes, a, stream));
  if (a.dB.data != nullptr || a.dC.data != nullptr) {
    FK_RETURN_IF_ERROR(launch_kernel(vector_shared<Tile>, "ssd vector_shared",
                                     a.product_blocks() * a.parts, 256, SharedMap<Tile>::kBytes, a,
                                     stream));
  }
  return launch_sums<T>(a, stream);
}

template <class T>
Status launch_vectors_of(const BackwardArguments& a, cudaStream_t stream) {
  if constexpr (!std::is_same_v<T, float>) {
    if (a.in.states <= 32) return launch_vectors<VectorTile<T, 32>>(a, stream);
    if (a.in.states <= 64) return launch_vectors<VectorTile<T, 64>>(a, stream);
    return launch_vectors<VectorTile<T, 128>>(a, stream);
  }
  return {};
}

}  // namespace
}  // namespace ssd

Status run(const SsdBwd& op, const Exec& exec) {
  WorkspaceParts parts(exec.workspace());
  const bool vectors = ssd::takes_vectors(op, device_properties(op.x.device_id));
  const ssd::BackwardArguments a = ssd::arguments_of(op, vectors, parts);
  return for_dtype(op.x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (vectors) return ssd::launch_vectors_of<T>(a, stream_of(exec));
    return ssd::launch_all<T>(a, op.x.device_id, stream_of(exec));
  });
}

size_t workspace(const SsdBwd& op) {
  WorkspaceParts parts, in_vectors;
  ssd::arguments_of(op, false, parts);
  if (ssd::sizes_in_vectors(op, device_properties(op.x.device_id))) {
    ssd::arguments_of(op, true, in_vectors);
  }
  return std::max(parts.bytes(), in_vectors.bytes());
}

}  // namespace fk::cuda
