// This file says which calls of attention's forward with 8-bit floats run on Hopper's kernel, and
// with which tiles. The kernel is in sm90/float8.cuh, the pass ahead of it in
// sm90/float8_values.cuh.
#include <algorithm>

#include "core/workspace.h"
#include "cuda/launch.h"
#include "ops/attention/sm90/float8.cuh"
#include "ops/attention/sm90/tensors.h"

namespace fk::cuda_sm90 {

// The tiles are as measured.
struct Float8Row64 {
  // Small heads leave room for three warpgroups and four blocks at a time.
  static constexpr int kWidth = 64, kKeys = 128, kWarpgroups = 3, kStages = 4;
};
struct Float8Row128 {
  static constexpr int kWidth = 128, kKeys = 192, kWarpgroups = 2, kStages = 2;
};
struct Float8Row128Long : Float8Row128 {
  // Long rows take larger blocks, with turns at exponentials.
  static constexpr int kKeys = 224;
};
struct Float8Row256 {
  // Shared memory holds two blocks of 96 keys beside the queries.
  static constexpr int kWidth = 256, kKeys = 96, kWarpgroups = 2, kStages = 2;
};

namespace {

using attention::Problem;

// Packed values lie in blocks: so many of a sequence, and then so many of a call.
int64_t blocks_per_sequence(const Problem& p, int keys) { return ceil_div(p.k_len, keys); }
int64_t value_blocks(const Problem& p, int keys) {
  const int64_t blocks = blocks_per_sequence(p, keys);
  return p.packed ? blocks + p.batch : blocks * p.batch;
}

// The workspace begins with the index of the next tile, then come the values.
constexpr size_t kValuesOffset = 256;
template <class Tile>
size_t workspace_of(const Problem& p) {
  return kValuesOffset +
         WorkspaceParts::rounded(value_blocks(p, Tile::kKeys) * p.kv_heads * Tile::kVBytes);
}

template <class Tile>
Status launch_float8(const AttentionFwd& a, const Exec& exec) {
  const Problem p = attention::problem_of(a);
  const cuda::DeviceProperties& device = cuda::device_properties(a.q.device_id);
  const cudaStream_t stream = cuda::stream_of(exec);
  Float8Arguments arguments = {};
  ForwardArguments& f = arguments.forward;
  FK_RETURN_IF_ERROR(make_map(&f.q, a.q, 64));
  FK_RETURN_IF_ERROR(make_map(&f.k, a.k, Tile::kKeys));
  if (a.out) FK_RETURN_IF_ERROR(make_map(&f.out, a.out, 64));
  describe_call(a, p, Tile::kQueries, device.multiprocessors, &f);
  if (f.last_first && f.tiles > device.multiprocessors) f.next_tile = exec.workspace<int>();
  arguments.values = exec.workspace<char>() + kValuesOffset;
  arguments.blocks_per_sequence = static_cast<int>(blocks_per_sequence(p, Tile::kKeys));
  arguments.value_blocks = static_cast<int>(value_blocks(p, Tile::kKeys));
  arguments.scales = attention::scales_of(a);

  ValueArguments values = {};
  values.v = attention::view(a.v);
  values.batch = f.batch;
  values.kv_heads = static_cast<int>(p.kv_heads);
  values.k_len = f.k_len;
  values.columns = static_cast<int>(p.value_dim);
  values.packed = p.packed;
  values.cu_k = p.cu_k;
  values.cu_k_stride = f.cu_k_stride;
  values.blocks_per_sequence = arguments.blocks_per_sequence;
  values.to = exec.workspace<char>() + kValuesOffset;
  values.next_tile = f.next_tile;
  FK_RETURN_IF_ERROR(
      cuda::launch_early(pack_values<Tile::kWidth, Tile::kKeys>, "attention pack_values",
                         {static_cast<unsigned>(arguments.value_blocks * values.kv_heads),
                          Tile::kWidth / 4 * Tile::kKeys / 16},
                         stream, values));
  const unsigned blocks = static_cast<unsigned>(std::min(device.multiprocessors, f.tiles));
  return cuda::launch_early(attention_float8<Tile>, "attention_float8",
                            {blocks, Tile::kThreads, Tile::kSharedBytes}, stream, arguments);
}

// Calls use(tile) with the tile for a call.
template <class Use>
auto with_tile(const Problem& p, const Use& use) {
  const int64_t width = std::max(p.head_dim, p.value_dim);
  if (width <= 64) return use(Float8Tile<Float8Row64>());
  if (width <= 128) {
    const int64_t keys = p.packed ? p.k_len / std::max<int64_t>(p.batch, 1) : p.k_len;
    return keys >= 4096 ? use(Float8Tile<Float8Row128Long>()) : use(Float8Tile<Float8Row128>());
  }
  return use(Float8Tile<Float8Row256>());
}

}  // namespace

bool takes_float8(const AttentionFwd& a) {
  if (a.q.dtype != DType::kFloat8E4M3) return false;
  if (cuda::device_properties(a.q.device_id).code < 90) return false;
  if (a.bias || a.softcap > 0 || a.alibi_slopes || a.rotary_cos) return false;
  const Problem p = attention::problem_of(a);
  if (p.head_dim == 0 || p.value_dim == 0 || p.value_dim % 8 != 0) return false;
  if (p.batch == 0 || p.heads == 0 || p.q_len == 0 || p.k_len == 0) return false;
  constexpr int kFewestKeys = 96, kFewestQueries = 128;  // of a tile
  if (p.q_len > kMaxLength || p.k_len > kMaxLength || p.batch * p.heads > kMaxLength ||
      p.batch * p.heads * (p.q_len / kFewestQueries + 1) > kMaxLength ||
      value_blocks(p, kFewestKeys) * p.kv_heads > kMaxLength) {
    return false;
  }
  return copy_engine_takes(a);
}

size_t float8_workspace(const AttentionFwd& a) {
  const Problem p = attention::problem_of(a);
  return with_tile(p, [&](auto tile) { return workspace_of<decltype(tile)>(p); });
}

Status run_float8(const AttentionFwd& a, const Exec& exec) {
  return with_tile(attention::problem_of(a),
                   [&](auto tile) { return launch_float8<decltype(tile)>(a, exec); });
}

}  // namespace fk::cuda_sm90
