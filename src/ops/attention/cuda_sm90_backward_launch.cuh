// Attention's backward on Hopper: what runs around the main kernel, and the host's side of a call.
//   prepare_kernel: delta = rowsum(dout * out) - dlse and lse, in blocks as the main kernel loads
//     them; zeroes the sums of dQ and the counters; lists the tiles of packed sequences. Reads dout
//     and out once.
//   convert_kernel: dQ from sums in the order of the registers to rows of q's type, where the main
//     kernel has no time for it beside the multiplications: short sequences, and the last heads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/workspace.h"
#include "cuda/convert.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/launch.h"
#include "cuda/math.cuh"
#include "cuda/tma.h"
#include "ops/attention/cuda_sm90_backward_rows.cuh"

namespace fk::cuda_sm90::backward {

// Blocks of prepare_kernel on a multiprocessor, as many as its loads need.
constexpr int prepare_blocks(int d, int m) { return d > 128 ? 2 : m == 80 ? 3 : 4; }

// A block of threads per kM rows and head. Rows that are not there, and queries that see no key,
// get lse = inf: their P is 0.
template <class T, int kD, int kM, int kN>
__global__ void __launch_bounds__(kRowThreads, prepare_blocks(kD, kM))
    prepare_kernel(const __grid_constant__ RowParams p) {
  constexpr int kLanes = kD <= 64 ? 8 : kD <= 128 ? 16 : 32;
  constexpr int kRowsAtATime = kRowThreads / kLanes, kRounds = kM / kRowsAtATime;
  static_assert(kM % kRowsAtATime == 0);
  // The list first, then rows from the last to the first: the main kernel begins with the first,
  // and finds their dout and sums in the L2 cache.
  const int index = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  cuda::wait_for_earlier_kernels();
  if (index >= p.row_blocks) {
    cuda::let_next_kernel_start();
    list_tiles<kM, kN, kRowThreads>(p.problem, p, p.list, index - p.row_blocks,
                                    static_cast<int>(gridDim.x) - p.row_blocks);
    return;
  }
  const int slot = index / p.heads, head = index - slot * p.heads, lane = threadIdx.x % kLanes;
  // Of packed sequences, rows of whatever sequences: to look for these first would take longer.
  const bool packed = p.problem.packed;
  const int64_t batch = packed ? 0 : slot / p.m_blocks;
  const int begin = (slot - static_cast<int>(batch) * p.m_blocks) * kM;
  const int count = min(static_cast<int>(p.problem.q_len) - begin, kM);
  const T* dout = cuda::after_wait(static_cast<const T*>(p.dout.data)) + batch * p.dout.batch +
                  begin * p.dout.row + head * p.dout.head + lane * 8;
  const T* out = cuda::after_wait(static_cast<const T*>(p.out.data)) + batch * p.out.batch +
                 begin * p.out.row + head * p.out.head + lane * 8;
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
  cuda::Vec<T, 8> x[kRounds], y[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int row = threadIdx.x / kLanes + i * kRowsAtATime;
    x[i] = y[i] = {};
    if (row < count && lane * 8 < p.value_columns) {
      x[i] = cuda::load<8>(dout + row * p.dout.row);
      y[i] = cuda::load<8>(out + row * p.out.row);
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
    begin_slots<kD, kM>(p, begin, head, first);
  }
  cuda::let_next_kernel_start();
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
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
    if (lane == 0) delta_of[threadIdx.x / kLanes + i * kRowsAtATime] = delta;
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

// A block of threads per block of queries and head: through shared memory, to turn the order of the
// registers (Consumer::add_dq) into rows.
template <class T, int kD, int kM>
__global__ void __launch_bounds__(kRowThreads) convert_kernel(const RowParams p) {
  constexpr int kGroups = kD == 64 ? kM / 16 : kM / 8;  // of 8 queries, in a warp's part
  constexpr int kPitch = kD + 4;  // lanes that differ by two rows or one column: 32 banks
  __shared__ float tile[kM * kPitch];
  // From the last to the first: sums that were added to last are still in the L2 cache.
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
  constexpr int kValues = kM * kD / 4, kRounds = (kValues + kRowThreads - 1) / kRowThreads;
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
  T* dq = static_cast<T*>(p.dq.data) + rows.batch * p.dq.batch + rows.begin * p.dq.row +
          head * p.dq.head;
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
}

inline bool has_features(const AttentionBwd& a) { return a.alibi_slopes || a.softcap != 0; }

// The head size of the kernel that takes the call.
inline int head_size(const AttentionBwd& a) {
  const int64_t d = std::max(a.q.size(-1), a.v.size(-1));
  if (d <= 64) return 64;
  if (d <= 96 && !has_features(a)) return 96;
  if (d <= 128) return 128;
  return d <= 192 ? 192 : 256;
}

// Whether two blocks share the sums of dQ of their keys (cuda_sm90_backward_pair.cuh).
inline bool in_pairs(const AttentionBwd& a) {
  return head_size(a) == 192 && a.v.size(-1) <= 128 && !has_features(a);
}

// Queries a block: what the registers hold. 80 of them, at D 128, only without masks, in any order,
// and where not much of the last block is left empty.
inline int queries(const AttentionBwd& a, const attention::Problem& problem, bool deterministic) {
  const int d = head_size(a);
  if (has_features(a) || d > 128) return 64;
  if (d < 128) return d == 64 ? 128 : 80;
  if (deterministic || !problem.mask.unlimited()) return 64;
  // Of packed sequences only the average length is known here.
  if (problem.packed) return problem.q_len >= 768 * problem.batch ? 80 : 64;
  return problem.k_len % 128 == 0 && (problem.q_len + 79) / 80 * 80 * 32 <= problem.q_len * 33 ? 80
                                                                                               : 64;
}

inline int64_t divide_up(int64_t x, int64_t by) { return (x + by - 1) / by; }

struct Plan {
  attention::Problem problem;
  int d, m, n;  // head size of the kernel, queries and keys a tile
  bool pair;    // tiles are of two blocks
  int64_t m_blocks, n_blocks, slots, blocks, tiles;
  int64_t together, last_tiles, most_together, ring, segment;  // Params
  int64_t beside;  // Params: all, none, or some; the rest after the main kernel
  int parts;       // Params
  // Where they begin in the workspace, the counters at 0. All before `stats` is 0 at the start.
  int64_t done, converted, turns, sum, stats, list, bytes;

  Plan(const AttentionBwd& a, bool deterministic) : problem(attention::problem_of(a)) {
    d = head_size(a);
    m = queries(a, problem, deterministic);
    pair = in_pairs(a);
    n = pair ? kPairKeys : keys_a_block(d);
    m_blocks = divide_up(problem.q_len, m);
    n_blocks = divide_up(problem.k_len, n);
    slots = problem.packed ? problem.q_len / m + problem.batch : problem.batch * m_blocks;
    blocks = slots * problem.heads;
    tiles = (problem.packed ? problem.k_len / n + problem.batch : problem.batch * n_blocks) *
            problem.kv_heads;
    order_tiles(deterministic, a.q.device_id);
    // The last pair of sequence and head may go on behind the ring's end.
    const int64_t sums = ring + (problem.packed && ring < blocks ? slots * problem.group() : 0);
    const int64_t heads = problem.batch * problem.kv_heads;
    done = 256;
    converted = done + WorkspaceParts::rounded(heads * 4);
    turns = converted + WorkspaceParts::rounded((blocks / segment + 1) * 4);
    sum = turns + (deterministic ? WorkspaceParts::rounded(sums * dq_parts(d) * 4) : 0);
    stats = sum + (a.dq ? sums * m * d * 4 : 0);
    list = stats + WorkspaceParts::rounded(blocks * m * 2 * 4);
    bytes = list + (problem.packed ? WorkspaceParts::rounded((tiles + 1) * sizeof(ListedTile)) : 0);
  }

 private:
  // Where all key blocks take as long, one head after another: what is in use stays in the L2
  // cache. Under a causal mask the first take the longest, and beginning a long one last would
  // leave most of the chip idle: some heads together, and at the end as many as make two tiles a
  // multiprocessor.
  void order_tiles(bool deterministic, int device) {
    const int64_t block_bytes = int64_t{m} * d * 4;
    // Bytes of sums; kInCache: that stay in the L2 cache.
    constexpr int64_t kTogether = 4 << 20, kRing = 24 << 20, kInCache = 36 << 20;
    const int64_t processors = cuda::device_properties(device).multiprocessors / (pair ? 2 : 1);
    const bool causal = problem.mask.right < kFar && problem.mask.left >= kFar && !deterministic;
    together = causal ? kTogether / block_bytes : 0;
    last_tiles = causal ? 2 * processors : 0;
    if (problem.packed) {
      // Any sequence may be as long as all are together.
      const bool small = problem.mask.unlimited() && problem.q_len <= 2048 * problem.batch;
      const int64_t bytes = small ? kRing : kInCache;
      ring = std::max(bytes / block_bytes, 3 * slots * problem.group());
      segment = std::max<int64_t>(1, ring / 16);
      most_together = ring * 10 / 16;
    } else {
      // Never less than what is taken together, or heads would wait for each other; and long enough
      // that tiles hardly ever wait for the conversion of the head that had their place before.
      const int64_t row = std::max<int64_t>(n_blocks, 1), heads = tiles / row;
      segment = std::max<int64_t>(1, m_blocks * problem.group());
      const int64_t heads_together = std::max<int64_t>(1, together / segment);
      const int64_t last_heads = std::min(heads, divide_up(last_tiles, row));
      ring = std::max(heads_together, last_heads) + heads_together + 2 * divide_up(processors, row);
      ring = std::max(ring, kRing / (segment * block_bytes)) * segment;
      most_together = blocks;
    }
    ring = std::min(std::max<int64_t>(ring, 1), blocks);
    // There has to be enough to multiply beside it: key blocks that a query sees. For wide heads
    // there is no other way.
    const int64_t seen = problem.mask.unlimited() ? n_blocks : n_blocks / 2;
    beside = d > 128 || seen > 4 * (problem.packed ? problem.batch : 1) ? blocks : 0;
    // After the main kernel it is faster as long as all sums stay in the L2 cache; nor is there
    // anything beside the heads that end with the last tiles.
    if (d <= 128 && blocks * block_bytes <= kInCache) beside = 0;
    if (beside > 0 && d <= 128 && !problem.packed) {
      const int64_t row = std::max<int64_t>(n_blocks, 1);
      const int64_t last_heads = divide_up(std::max(last_tiles, processors), row) + 1;
      beside = blocks - std::min(ring, last_heads * segment);
    }
    if (deterministic || beside == 0) ring = most_together = blocks;
    // Two blocks of threads for a tile, where tiles would leave half of the chip idle, or where
    // under a causal mask the longest of them takes twice its share of the whole.
    const bool idle = 2 * tiles <= processors && m_blocks >= (4 * tiles <= processors ? 2 : 5);
    const bool uneven = causal && 2 * tiles > processors && tiles <= processors && n_blocks >= 8;
    const bool apart = d <= 128 && !problem.packed && !deterministic && beside == 0;
    parts = apart && (idle || uneven) ? 2 : 1;
  }
};

// The gradient of the sinks, from what prepare_kernel wrote.
Status launch_sinks(const AttentionBwd& a, const Plan& plan, const float* stats,
                    cudaStream_t stream);

// The kernels by head size: each is compiled in a file of its own.
Status launch_96(const AttentionBwd& a, const Exec& exec);
Status launch_wide(const AttentionBwd& a, const Exec& exec);

// Rows of a tensor (batch, length, heads, columns) as boxes of 64 columns of one head. What is
// behind the rows of a packed sequence has to count as 0 too: entry `end` of the last dimension are
// the rows before row `end`, as many as there are in all, so that the sequence which ends there has
// the last ones. (Most entries begin ahead of the tensor, but nobody asks for that part.)
inline Status map_rows(CUtensorMap* map, const Tensor& t, int rows) {
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

template <class T, int kD, int kM, int kN = keys_a_block(kD)>
Status launch(const AttentionBwd& a, const Exec& exec, void (*kernel)(Params), int shared,
              int threads = kThreads) {
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
    FK_RETURN_IF_ERROR(map_rows(&p.maps[i], *mapped[i], i < kMapK ? kM : key_rows));
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
    list_blocks = std::min<int64_t>(divide_up(plan.tiles, kRowThreads), 32);
  } else {
    p.heads = order_heads(p, p.tiles / p.n_blocks, p.n_blocks, p.m_blocks * p.group, 0);
  }
  rows.row_blocks = static_cast<int>(row_blocks);
  static_cast<TileParams&>(rows) = p;

  FK_RETURN_IF_ERROR(cuda::launch_early(
      prepare_kernel<T, kD, kM, kN>, "attention_bwd prepare",
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
  if constexpr (kD <= 128) {
    if (a.dq && plan.beside < plan.blocks) {
      const dim3 rest(static_cast<unsigned>(plan.blocks - plan.beside));
      FK_RETURN_IF_ERROR(cuda::launch_early(convert_kernel<T, kD, kM>, "attention_bwd convert",
                                            {rest, kRowThreads}, stream, rows));
    }
  }
  return a.dsinks ? launch_sinks(a, plan, rows.stats, stream) : Status{};
}

}  // namespace fk::cuda_sm90::backward
