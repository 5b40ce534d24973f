// Attention's backward on Hopper: what runs around the main kernel (cuda_sm90_backward.cuh), and
// the host's side.
//   prepare_kernel: delta = rowsum(dout * out) - dlse and lse, in blocks as the main kernel loads
//     them; zeroes the sums of dQ and the counters. Reads dout and out once.
//   convert_kernel: for short sequences, where the main kernel has no time for it beside the
//     multiplications: dQ from sums in the order of the registers to rows of q's type.
//   sinks_kernel: the gradient of the sinks, from what prepare_kernel wrote.
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
  float4* zero;  // sums and counters
  int64_t zeroes;
  const float* sum;
  float* stats;
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
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x; i < p.zeroes;
       i += static_cast<int64_t>(gridDim.x) * kRowThreads) {
    p.zero[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
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
  // The head's place among the sums: Params::sum.
  const int64_t block = p.problem.packed
                            ? head * p.slots + slot
                            : (slot / p.m_blocks * p.heads + head) * p.m_blocks + slot % p.m_blocks;
  const float4* sum = reinterpret_cast<const float4*>(p.sum + block * (kM * kD));
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

// dsinks = -sum(exp(sink - lse) * delta): a block of threads per head, so that the order is fixed.
template <class P>
__global__ void __launch_bounds__(kRowThreads)
    sinks_kernel(const float* stats, int64_t slots, int rows, const P* sinks, int64_t sink_stride,
                 P* dsinks, int64_t dsink_stride) {
  const int head = static_cast<int>(blockIdx.x);
  const float sink = cuda::to_float(sinks[head * sink_stride]) * cuda::kLog2E;
  const float* block = stats + head * slots * 2 * rows;
  float total = 0;
  for (int64_t i = threadIdx.x; i < slots * rows; i += kRowThreads) {
    const int64_t slot = i / rows;
    const float* entry = block + slot * rows + i;  // lse and delta of a block stand side by side
    total -= exp2f(sink + entry[0]) * entry[rows];
  }
  __shared__ float partial[kRowThreads];
  partial[threadIdx.x] = total;
  __syncthreads();
  for (int step = kRowThreads / 2; step > 0; step /= 2) {
    if (static_cast<int>(threadIdx.x) < step) partial[threadIdx.x] += partial[threadIdx.x + step];
    __syncthreads();
  }
  if (threadIdx.x == 0) dsinks[head * dsink_stride] = cuda::from_float<P>(partial[0]);
}

bool has_features(const AttentionBwd& a) { return a.alibi_slopes || a.softcap != 0; }

// Queries a block: what the registers hold. 80 of them, at D 128, only without masks, in any order,
// and where not much of the last block is left empty.
int queries(const AttentionBwd& a, const attention::Problem& problem, bool deterministic) {
  if (has_features(a)) return 64;
  if (problem.head_dim == 64) return 128;
  if (deterministic || !problem.mask.unlimited()) return 64;
  // Of packed sequences only the average length is known here.
  if (problem.packed) return problem.q_len >= 2048 * problem.batch ? 80 : 64;
  return problem.k_len % kN == 0 && (problem.q_len + 79) / 80 * 80 * 32 <= problem.q_len * 33 ? 80
                                                                                              : 64;
}

int64_t divide_up(int64_t x, int64_t by) { return (x + by - 1) / by; }

struct Plan {
  attention::Problem problem;
  int m;  // queries a block
  int64_t m_blocks, n_blocks, slots, blocks, tiles;
  int64_t heads_together, last_heads, ring;  // Params
  bool convert_beside;                       // in the main kernel, not after it
  // Where they begin in the workspace, the counters at 0. All before `stats` is 0 at the start.
  int64_t done, converted, turns, sum, stats, bytes;

  Plan(const AttentionBwd& a, bool deterministic) : problem(attention::problem_of(a)) {
    m = queries(a, problem, deterministic);
    m_blocks = divide_up(problem.q_len, m);
    n_blocks = divide_up(problem.k_len, kN);
    slots = problem.packed ? problem.q_len / m + problem.batch : problem.batch * m_blocks;
    blocks = slots * problem.heads;
    tiles = (problem.packed ? problem.k_len / kN + problem.batch : problem.batch * n_blocks) *
            problem.kv_heads;
    const int64_t heads = problem.batch * problem.kv_heads;
    const int64_t head_sums = m_blocks * problem.group();
    // Of packed sequences, those of a head are in order one after another.
    order_tiles(problem.packed ? problem.kv_heads : heads, head_sums * m * problem.head_dim * 4,
                deterministic, a.q.device_id);
    const int64_t sums = problem.packed ? blocks : ring * head_sums;
    done = 256;
    converted = done + WorkspaceParts::rounded(heads * 4);
    turns = converted + WorkspaceParts::rounded(heads * 4);
    sum = turns + (deterministic ? WorkspaceParts::rounded(sums * kConsumerWarps * 4) : 0);
    stats = sum + (a.dq ? sums * m * problem.head_dim * 4 : 0);
    bytes = stats + WorkspaceParts::rounded(blocks * m * 2 * 4);
  }

 private:
  // Where all key blocks take as long, one head after another: what is in use stays in the L2
  // cache. Under a causal mask the first take the longest, and beginning a long one last would
  // leave most of the chip idle: some heads together, and at the end as many as make two tiles a
  // multiprocessor.
  void order_tiles(int64_t heads, int64_t head_bytes, bool deterministic, int device) {
    constexpr int64_t kTogether = 4 << 20, kRing = 24 << 20;  // bytes of sums
    const int64_t processors = cuda::device_properties(device).multiprocessors;
    const int64_t row = std::max<int64_t>(n_blocks, 1);
    heads_together = 1;
    last_heads = heads;
    if (problem.mask.right < kFar && problem.mask.left >= kFar && !deterministic) {
      heads_together = std::max<int64_t>(1, kTogether / std::max<int64_t>(head_bytes, 1));
      const int64_t sequence_row = std::max<int64_t>(1, problem.packed ? row / problem.batch : row);
      last_heads = std::max<int64_t>(0, heads - divide_up(2 * processors, sequence_row));
    }
    // Never less than what is taken together, or heads would wait for each other; and long enough
    // that tiles hardly ever wait for the conversion of the head that had their place before.
    ring = std::max(heads_together, heads - last_heads) + heads_together +
           2 * divide_up(processors, row);
    ring = std::max(ring, kRing / std::max<int64_t>(head_bytes, 1));
    ring = std::min(ring, heads);
    // There has to be enough to multiply beside it: key blocks that a query sees.
    const int64_t seen = problem.mask.unlimited() ? n_blocks : n_blocks / 2;
    convert_beside = seen > 4 * (problem.packed ? problem.batch : 1);
    if (deterministic || !convert_beside) ring = heads;
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

template <class P>
Status launch_sinks(const AttentionBwd& a, const Plan& plan, const float* stats, int rows,
                    cudaStream_t stream) {
  sinks_kernel<P><<<static_cast<unsigned>(plan.problem.heads), kRowThreads, 0, stream>>>(
      stats, plan.slots, rows, a.sinks.ptr<P>(), a.sinks.stride(0), a.dsinks.ptr<P>(),
      a.dsinks.stride(0));
  return cuda::check_launch("attention_bwd sinks");
}

template <class T, int kD, int kM, Kind kKind>
Status launch(const AttentionBwd& a, const Exec& exec) {
  const bool deterministic = a.deterministic || exec.deterministic();
  const Plan plan(a, deterministic);
  const attention::Problem& problem = plan.problem;
  const cudaStream_t stream = cuda::stream_of(exec);
  char* workspace = exec.workspace<char>();

  RowParams rows = {};
  rows.problem = problem;
  rows.dout = attention::view(a.dout);
  rows.out = attention::view(a.out);
  rows.lse = attention::row_view(a.lse);
  rows.dlse = attention::row_view(a.dlse);
  rows.dq = attention::view(a.dq);
  rows.scale = static_cast<float>(problem.scale);
  rows.zero = reinterpret_cast<float4*>(workspace);
  rows.zeroes = plan.stats / 16;
  rows.stats = reinterpret_cast<float*>(workspace + plan.stats);
  rows.slots = plan.slots;
  rows.heads = static_cast<int>(problem.heads);
  rows.m_blocks = static_cast<int>(plan.m_blocks);

  Params p = {};
  FK_RETURN_IF_ERROR(map_rows(&p.q, a.q, kM));
  FK_RETURN_IF_ERROR(map_rows(&p.dout, a.dout, kM));
  FK_RETURN_IF_ERROR(map_rows(&p.k, a.k, kN));
  FK_RETURN_IF_ERROR(map_rows(&p.v, a.v, kN));
  p.problem = problem;
  p.dk = attention::view(a.dk);
  p.dv = attention::view(a.dv);
  p.slopes = attention::slope_view(a.alibi_slopes);
  p.dq = attention::view(a.dq);
  p.sum = a.dq ? reinterpret_cast<float*>(workspace + plan.sum) : nullptr;
  rows.sum = p.sum;
  p.stats = rows.stats;
  p.counters = reinterpret_cast<Counters*>(workspace);
  if (a.dq && plan.convert_beside) p.done = reinterpret_cast<int*>(workspace + plan.done);
  p.converted = reinterpret_cast<int*>(workspace + plan.converted);
  p.turns = deterministic ? reinterpret_cast<int*>(workspace + plan.turns) : nullptr;
  p.ring = static_cast<int>(plan.ring);
  p.sum_stride = static_cast<int>(problem.packed ? plan.slots : plan.m_blocks);
  p.heads_together = static_cast<int>(plan.heads_together);
  p.last_heads = static_cast<int>(plan.last_heads);
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
  // In a fixed order, each key block of a causal mask begins where the one after it has just been.
  p.descending = deterministic && p.right < kFar;

  const dim3 row_blocks(static_cast<unsigned>(plan.blocks));
  FK_RETURN_IF_ERROR(cuda::launch_early(prepare_kernel<T, kD, kM>, "attention_bwd prepare",
                                        {row_blocks, kRowThreads}, stream, rows));
  constexpr int kShared = kSharedBytes<kD, kM>;
  auto* kernel = attention_backward_kernel<T, kD, kM, kKind>;
  const cudaError_t allowed =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  FK_RETURN_IF_ERROR(cuda::check(allowed, "attention_bwd shared memory"));
  const int processors = cuda::device_properties(a.q.device_id).multiprocessors;
  FK_RETURN_IF_ERROR(cuda::launch_early(
      kernel, "attention_bwd",
      {dim3(static_cast<unsigned>(std::min(p.tiles, processors))), kThreads, kShared}, stream, p));
  if (a.dq && !plan.convert_beside) {
    FK_RETURN_IF_ERROR(cuda::launch_early(convert_kernel<T, kD, kM>, "attention_bwd convert",
                                          {row_blocks, kRowThreads}, stream, rows));
  }
  if (!a.dsinks) return {};
  switch (a.sinks.dtype) {
    case DType::kFloat16:
      return launch_sinks<__half>(a, plan, rows.stats, kM, stream);
    case DType::kBFloat16:
      return launch_sinks<__nv_bfloat16>(a, plan, rows.stats, kM, stream);
    default:
      return launch_sinks<float>(a, plan, rows.stats, kM, stream);
  }
}

template <class T>
Status launch_type(const AttentionBwd& a, const Exec& exec) {
  const attention::Problem problem = attention::problem_of(a);
  const bool features = has_features(a);
  if (problem.head_dim == 64) {
    if (features) return launch<T, 64, 64, Kind::kFeatures>(a, exec);
    if (problem.packed) return launch<T, 64, 128, Kind::kPacked>(a, exec);
    return launch<T, 64, 128, Kind::kDense>(a, exec);
  }
  if (features) return launch<T, 128, 64, Kind::kFeatures>(a, exec);
  if (queries(a, problem, a.deterministic || exec.deterministic()) == 80) {
    return problem.packed ? launch<T, 128, 80, Kind::kPacked>(a, exec)
                          : launch<T, 128, 80, Kind::kDense>(a, exec);
  }
  return problem.packed ? launch<T, 128, 64, Kind::kPacked>(a, exec)
                        : launch<T, 128, 64, Kind::kDense>(a, exec);
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
  if (a.bias || a.rotary_cos) return false;
  if (a.q.numel() == 0 || a.k.numel() == 0) return false;
  if (a.alibi_slopes && a.alibi_slopes.dtype != DType::kFloat32) return false;
  if (a.sinks && a.sinks.dtype == DType::kFloat64) return false;
  const backward::Plan plan(a, false);
  if (plan.problem.batch == 0) return false;
  if (std::max(plan.problem.q_len, plan.problem.k_len) >= backward::kFar) return false;
  if (std::max(plan.blocks, plan.tiles) >= (int64_t{1} << 27)) return false;
  return backward::all_tensors(a, backward::strides_fit);
}

size_t workspace(const AttentionBwd& a) {
  // Also what the portable kernel needs, which takes some calls that `accepts` cannot tell.
  const int64_t own = std::max(backward::Plan(a, false).bytes, backward::Plan(a, true).bytes);
  return std::max(static_cast<size_t>(own), cuda::workspace(a));
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
