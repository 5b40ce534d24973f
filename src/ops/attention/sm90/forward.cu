// This file says which calls of attention's forward run on Hopper's kernel, with which tiles and in
// which order. The kernel is in sm90/forward.cuh.
#include <algorithm>
#include <cmath>

#include "core/workspace.h"
#include "cuda/launch.h"
#include "ops/attention/cuda/rotate.h"
#include "ops/attention/sm90/forward.cuh"
#include "ops/attention/sm90/tensors.h"

namespace fk::cuda_sm90 {

// The tiles are as measured: 128 keys at a time, or 80 where registers and shared memory reach no
// further. Smaller heads and values are padded with zeros, which the copy engine makes.
template <class T>
struct Row64 : ForwardRow<T, 64> {
  // Three warpgroups hide more of the exponentials. Four places of each fit beside them.
  static constexpr int kKeys = 128, kWarpgroups = 3, kKeyStages = 4, kValueStages = 4;
};
template <class T>
struct Row64Few : Row64<T> {
  // Calls with few tiles are done sooner by two warpgroups (see few_tiles).
  static constexpr int kWarpgroups = 2;
};
template <class T>
struct Row64Changed : ForwardRow<T, 64> {
  // Three warpgroups have not the registers to change scores.
  static constexpr int kKeys = 128, kWarpgroups = 2;
  static constexpr bool kScoreChange = true;
};
template <class T, int kWidth>
struct Row128 : ForwardRow<T, kWidth> {
  // Values wait half a step longer than keys, and get the third place that shared memory has left.
  static constexpr int kKeys = 128, kWarpgroups = 2, kValueStages = 3;
};
template <class T>
struct Row128Changed : Row128<T, 128> {
  static constexpr bool kScoreChange = true;
};
template <class T>
struct Row192Narrow : ForwardRow<T, 192, 128> {
  // Where values are narrower, two tiles of queries fit beside blocks of 96 keys.
  static constexpr int kKeys = 96, kWarpgroups = 2;
};
template <class T, int kWidth>
struct Row256 : ForwardRow<T, kWidth> {
  // Registers hold 80 scores a row beside the sums.
  static constexpr int kKeys = 80, kWarpgroups = 2;
};
template <class T>
struct Row256Changed : Row256<T, 256> {
  static constexpr bool kScoreChange = true;
};

namespace {

using attention::Mask;
using attention::Problem;

// The workspace holds the index of the next tile and, if they are rotated, q and k.
struct Scratch {
  size_t q = 256, k = 256, bytes = 256;

  explicit Scratch(const AttentionFwd& a) {
    if (!a.rotary_cos) return;
    k = q + WorkspaceParts::rounded(a.q.numel() * size_of(a.q.dtype));
    bytes = k + WorkspaceParts::rounded(a.k.numel() * size_of(a.k.dtype));
  }
};

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
  describe_call(a, p, Tile::kQueries, device.multiprocessors, &f);
  f.slopes = attention::slope_view(a.alibi_slopes);
  f.slope_type = a.alibi_slopes.dtype;
  f.softcap = static_cast<float>(p.softcap);
  f.slack = Tile::kScoreChange ? 8.f : 8.f / (f.scale * cuda::kLog2E);
  if (f.last_first && f.tiles > device.multiprocessors) {
    f.next_tile = exec.workspace<int>();
    FK_RETURN_IF_ERROR(
        cuda::check(cudaMemsetAsync(f.next_tile, 0, sizeof(int), stream), "cudaMemsetAsync"));
  }
  const unsigned blocks = static_cast<unsigned>(std::min(device.multiprocessors, f.tiles));
  return cuda::launch_early(attention_forward<Tile>, "attention_forward",
                            {blocks, Tile::kThreads, Tile::kSharedBytes}, stream, f);
}

// Returns whether tiles of two warpgroups are done sooner than tiles of three, which are 1.2 times
// as fast if there is enough to do: where there are few tiles, larger ones leave multiprocessors
// idle.
bool few_tiles(const Problem& p, int multiprocessors) {
  if (p.packed) return false;
  const auto rounds = [&](int queries) {
    const double tiles =
        static_cast<double>(p.batch * p.heads * ceil_div(p.q_len, queries)) / multiprocessors;
    // Under a mask tiles are half as long on average, and the longest come first.
    return p.mask.unlimited() ? std::ceil(tiles) : std::max(1., tiles / 2);
  };
  return 1.25 * 128 * rounds(128) < 192 * rounds(192);
}

template <class T>
Status run_changed(const AttentionFwd& a, const Exec& exec, int64_t width) {
  if (width <= 64) return launch<ForwardTile<Row64Changed<T>>>(a, exec);
  if (width <= 128) return launch<ForwardTile<Row128Changed<T>>>(a, exec);
  return launch<ForwardTile<Row256Changed<T>>>(a, exec);
}

template <class T>
Status run_scaled(const AttentionFwd& a, const Exec& exec, int64_t width) {
  const Problem p = attention::problem_of(a);
  if (width <= 64) {
    return few_tiles(p, cuda::device_properties(a.q.device_id).multiprocessors)
               ? launch<ForwardTile<Row64Few<T>>>(a, exec)
               : launch<ForwardTile<Row64<T>>>(a, exec);
  }
  if (width <= 96) return launch<ForwardTile<Row128<T, 96>>>(a, exec);
  if (width <= 128) return launch<ForwardTile<Row128<T, 128>>>(a, exec);
  if (width > 192) return launch<ForwardTile<Row256<T, 256>>>(a, exec);
  return p.value_dim <= 128 ? launch<ForwardTile<Row192Narrow<T>>>(a, exec)
                            : launch<ForwardTile<Row256<T, 192>>>(a, exec);
}

bool changes_scores(const AttentionFwd& a) { return a.softcap > 0 || a.alibi_slopes; }

template <class T>
Status run_type(const AttentionFwd& a, const Exec& exec) {
  const Problem p = attention::problem_of(a);
  const int64_t width = std::max(p.head_dim, p.value_dim);
  return changes_scores(a) ? run_changed<T>(a, exec, width) : run_scaled<T>(a, exec, width);
}

}  // namespace

bool aligned(const AttentionFwd& a) { return all_aligned({&a.q, &a.k, &a.v, &a.out}); }

bool takes(const AttentionFwd& a) {
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

size_t workspace(const AttentionFwd& a) { return Scratch(a).bytes; }

Status run(const AttentionFwd& a, const Exec& exec) {
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
