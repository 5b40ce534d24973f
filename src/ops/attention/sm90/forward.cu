// Attention forward on Hopper: which calls, with which tiles and in which order. The kernel is in
// sm90/forward.cuh.
#include <algorithm>
#include <cmath>

#include "core/workspace.h"
#include "cuda/launch.h"
#include "ops/attention/cuda/rotate.h"
#include "ops/attention/sm90/forward.cuh"
#include "ops/attention/sm90/tensors.h"

namespace fk::cuda_sm90 {

namespace {

using attention::Mask;
using attention::Problem;

// What the workspace holds: the index of the next tile and, if they are rotated, q and k.
struct Scratch {
  size_t q = 256, k = 256, bytes = 256;

  explicit Scratch(const AttentionFwd& a) {
    if (!a.rotary_cos) return;
    k = q + WorkspaceParts::rounded(a.q.numel() * size_of(a.q.dtype));
    bytes = k + WorkspaceParts::rounded(a.k.numel() * size_of(a.k.dtype));
  }
};

// Whether some queries see fewer keys than others.
bool unequal_tiles(const Problem& p) { return p.packed || !p.mask.unlimited(); }

template <class Tile>
Status launch(const AttentionFwd& a, const Exec& exec) {
  const Problem p = attention::problem_of(a);
  const cuda::DeviceProperties& device = cuda::device_properties(a.q.device_id);
  const cudaStream_t stream = cuda::stream_of(exec);
  ForwardArguments f = {};
  FK_RETURN_IF_ERROR(make_map(&f.q, a.q, 64));
  FK_RETURN_IF_ERROR(make_map(&f.k, a.k, Tile::kKeys));
  FK_RETURN_IF_ERROR(make_map(&f.v, a.v, Tile::kKeys));
  if (a.out) FK_RETURN_IF_ERROR(make_map(&f.out, a.out, 64));
  f.batch = static_cast<int>(p.batch);
  f.heads = static_cast<int>(p.heads);
  f.group = static_cast<int>(p.group());
  f.q_len = static_cast<int>(p.q_len);
  f.k_len = static_cast<int>(p.k_len);
  f.packed = p.packed;
  f.cu_q = p.cu_q;
  f.cu_k = p.cu_k;
  f.cu_q_stride = static_cast<int>(p.cu_q_stride);
  f.cu_k_stride = static_cast<int>(p.cu_k_stride);
  f.out_view = attention::view(a.out);
  f.lse = attention::row_view(a.lse);
  f.slopes = attention::slope_view(a.alibi_slopes);
  f.slope_type = a.alibi_slopes.dtype;
  if (a.sinks) {
    f.sinks = a.sinks.data;
    f.sink_stride = a.sinks.stride(0);
    f.sink_type = a.sinks.dtype;
  }
  f.scale = static_cast<float>(p.scale);
  f.softcap = static_cast<float>(p.softcap);
  f.slack = Tile::kScoreChange ? 8.f : 8.f / (f.scale * cuda::kLog2E);
  f.value_pieces = static_cast<int>(p.value_dim / 8);
  f.left = limit(p.mask.left);
  f.right = limit(p.mask.right);
  f.query_tiles = (f.q_len + Tile::kQueries - 1) / Tile::kQueries;
  f.tiles = f.heads * (p.packed ? f.query_tiles + f.batch : f.query_tiles * f.batch);
  f.last_first = unequal_tiles(p);
  // Where lengths differ, three tiles for every multiprocessor are enough for all to end at once.
  f.end_tiles = p.mask.unlimited() ? 0 : 3 * device.multiprocessors;
  if (f.last_first && f.tiles > device.multiprocessors) {
    f.next_tile = exec.workspace<int>();
    FK_RETURN_IF_ERROR(
        cuda::check(cudaMemsetAsync(f.next_tile, 0, sizeof(int), stream), "cudaMemsetAsync"));
  }
  const unsigned blocks = static_cast<unsigned>(std::min(device.multiprocessors, f.tiles));
  return cuda::launch_early(attention_forward<Tile>, "attention_forward",
                            {blocks, Tile::kThreads, Tile::kSharedBytes}, stream, f);
}

// Whether tiles of two warpgroups are done sooner than tiles of three, which are 1.2 times as fast
// if there is enough to do: where there are few tiles, larger ones leave multiprocessors idle.
bool few_tiles(const Problem& p, int multiprocessors) {
  if (p.packed) return false;
  const auto rounds = [&](int queries) {
    const double tiles =
        static_cast<double>(p.batch * p.heads * ((p.q_len + queries - 1) / queries)) /
        multiprocessors;
    // Under a mask they are half as long on average, and the longest come first.
    return p.mask.unlimited() ? std::ceil(tiles) : std::max(1., tiles / 2);
  };
  return 1.25 * 128 * rounds(128) < 192 * rounds(192);
}

// Tiles as measured: 128 keys at a time, or 80 where registers and shared memory reach no further;
// 96 where values are narrower, for two tiles of queries to fit. Smaller heads and values are
// padded with zeros, which the copy engine makes.
template <class T, bool kScoreChange>
Status run_as(const AttentionFwd& a, const Exec& exec) {
  const Problem p = attention::problem_of(a);
  const int64_t width = std::max(p.head_dim, p.value_dim);
  if (width <= 64) {
    // Three warpgroups hide more, but have not the registers to change scores.
    if constexpr (kScoreChange) return launch<ForwardTile<T, 64, 128, 2, true>>(a, exec);
    if (few_tiles(p, cuda::device_properties(a.q.device_id).multiprocessors)) {
      return launch<ForwardTile<T, 64, 128, 2, false, 4, 4>>(a, exec);
    }
    return launch<ForwardTile<T, 64, 128, 3, false, 4, 4>>(a, exec);
  }
  if constexpr (kScoreChange) {
    if (width <= 128) return launch<ForwardTile<T, 128, 128, 2, true, 2, 3>>(a, exec);
    return launch<ForwardTile<T, 256, 80, 2, true>>(a, exec);
  } else {
    if (width <= 96) return launch<ForwardTile<T, 96, 128, 2, false, 2, 3>>(a, exec);
    if (width <= 128) return launch<ForwardTile<T, 128, 128, 2, false, 2, 3>>(a, exec);
    if (width <= 192 && p.value_dim <= 128) {
      return launch<ForwardTile<T, 192, 96, 2, false, 2, 2, 128>>(a, exec);
    }
    if (width <= 192) return launch<ForwardTile<T, 192, 80, 2, false>>(a, exec);
    return launch<ForwardTile<T, 256, 80, 2, false>>(a, exec);
  }
}

bool changes_scores(const AttentionFwd& a) { return a.softcap > 0 || a.alibi_slopes; }

template <class T>
Status run_type(const AttentionFwd& a, const Exec& exec) {
  return changes_scores(a) ? run_as<T, true>(a, exec) : run_as<T, false>(a, exec);
}

}  // namespace

bool accepts(const AttentionFwd& a) {
  if (a.q.dtype != DType::kFloat16 && a.q.dtype != DType::kBFloat16) return false;
  if (cuda::device_properties(a.q.device_id).code < 90) return false;
  if (a.bias) return false;
  const Problem p = attention::problem_of(a);
  if (p.head_dim % 8 != 0 || p.value_dim % 8 != 0 || p.head_dim == 0 || p.value_dim == 0) {
    return false;
  }
  if (p.batch == 0 || p.heads == 0 || p.q_len == 0 || p.k_len == 0) return false;
  // The maximum is taken before the scale is applied.
  if (!(p.scale > 0)) return false;
  if (p.q_len > kMaxLength || p.k_len > kMaxLength || p.batch * p.heads > kMaxLength ||
      p.batch * p.heads * (p.q_len / 128 + 1) > kMaxLength) {
    return false;
  }
  return copy_engine_takes(a);
}

size_t workspace(const AttentionFwd& a) {
  // Also what the portable kernel needs, which takes calls with addresses the copy engine cannot.
  return std::max(Scratch(a).bytes, cuda::workspace(a));
}

Status run(const AttentionFwd& a, const Exec& exec) {
  if (!aligned(a)) {
    return cuda::run(a, exec);
  }
  AttentionFwd rotated = a;
  if (a.rotary_cos) {
    const Problem p = attention::problem_of(a);
    const cuda::attention::Rotation rotation = cuda::attention::rotation_of(a);
    const Scratch scratch(a);
    rotated.q = without_gaps(a.q, exec.workspace<char>() + scratch.q);
    rotated.k = without_gaps(a.k, exec.workspace<char>() + scratch.k);
    const cuda::attention::Preparation tensors[] = {{&a.q, true, rotation, rotated.q.data},
                                                    {&a.k, false, rotation, rotated.k.data}};
    FK_RETURN_IF_ERROR(cuda::attention::prepare(p, cuda::attention::Form::kSame, tensors, 2,
                                                cuda::stream_of(exec)));
  }
  return a.q.dtype == DType::kFloat16 ? run_type<__half>(rotated, exec)
                                      : run_type<__nv_bfloat16>(rotated, exec);
}

}  // namespace fk::cuda_sm90
