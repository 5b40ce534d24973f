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

BackwardArguments arguments_of(const SsdBwd& op, WorkspaceParts& parts) {
  const Problem p = fk::ssd::problem_of(op);
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
  a.state_tiles = static_cast<int>(ceil_div(p.states, int64_t{kSide}));
  a.state_pitch = static_cast<int>(round_up(p.states, int64_t{8}));
  share_heads(&a, device_properties(op.x.device_id).multiprocessors);

  const int64_t chunk_heads = a.chunks.slots * p.heads;
  const int64_t state_bytes = chunk_heads * p.channels * a.state_pitch * size_of(op.x.dtype);
  a.states = parts.take<char>(state_bytes);
  a.dstates = parts.take<char>(state_bytes);
  a.products = parts.take(a.product_blocks() * kSide * kSide);
  a.worth = parts.take(chunk_heads * a.worth_rows() * kSide);
  a.through = parts.take(chunk_heads * a.state_tiles);
  a.dD_parts = parts.take(op.D ? chunk_heads * p.channels : 0);
  const int64_t shared = a.parts == 1 ? 0 : a.parts * a.shared_numbers();
  a.dB_parts = parts.take(shared);
  a.dC_parts = parts.take(shared);
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
  const int64_t adding = a.parts == 1 ? 0 : ceil_div(a.shared_numbers(), int64_t{kAddingThreads});
  return launch_kernel(backward_sums<T>, "ssd backward_sums", a.in.heads + adding, kAddingThreads,
                       0, a, stream);
}

}  // namespace
}  // namespace ssd

Status run(const SsdBwd& op, const Exec& exec) {
  WorkspaceParts parts(exec.workspace());
  const ssd::BackwardArguments a = ssd::arguments_of(op, parts);
  return for_dtype(op.x.dtype, [&](auto tag) {
    return ssd::launch_all<typename decltype(tag)::type>(a, op.x.device_id, stream_of(exec));
  });
}

size_t workspace(const SsdBwd& op) {
  WorkspaceParts parts;
  ssd::arguments_of(op, parts);
  return parts.bytes();
}

}  // namespace fk::cuda
