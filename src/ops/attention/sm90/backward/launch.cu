// This file holds what runs around the main kernel of attention's backward on Hopper, and the
// launches of a call.
//   prepare_kernel: delta = rowsum(dout * out) - dlse and lse, in blocks as the main kernel loads
//     them; zeroes the sums of dQ and the counters; lists the tiles of packed sequences. Reads dout
//     and out once.
//   convert_kernel: dQ from sums in the order of the registers to rows of q's type, where the main
//     kernel has no time for it beside the multiplications: short sequences, and the last heads.
//   sinks_kernel: the gradient of the sinks, from what prepare_kernel wrote.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/convert.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/math.cuh"
#include "cuda/row_layout.h"
#include "cuda/tma.h"
#include "ops/attention/sm90/backward/launch.h"
#include "ops/attention/sm90/backward/rows.cuh"

namespace fk::cuda_sm90::backward {
namespace {

// Calls function(T()) with the type of the rows.
template <class Function>
__device__ __forceinline__ void with_type(const RowParams& p, Function function) {
  if (p.half) {
    function(__half());
  } else {
    function(__nv_bfloat16());
  }
}

template <class T>
__device__ __forceinline__ void unpack(const uint4& piece, float (&values)[8]) {
  cuda::unpack(*reinterpret_cast<const cuda::Vec<T, 8>*>(&piece), values);
}

// Returns how many blocks of prepare_kernel share a multiprocessor, as many as its loads need.
constexpr int prepare_blocks(int lanes, int m) { return lanes > 16 ? 2 : m == 80 ? 3 : 4; }

// A block of threads takes kM rows of a head, and each of kLanes threads a piece of a row. Rows
// that are not there, and queries that see no key, get lse = inf: their P is 0.
template <int kLanes, int kM>
__global__ void __launch_bounds__(kRowThreads, prepare_blocks(kLanes, kM))
    prepare_kernel(const __grid_constant__ RowParams p) {
  constexpr int kRowsAtATime = kRowThreads / kLanes, kRounds = kM / kRowsAtATime;
  static_assert(kM % kRowsAtATime == 0);
  // The list comes first, then the rows from the last to the first. The main kernel begins with the
  // first, and so finds their dout and sums in the L2 cache.
  const int index = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  cuda::wait_for_earlier_kernels();
  if (index >= p.row_blocks) {
    cuda::let_next_kernel_start();
    // The compiler knows this number up to D 128.
    const int keys = kLanes > 16 ? p.keys : keys_a_block(8 * kLanes);
    list_tiles<kRowThreads>(p.problem, p, {kM, keys}, p.list, index - p.row_blocks,
                            static_cast<int>(gridDim.x) - p.row_blocks);
    return;
  }
  const int slot = index / p.heads, head = index - slot * p.heads, lane = threadIdx.x % kLanes;
  // For packed sequences these are rows of whatever sequences; to look for the sequences first
  // would take longer.
  const bool packed = p.problem.packed;
  const int64_t batch = packed ? 0 : slot / p.m_blocks;
  const int begin = (slot - static_cast<int>(batch) * p.m_blocks) * kM;
  const int count = min(static_cast<int>(p.problem.q_len) - begin, kM);
  const uint16_t* dout = cuda::after_wait(static_cast<const uint16_t*>(p.dout.data)) +
                         batch * p.dout.batch + begin * p.dout.row + head * p.dout.head + lane * 8;
  const uint16_t* out = cuda::after_wait(static_cast<const uint16_t*>(p.out.data)) +
                        batch * p.out.batch + begin * p.out.row + head * p.out.head + lane * 8;
  __shared__ float delta_of[kM];
  float lse = -INFINITY, dlse = 0.f;  // of row threadIdx.x
  if (static_cast<int>(threadIdx.x) < count) {
    const int64_t row = begin + threadIdx.x;
    const auto value = [&](const attention::View& v) {
      return static_cast<const float*>(v.data)[batch * v.batch + row * v.row + head * v.head];
    };
    lse = value(p.lse);
    if (p.dlse.data != nullptr) dlse = value(p.dlse);
  }
  uint4 x[kRounds], y[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int row = threadIdx.x / kLanes + i * kRowsAtATime;
    x[i] = y[i] = {};
    if (row < count && lane * 8 < p.value_columns) {
      x[i] = *reinterpret_cast<const uint4*>(dout + row * p.dout.row);
      y[i] = *reinterpret_cast<const uint4*>(out + row * p.out.row);
    }
  }
  for (int64_t i = static_cast<int64_t>(index) * kRowThreads + threadIdx.x; i < p.zeroes;
       i += static_cast<int64_t>(p.row_blocks) * kRowThreads) {
    p.zero[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  int first = 0, first_begin = 0;
  bool one = false;  // sequence that all these rows are of
  if (packed) {
    first = last_sequence(p, [&](int b) { return begin_of(p, b) <= begin; });
    first_begin = begin_of(p, first);
    one = first_begin <= begin && begin + count <= begin_of(p, first + 1);
    begin_slots<kM>(p, begin, head, first);
  }
  cuda::let_next_kernel_start();
  float delta[kRounds] = {};
  with_type(p, [&](auto type) {
    using T = decltype(type);
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      float a[8], b[8];
      unpack<T>(x[i], a);
      unpack<T>(y[i], b);
#pragma unroll
      for (int e = 0; e < 8; ++e) delta[i] = fmaf(a[e], b[e], delta[i]);
    }
  });
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
      delta[i] += __shfl_xor_sync(~0u, delta[i], step);
    }
    if (lane == 0) delta_of[threadIdx.x / kLanes + i * kRowsAtATime] = delta[i];
  }
  __syncthreads();
  if (threadIdx.x >= kM) return;
  int row = threadIdx.x;
  int64_t block = head * p.slots + slot;
  if (packed) {
    row += begin;
    int s = first, s_begin = first_begin;
    if (!one) {
      while (s + 1 < p.problem.batch && begin_of(p, s + 1) <= row) ++s;
      s_begin = begin_of(p, s);
      if (row < s_begin || row >= begin_of(p, s + 1)) return;  // of no sequence
    }
    row -= s_begin;
    block = head * p.slots + s_begin / kM + s + row / kM;
    row %= kM;
  }
  float* to = p.stats + block * (2 * kM) + row;
  const float neg_lse = lse == -INFINITY ? -INFINITY : -lse * cuda::kLog2E;
  to[0] = neg_lse;
  to[kM] = neg_lse == -INFINITY ? 0.f : delta_of[threadIdx.x] - dlse;
}

// A block of threads takes a block of queries of a head through shared memory, to turn the order of
// the registers (Consumer::add_dq) into rows.
template <int kD, int kM>
__global__ void __launch_bounds__(kRowThreads) convert_kernel(const RowParams p) {
  constexpr int kGroups = kD == 64 ? kM / 16 : kM / 8;  // of 8 queries, in a warp's part
  constexpr int kPitch = kD + 4;  // lanes that differ by two rows or one column: 32 banks
  __shared__ float tile[kM * kPitch];
  // Blocks go from the last to the first, because sums that were added to last are still in the L2
  // cache.
  const int index = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  int slot = index / p.heads, head = index - slot * p.heads;
  int64_t place = p.beside + index;
  if (!p.problem.packed) {  // in the order of the sums
    const int i = p.beside + index, blocks = p.m_blocks * p.group;
    const int pair = i / blocks, batch = pair / p.kv_heads;
    slot = batch * p.m_blocks + i % blocks / p.group;
    head = pair * p.group - batch * p.heads + i % p.group;
    place = i % p.ring;
  }
  cuda::let_next_kernel_start();
  cuda::wait_for_earlier_kernels();
  const Rows rows = rows_of<kM>(p, slot);
  if (rows.count <= 0) return;
  if (p.problem.packed) place = place_of_sum(p, rows, slot, head);
  const float4* sum = reinterpret_cast<const float4*>(p.sum + place * (kM * kD));
  constexpr int kValues = kM * kD / 4, kRounds = ceil_div(kValues, kRowThreads);
  float4 x[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int f = threadIdx.x + i * kRowThreads;
    if (kValues % kRowThreads == 0 || f < kValues) x[i] = __ldcs(sum + f);
  }
#pragma unroll
  for (int j = 0; j < kRounds; ++j) {
    const int f = threadIdx.x + j * kRowThreads;
    if (kValues % kRowThreads != 0 && f >= kValues) break;
    const int lane = f % 32, i = f / 32 % kGroups, warp = f / 32 / kGroups;
    const int column = (kD == 64 ? warp % 4 : warp) * 16 + lane / 4;
    const int row = (kD == 64 ? warp / 4 * (kM / 2) : 0) + i * 8 + lane % 4 * 2;
    tile[row * kPitch + column] = x[j].x * p.scale;
    tile[(row + 1) * kPitch + column] = x[j].y * p.scale;
    tile[row * kPitch + column + 8] = x[j].z * p.scale;
    tile[(row + 1) * kPitch + column + 8] = x[j].w * p.scale;
  }
  __syncthreads();
  const int64_t first = rows.batch * p.dq.batch + rows.begin * p.dq.row + head * p.dq.head;
  with_type(p, [&](auto type) {
    using T = decltype(type);
    T* dq = static_cast<T*>(p.dq.data) + first;
#pragma unroll
    for (int f = threadIdx.x; f < kM * (kD / 8); f += kRowThreads) {
      const int row = f / (kD / 8), column = f % (kD / 8) * 8;
      if (row >= rows.count) break;
      if (column >= p.columns) continue;
      const float4 a = *reinterpret_cast<const float4*>(tile + row * kPitch + column);
      const float4 b = *reinterpret_cast<const float4*>(tile + row * kPitch + column + 4);
      const float values[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
      cuda::store(dq + row * p.dq.row + column, cuda::pack<T>(values));
    }
  });
}

// Holds the passes around the main kernel, by its head size and the queries of its blocks.
struct Passes {
  void (*prepare)(RowParams);
  void (*convert)(RowParams);
};
Passes passes_of(const Plan& plan) {
  if (plan.d > 128) return {prepare_kernel<32, 64>, nullptr};  // all is converted beside
  if (plan.d == 96) return {prepare_kernel<16, 80>, convert_kernel<96, 80>};
  if (plan.d == 64) {
    return plan.m == 64 ? Passes{prepare_kernel<8, 64>, convert_kernel<64, 64>}
                        : Passes{prepare_kernel<8, 128>, convert_kernel<64, 128>};
  }
  return plan.m == 64 ? Passes{prepare_kernel<16, 64>, convert_kernel<128, 64>}
                      : Passes{prepare_kernel<16, 80>, convert_kernel<128, 80>};
}

// Computes dsinks = -sum(exp(sink - lse) * delta) with a block of threads for each head, so that
// the order is fixed.
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

template <class P>
Status launch_sinks_type(const AttentionBwd& a, const Plan& plan, const float* stats,
                         cudaStream_t stream) {
  sinks_kernel<P><<<static_cast<unsigned>(plan.problem.heads), kRowThreads, 0, stream>>>(
      stats, plan.slots, plan.m, a.sinks.ptr<P>(), a.sinks.stride(0), a.dsinks.ptr<P>(),
      a.dsinks.stride(0));
  return cuda::check_launch("attention_bwd sinks");
}

Status launch_sinks(const AttentionBwd& a, const Plan& plan, const float* stats,
                    cudaStream_t stream) {
  return cuda::for_dtype(a.sinks.dtype, [&](auto tag) {
    return launch_sinks_type<typename decltype(tag)::type>(a, plan, stats, stream);
  });
}

// Describes the rows of a tensor (batch, length, heads, columns) as boxes of 64 columns of one
// head. What is behind the rows of a packed sequence has to count as 0 too. So entry `end` of the
// last dimension holds the rows before row `end`, as many as there are in all, and the sequence
// which ends there has the last ones. (Most entries begin ahead of the tensor, but nobody asks for
// that part.)
Status map_rows(CUtensorMap* map, const Tensor& t, int rows) {
  const attention::View v = attention::view(t);
  cuda::TensorMapShape shape;
  shape.dims = 4;
  const bool packed = t.ndim == 3;
  const int64_t length = t.size(-3), row = length == 1 ? 8 : v.row;
  const int64_t sizes[4] = {t.size(-1), t.size(-2), length, packed ? length + 1 : t.size(0)};
  const int64_t strides[4] = {1, v.head, row, packed ? row : v.batch};
  const int box[4] = {64, 1, rows, 1};
  for (int i = 0; i < 4; ++i) {
    shape.sizes[i] = sizes[i];
    shape.strides[i] = strides[i] * 2;
    shape.box[i] = box[i];
  }
  const auto data = reinterpret_cast<uintptr_t>(t.data) - (packed ? length * row * 2 : 0);
  return cuda::make_tensor_map(map, reinterpret_cast<const void*>(data), t.dtype, shape);
}

}  // namespace

Status launch(const AttentionBwd& a, const Exec& exec, void (*kernel)(Params), int shared,
              int threads) {
  const bool deterministic = a.deterministic || exec.deterministic();
  const Plan plan(a, deterministic);
  const attention::Problem& problem = plan.problem;
  const cudaStream_t stream = cuda::stream_of(exec);
  char* workspace = exec.workspace<char>();

  RowParams rows = {};
  rows.head_size = plan.d;
  rows.keys = plan.n;
  rows.half = a.q.dtype == DType::kFloat16;
  rows.problem = problem;
  rows.dout = attention::view(a.dout);
  rows.out = attention::view(a.out);
  rows.lse = attention::row_view(a.lse);
  rows.dlse = attention::row_view(a.dlse);
  rows.dq = attention::view(a.dq);
  rows.scale = static_cast<float>(problem.scale);
  rows.zero = reinterpret_cast<float4*>(workspace);
  rows.zero_sums = problem.packed && a.dq && plan.ring == plan.blocks;
  rows.zeroes = (rows.zero_sums ? plan.sum : plan.stats) / 16;
  rows.stats = reinterpret_cast<float*>(workspace + plan.stats);
  rows.heads = static_cast<int>(problem.heads);
  rows.columns = static_cast<int>(problem.head_dim);
  rows.value_columns = static_cast<int>(problem.value_dim);

  Params p = {};
  const Tensor* mapped[4] = {&a.q, &a.dout, &a.k, &a.v};
  const int key_rows = plan.pair ? plan.n / 2 : plan.n;  // of a block
  for (int i = 0; i < 4; ++i) {
    FK_RETURN_IF_ERROR(map_rows(&p.maps[i], *mapped[i], i < kMapK ? plan.m : key_rows));
  }
  p.problem = problem;
  p.dk = attention::view(a.dk);
  p.dv = attention::view(a.dv);
  p.slopes = attention::slope_view(a.alibi_slopes);
  p.dq = attention::view(a.dq);
  p.sum = a.dq ? reinterpret_cast<float*>(workspace + plan.sum) : nullptr;
  rows.sum = p.sum;
  p.stats = rows.stats;
  p.counters = reinterpret_cast<Counters*>(workspace);
  rows.beside = p.beside = static_cast<int>(plan.beside);
  if (a.dq && p.beside > 0) p.done = reinterpret_cast<int*>(workspace + plan.done);
  p.converted = reinterpret_cast<int*>(workspace + plan.converted);
  p.turns = deterministic ? reinterpret_cast<int*>(workspace + plan.turns) : nullptr;
  p.ring = static_cast<int>(plan.ring);
  p.segment = static_cast<int>(plan.segment);
  p.together = static_cast<int>(plan.together);
  p.last_tiles = static_cast<int>(plan.last_tiles);
  p.most_together = static_cast<int>(plan.most_together);
  p.parts = plan.parts;
  p.slots = static_cast<int>(plan.slots);
  p.tiles = static_cast<int>(plan.tiles);
  p.m_blocks = static_cast<int>(plan.m_blocks);
  p.n_blocks = static_cast<int>(plan.n_blocks);
  p.kv_heads = static_cast<int>(problem.kv_heads);
  p.group = static_cast<int>(problem.group());
  p.left = static_cast<int>(std::min<int64_t>(problem.mask.left, kFar));
  p.right = static_cast<int>(std::min<int64_t>(problem.mask.right, kFar));
  p.columns = rows.columns;
  p.value_columns = rows.value_columns;
  p.scale = rows.scale;
  p.scale_log2 = static_cast<float>(problem.scale * 1.4426950408889634);
  p.softcap = static_cast<float>(problem.softcap);
  // In a fixed order, each key block of a causal mask begins where the one after it has just been.
  p.descending = deterministic && p.right < kFar;
  // Key blocks under a causal mask begin at different queries, but all end at the last. Where heads
  // share keys, and so sums are many, they go from there to the first: those that run at once add
  // to the same sums, which stay in the L2 cache.
  p.m_step = p.group > 1 && p.right < kFar && !deterministic ? -1 : 1;

  int64_t row_blocks = plan.blocks, list_blocks = 0;
  if (problem.packed) {
    rows.list = reinterpret_cast<ListedTile*>(workspace + plan.list);
    p.list = rows.list;
    row_blocks = plan.m_blocks * problem.heads;
    list_blocks = std::min<int64_t>(ceil_div(plan.tiles, kRowThreads), 32);
  } else {
    p.heads = order_heads(p, p.tiles / p.n_blocks, p.n_blocks, p.m_blocks * p.group, 0);
  }
  rows.row_blocks = static_cast<int>(row_blocks);
  static_cast<TileParams&>(rows) = p;

  const Passes passes = passes_of(plan);
  FK_RETURN_IF_ERROR(cuda::launch_early(
      passes.prepare, "attention_bwd prepare",
      {dim3(static_cast<unsigned>(row_blocks + list_blocks)), kRowThreads}, stream, rows));
  const cudaError_t allowed =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  FK_RETURN_IF_ERROR(cuda::check(allowed, "attention_bwd shared memory"));
  const int processors = cuda::device_properties(a.q.device_id).multiprocessors;
  const bool cluster = plan.pair || p.parts > 1;  // of two blocks
  const int blocks =
      p.parts > 1 ? p.tiles : std::min(p.tiles, plan.pair ? processors / 2 : processors);
  FK_RETURN_IF_ERROR(cuda::launch_early(
      kernel, "attention_bwd",
      {dim3(static_cast<unsigned>(blocks), 1, cluster ? 2 : 1), threads, shared, cluster}, stream,
      p));
  if (a.dq && plan.beside < plan.blocks) {
    const dim3 rest(static_cast<unsigned>(plan.blocks - plan.beside));
    FK_RETURN_IF_ERROR(cuda::launch_early(passes.convert, "attention_bwd convert",
                                          {rest, kRowThreads}, stream, rows));
  }
  return a.dsinks ? launch_sinks(a, plan, rows.stats, stream) : Status{};
}

}  // namespace fk::cuda_sm90::backward
