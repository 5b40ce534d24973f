// Attention's backward on Hopper: what runs around the main kernel (cuda_sm90_backward.cuh), and
// the host's side.
//   prepare_kernel: delta = rowsum(dout * out) - dlse and lse, in blocks as the main kernel loads
//     them; zeroes the sum of dQ. Reads dout and out once, writes 4 bytes per element of q.
//   convert_kernel: dQ from float, in the order of the registers, to rows of q's type. Reads 4 and
//     writes 2 bytes per element of q.
#include <algorithm>
#include <cstddef>

#include "core/workspace.h"
#include "cuda/convert.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/launch.h"
#include "cuda/math.cuh"
#include "cuda/tma.h"
#include "ops/attention/cuda_sm90_backward.cuh"

namespace fk::cuda_sm90 {

namespace backward {
namespace {

struct RowParams {
  attention::Problem problem;
  attention::View dout, out, lse, dlse, dq;
  float* sum;
  float* stats;
  int* next_tile;
  int* turns;
  int64_t slots;
  int heads, m_blocks;
  float scale;
};

// Which rows a slot of the workspace holds.
struct Rows {
  int64_t batch;
  int64_t begin;
  int64_t count;  // may be negative: none
};

template <int kM>
__device__ __forceinline__ Rows rows_of(const RowParams& p, int64_t slot) {
  int64_t batch, first_slot;
  if (p.problem.packed) {
    int low = 0, high = static_cast<int>(p.problem.batch) - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (p.problem.sequence(middle).q_begin / kM + middle <= slot) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    batch = low;
    first_slot = p.problem.sequence(low).q_begin / kM + low;
  } else {
    batch = slot / p.m_blocks;
    first_slot = batch * p.m_blocks;
  }
  const attention::Sequence s = p.problem.sequence(batch);
  const int64_t first = (slot - first_slot) * kM, left = s.q_len - first;
  return {p.problem.packed ? 0 : batch, s.q_begin + first, left < kM ? left : kM};
}

constexpr int kRowThreads = 256;

// A block of threads per block of queries and head. Rows that are not there, and queries that see
// no key, get lse = inf: their P is 0.
template <class T, int kD, int kM>
__global__ void __launch_bounds__(kRowThreads) prepare_kernel(const RowParams p) {
  constexpr int kLanes = kD / 8, kRowsAtATime = kRowThreads / kLanes, kRounds = kM / kRowsAtATime;
  static_assert(kM % kRowsAtATime == 0);
  const int64_t slot = blockIdx.x / p.heads;
  const int head = static_cast<int>(blockIdx.x - slot * p.heads);
  const int64_t block = head * p.slots + slot;
  const int lane = threadIdx.x % kLanes;
  cuda::wait_for_earlier_kernels();
  const Rows rows = rows_of<kM>(p, slot);
  const T* dout = static_cast<const T*>(p.dout.data) + rows.batch * p.dout.batch +
                  rows.begin * p.dout.row + head * p.dout.head + lane * 8;
  const T* out = static_cast<const T*>(p.out.data) + rows.batch * p.out.batch +
                 rows.begin * p.out.row + head * p.out.head + lane * 8;
  cuda::Vec<T, 8> x[kRounds], y[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int row = threadIdx.x / kLanes + i * kRowsAtATime;
    x[i] = y[i] = {};
    if (row < rows.count) {
      x[i] = cuda::load<8>(dout + row * p.dout.row);
      y[i] = cuda::load<8>(out + row * p.out.row);
    }
  }
  if (p.sum != nullptr) {
    float4* sum = reinterpret_cast<float4*>(p.sum + block * (kM * kD));
#pragma unroll
    for (int i = 0; i < kM * kD / 4 / kRowThreads; ++i) {
      sum[threadIdx.x + i * kRowThreads] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }
  if (p.turns != nullptr && threadIdx.x < kConsumerWarps) {
    p.turns[block * kConsumerWarps + threadIdx.x] = 0;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.next_tile = 0;
  cuda::let_next_kernel_start();
  float* stats = p.stats + block * 2 * kM;
  const float* lse = static_cast<const float*>(p.lse.data) + rows.batch * p.lse.batch +
                     rows.begin * p.lse.row + head * p.lse.head;
  const float* dlse = static_cast<const float*>(p.dlse.data) + rows.batch * p.dlse.batch +
                      rows.begin * p.dlse.row + head * p.dlse.head;
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int row = threadIdx.x / kLanes + i * kRowsAtATime;
    float a[8], b[8];
    cuda::unpack(x[i], a);
    cuda::unpack(y[i], b);
    float delta = 0;
#pragma unroll
    for (int e = 0; e < 8; ++e) delta = fmaf(a[e], b[e], delta);
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
      delta += __shfl_xor_sync(~0u, delta, step);
    }
    if (lane == 0) {
      float neg_lse = -INFINITY;
      if (row < rows.count) {
        const float value = lse[row * p.lse.row];
        if (value != -INFINITY) neg_lse = -value * cuda::kLog2E;
        if (p.dlse.data != nullptr) delta -= dlse[row * p.dlse.row];
      }
      stats[row] = neg_lse;
      stats[kM + row] = neg_lse == -INFINITY ? 0.f : delta;
    }
  }
}

// A block of threads per block of queries and head: through shared memory, to turn the order of the
// registers (Consumer::add_dq) into rows.
template <class T, int kD, int kM>
__global__ void __launch_bounds__(kRowThreads) convert_kernel(const RowParams p) {
  constexpr int kGroups = kD == 64 ? kM / 16 : kM / 8;  // of 8 queries, in a warp's part
  constexpr int kPitch = kD + 4;  // lanes that differ by two rows or one column: 32 banks
  __shared__ float tile[kM * kPitch];
  const int64_t slot = blockIdx.x / p.heads;
  const int head = static_cast<int>(blockIdx.x - slot * p.heads);
  cuda::let_next_kernel_start();
  cuda::wait_for_earlier_kernels();
  const Rows rows = rows_of<kM>(p, slot);
  if (rows.count <= 0) return;
  const float4* sum = reinterpret_cast<const float4*>(p.sum + (head * p.slots + slot) * (kM * kD));
  constexpr int kRounds = kM * kD / 4 / kRowThreads;
  float4 x[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) x[i] = __ldcs(sum + threadIdx.x + i * kRowThreads);
#pragma unroll
  for (int j = 0; j < kRounds; ++j) {
    const int f = threadIdx.x + j * kRowThreads;
    const int lane = f % 32, i = f / 32 % kGroups, warp = f / 32 / kGroups;
    const int column = (kD == 64 ? 0 : warp / 4 * 64) + warp % 4 * 16 + lane / 4;
    const int row = (kD == 64 ? warp / 4 * (kM / 2) : 0) + i * 8 + lane % 4 * 2;
    tile[row * kPitch + column] = x[j].x * p.scale;
    tile[(row + 1) * kPitch + column] = x[j].y * p.scale;
    tile[row * kPitch + column + 8] = x[j].z * p.scale;
    tile[(row + 1) * kPitch + column + 8] = x[j].w * p.scale;
  }
  __syncthreads();
  T* dq = static_cast<T*>(p.dq.data) + rows.batch * p.dq.batch + rows.begin * p.dq.row +
          head * p.dq.head;
#pragma unroll
  for (int f = threadIdx.x; f < kM * (kD / 8); f += kRowThreads) {
    const int row = f / (kD / 8), column = f % (kD / 8) * 8;
    if (row >= rows.count) break;
    const float4 a = *reinterpret_cast<const float4*>(tile + row * kPitch + column);
    const float4 b = *reinterpret_cast<const float4*>(tile + row * kPitch + column + 4);
    const float values[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    cuda::store(dq + row * p.dq.row + column, cuda::pack<T>(values));
  }
}

// Queries a block: what the registers hold.
constexpr int queries(int64_t d, bool features) { return d == 64 && !features ? 128 : 64; }

bool has_features(const AttentionBwd& a) { return a.alibi_slopes || a.softcap != 0; }

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

struct Plan {
  attention::Problem problem;
  int64_t m_blocks, n_blocks, slots, blocks, tiles;
  int64_t turns, stats, sum, bytes;  // where they begin in the workspace; the next tile at 0

  explicit Plan(const AttentionBwd& a) : problem(attention::problem_of(a)) {
    const int m = queries(problem.head_dim, has_features(a));
    m_blocks = round_up(problem.q_len, m) / m;
    n_blocks = round_up(problem.k_len, kN) / kN;
    slots = problem.packed ? problem.q_len / m + problem.batch : problem.batch * m_blocks;
    blocks = slots * problem.heads;
    tiles = (problem.packed ? problem.k_len / kN + problem.batch : problem.batch * n_blocks) *
            problem.kv_heads;
    turns = 256;
    stats = turns + WorkspaceParts::rounded(blocks * kConsumerWarps * 4);
    sum = stats + WorkspaceParts::rounded(blocks * m * 2 * 4);
    bytes = sum + (a.dq ? blocks * m * problem.head_dim * 4 : 0);
  }
};

// Rows of a tensor (batch, length, heads, columns) as boxes of 64 columns of one head.
Status map_rows(CUtensorMap* map, const Tensor& t, int rows) {
  const attention::View v = attention::view(t);
  cuda::TensorMapShape shape;
  shape.dims = 4;
  const int64_t sizes[4] = {t.size(-1), t.size(-2), t.size(-3), t.ndim == 4 ? t.size(0) : 1};
  const int64_t strides[4] = {1, v.head, v.row, v.batch};
  const int box[4] = {64, 1, rows, 1};
  for (int i = 0; i < 4; ++i) {
    shape.sizes[i] = sizes[i];
    shape.strides[i] = strides[i] * 2;
    shape.box[i] = box[i];
  }
  return cuda::make_tensor_map(map, t.data, t.dtype, shape);
}

template <class T, int kD, bool kFeatures>
Status launch(const AttentionBwd& a, const Exec& exec) {
  constexpr int kM = queries(kD, kFeatures);
  const Plan plan(a);
  const attention::Problem& problem = plan.problem;
  const bool deterministic = a.deterministic || exec.deterministic();
  const cudaStream_t stream = cuda::stream_of(exec);
  char* workspace = exec.workspace<char>();

  RowParams rows = {};
  rows.problem = problem;
  rows.dout = attention::view(a.dout);
  rows.out = attention::view(a.out);
  rows.lse = attention::row_view(a.lse);
  rows.dlse = attention::row_view(a.dlse);
  rows.dq = attention::view(a.dq);
  rows.sum = a.dq ? reinterpret_cast<float*>(workspace + plan.sum) : nullptr;
  rows.stats = reinterpret_cast<float*>(workspace + plan.stats);
  rows.next_tile = reinterpret_cast<int*>(workspace);
  rows.turns = deterministic ? reinterpret_cast<int*>(workspace + plan.turns) : nullptr;
  rows.slots = plan.slots;
  rows.heads = static_cast<int>(problem.heads);
  rows.m_blocks = static_cast<int>(plan.m_blocks);
  rows.scale = static_cast<float>(problem.scale);

  Params p = {};
  FK_RETURN_IF_ERROR(map_rows(&p.q, a.q, kM));
  FK_RETURN_IF_ERROR(map_rows(&p.dout, a.dout, kM));
  FK_RETURN_IF_ERROR(map_rows(&p.k, a.k, kN));
  FK_RETURN_IF_ERROR(map_rows(&p.v, a.v, kN));
  p.problem = problem;
  p.dk = attention::view(a.dk);
  p.dv = attention::view(a.dv);
  p.slopes = attention::slope_view(a.alibi_slopes);
  p.dq = rows.sum;
  p.stats = rows.stats;
  p.next_tile = rows.next_tile;
  p.turns = rows.turns;
  p.slots = static_cast<int>(plan.slots);
  p.tiles = static_cast<int>(plan.tiles);
  p.m_blocks = rows.m_blocks;
  p.n_blocks = static_cast<int>(plan.n_blocks);
  p.kv_heads = static_cast<int>(problem.kv_heads);
  p.group = static_cast<int>(problem.group());
  p.left = static_cast<int>(std::min<int64_t>(problem.mask.left, kFar));
  p.right = static_cast<int>(std::min<int64_t>(problem.mask.right, kFar));
  p.scale = rows.scale;
  p.scale_log2 = static_cast<float>(problem.scale * 1.4426950408889634);
  p.softcap = static_cast<float>(problem.softcap);
  // Where all key blocks take as long, one head after another: what is in use stays in the L2
  // cache. Under a causal mask the first take the longest, and beginning a long one last would
  // leave most of the chip idle; so as many heads together as have their q, dout and sum of dQ in
  // the cache, and the shorter half of the key blocks at the very end.
  p.heads_together = 1;
  p.late = p.n_blocks;
  if (p.right < kFar && p.left >= kFar && !deterministic) {
    const int64_t head_bytes = plan.m_blocks * kM * kD * 8 * problem.group();
    p.heads_together = static_cast<int>(std::max<int64_t>(1, (int64_t{24} << 20) / head_bytes));
    p.late = p.n_blocks - p.n_blocks / 2;
  }
  // In a fixed order, each key block of a causal mask begins where the one after it has just been.
  p.descending = deterministic && p.right < kFar;

  const dim3 row_blocks(static_cast<unsigned>(plan.blocks));
  FK_RETURN_IF_ERROR(cuda::launch_early(prepare_kernel<T, kD, kM>, "attention_bwd prepare",
                                        {row_blocks, kRowThreads}, stream, rows));
  constexpr int kShared = kSharedBytes<kD, kM>;
  auto* kernel = attention_backward_kernel<T, kD, kM, kFeatures>;
  const cudaError_t allowed =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  FK_RETURN_IF_ERROR(cuda::check(allowed, "attention_bwd shared memory"));
  const int processors = cuda::device_properties(a.q.device_id).multiprocessors;
  FK_RETURN_IF_ERROR(cuda::launch_early(
      kernel, "attention_bwd",
      {dim3(static_cast<unsigned>(std::min(p.tiles, processors))), kThreads, kShared}, stream, p));
  if (a.dq) {
    FK_RETURN_IF_ERROR(cuda::launch_early(convert_kernel<T, kD, kM>, "attention_bwd convert",
                                          {row_blocks, kRowThreads}, stream, rows));
  }
  return {};
}

template <class T>
Status launch_type(const AttentionBwd& a, const Exec& exec) {
  if (a.q.size(-1) == 128) {
    return has_features(a) ? launch<T, 128, true>(a, exec) : launch<T, 128, false>(a, exec);
  }
  return has_features(a) ? launch<T, 64, true>(a, exec) : launch<T, 64, false>(a, exec);
}

// Strides that the copy engine and accesses of 16 bytes take.
bool strides_fit(const Tensor& t) {
  if (t.stride(-1) != 1) return false;
  for (int i = 0; i + 1 < t.ndim; ++i) {
    if (!cuda::tensor_map_takes(t.shape[i], t.strides[i] * 2)) return false;
  }
  return true;
}

template <class Condition>
bool all_tensors(const AttentionBwd& a, Condition condition) {
  for (const Tensor* t : {&a.dout, &a.q, &a.k, &a.v, &a.out, &a.dq, &a.dk, &a.dv}) {
    if (*t && !condition(*t)) return false;
  }
  return true;
}

}  // namespace
}  // namespace backward

bool accepts(const AttentionBwd& a) {
  const DType dtype = a.q.dtype;
  if (dtype != DType::kFloat16 && dtype != DType::kBFloat16) return false;
  if (cuda::device_properties(a.q.device_id).code < 90) return false;
  const int64_t d = a.q.size(-1);
  if ((d != 64 && d != 128) || a.v.size(-1) != d) return false;
  if (a.bias || a.rotary_cos || a.dsinks) return false;
  if (a.q.numel() == 0 || a.k.numel() == 0) return false;
  if (a.alibi_slopes && a.alibi_slopes.dtype != DType::kFloat32) return false;
  const backward::Plan plan(a);
  if (plan.problem.batch == 0) return false;
  if (std::max(plan.problem.q_len, plan.problem.k_len) >= backward::kFar) return false;
  if (std::max(plan.blocks, plan.tiles) >= (int64_t{1} << 30)) return false;
  return backward::all_tensors(a, backward::strides_fit);
}

size_t workspace(const AttentionBwd& a) {
  // Also what the portable kernel needs, which takes some calls that `accepts` cannot tell.
  return std::max(static_cast<size_t>(backward::Plan(a).bytes), cuda::workspace(a));
}

Status run(const AttentionBwd& a, const Exec& exec) {
  const bool aligned = backward::all_tensors(
      a, [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data) % 16 == 0; });
  // In a fixed order warps wait for the key blocks before theirs, for ever if offsets fall.
  const bool waits = a.cu_seqlens_q && (a.deterministic || exec.deterministic());
  if (!aligned || waits) return cuda::run(a, exec);
  return a.q.dtype == DType::kFloat16 ? backward::launch_type<__half>(a, exec)
                                      : backward::launch_type<__nv_bfloat16>(a, exec);
}

}  // namespace fk::cuda_sm90
