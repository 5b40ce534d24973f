// Forward: y = (s - mean) * rstd * weight + bias, s = x + residual rounded to the storage type;
// rms_norm is the same with mean = 0.
//
// Floor: x and residual read once, y and sum written once: 4 bytes per element and tensor pair. The
// tiled kernel keeps the row in registers between the statistics and the output; the looped kernel
// serves any strides and rows too long for that, and reads the inputs again for each pass.
#pragma once

#include <cfloat>

#include "cuda/norm/rows.cuh"

namespace fk::cuda::norm {

struct Forward {
  UntypedRows inputs[2];  // x, residual
  UntypedRows y, sum;
  UntypedRows mean, rstd;
  Parameter weight, bias;
  int64_t rows = 0, columns = 0;
  float eps = 0;
  bool layer = false;  // for the looped kernel; the tiled one is compiled for each
};

// How the kernel is cut for rows of at most kTeamThreads * kVecs vectors. A row of the table
// (norm.cu) adds how:
//   kTeamThreads  threads that share a row
//   kThreads      threads of a block
//   kVecs         vectors of 16 bytes that a thread holds
//   kMinBlocks    blocks that share a multiprocessor, at least
struct ForwardRow {
  static constexpr bool kSpecial = false;  // whether the tile needs kHasSpecial
};
template <class Row>
struct ForwardTile : Row {
  using Team = norm::Team<Row::kTeamThreads, Row::kThreads>;
};

struct Statistics {
  float mean, rstd;
};

// Returns the sum of the row's squares.
template <class T, class Team, int kVecs>
__device__ __forceinline__ float row_squares(const RowVectors<T, kVecs>& s, int vectors,
                                             float* scratch) {
  constexpr int kWidth = kVecWidth<T>;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    if (Team::rank() + i * Team::kSize >= vectors) continue;
    float f[kWidth];
    unpack(s[i], f);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += f[j] * f[j];
  }
  return Team::reduce(sum, Sum(), scratch);
}

// Holds the mean and the sum of squared deviations over `count` entries.
struct alignas(16) Moments {
  float count, mean, m2;
};

// One reduction gives both: a warp sums d and d^2 of the deviations d from a pivot, and the warps'
// moments are merged exactly. The pivot is the mean of one of the warp's vectors, so its squared
// distance from the warp's mean is at most entries / kWidth times the variance: what m2 loses to
// cancellation is bounded, whatever the row's mean is.
template <class T, class Team, int kVecs>
__device__ __forceinline__ Moments row_moments(const RowVectors<T, kVecs>& s, int vectors,
                                               Moments* scratch) {
  constexpr int kWidth = kVecWidth<T>;
  const int warp = Team::rank() / kWarpSize;
  float f[kWidth];
  unpack(s[0], f);
  float pivot = 0;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) pivot += f[j];
  pivot = __shfl_sync(kFullMask, pivot * (1.f / kWidth), 0);
  if (!(fabsf(pivot) <= FLT_MAX)) pivot = 0;  // so that a row with inf has the mean inf, not NaN

  int warp_vectors = 0;
  Pair sums = {0, 0};  // of d, of d^2
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    warp_vectors += min(max(vectors - i * Team::kSize - warp * kWarpSize, 0), kWarpSize);
    if (Team::rank() + i * Team::kSize >= vectors) continue;
    unpack(s[i], f);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float d = f[j] - pivot;
      sums.first += d;
      sums.second += d * d;
    }
  }
  sums = warp_reduce(sums, SumPair());
  Moments part = {0, 0, 0};
  if (warp_vectors > 0) {
    part.count = static_cast<float>(warp_vectors * kWidth);
    const float mean_d = sums.first / part.count;
    const float m2 = sums.second - sums.first * mean_d;
    part.mean = pivot + mean_d;
    part.m2 = m2 < 0 ? 0 : m2;  // NaN stays
  }
  if constexpr (Team::kWarps == 1) {
    return part;
  } else {
    const int lane = threadIdx.x % kWarpSize;
    if (lane == 0) scratch[warp] = part;
    __syncthreads();
    const float total = static_cast<float>(vectors * kWidth);
    if constexpr (Team::kWarps > 4) {
      part = scratch[lane % Team::kWarps];
      const float mean = warp_sum<Team::kWarps>(part.count * part.mean) / total;
      const float apart = part.mean - mean;
      return {total, mean, warp_sum<Team::kWarps>(part.m2 + part.count * apart * apart)};
    } else {
      float mean = 0, m2 = 0;
#pragma unroll
      for (int w = 0; w < Team::kWarps; ++w) mean += scratch[w].count * scratch[w].mean;
      mean /= total;
#pragma unroll
      for (int w = 0; w < Team::kWarps; ++w) {
        const float apart = scratch[w].mean - mean;
        m2 += scratch[w].m2 + scratch[w].count * apart * apart;
      }
      return {total, mean, m2};
    }
  }
}

template <class T, class Team, int kVecs>
__device__ __forceinline__ void load_row(const T* data, int vectors, RowVectors<T, kVecs>& part) {
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int v = Team::rank() + i * Team::kSize;
    if (v < vectors) part[i] = load_read_only_in_place<kVecWidth<T>>(data + v * kVecWidth<T>);
  }
}

// A team per row; as many teams at once as fit, so that one's loads hide behind another's work.
// No cache hints: loads that pass L1 by and stores that leave L2 first cost 2 to 4%. The sum is
// stored after the statistics: sooner, it would hold up the reads of other rows.
// kAll: x, residual, y, sum and the parameters are all given, these in T. Needs kHasSpecial.
template <class T, bool kLayer, bool kAll, class Tile>
__global__ void __launch_bounds__(Tile::Team::kThreads,
                                  min_blocks(Tile::Team::kThreads, Tile::kMinBlocks))
    forward_tiled(const __grid_constant__ Forward p) {
  if ((kAll || Tile::kSpecial) && !kHasSpecial) return;
  using Team = typename Tile::Team;
  constexpr int kVecs = Tile::kVecs;
  constexpr int kWidth = kVecWidth<T>;
  using Scratch = std::conditional_t<kLayer, Moments, float>;
  __shared__ Scratch scratch[Team::kCount][Team::kWarps];
  const int vectors = static_cast<int>(p.columns) / kWidth;
  const uint32_t row = blockIdx.x * Team::kCount + Team::index();
  if (row >= p.rows) return;
  // Both addresses are found ahead of the loads: the branches that find them, between the loads,
  // cost up to 8%.
  const T* x = p.inputs[0].row<T>(row);
  const T* added = kAll || p.inputs[1] ? p.inputs[1].row<T>(row) : nullptr;
  wait_for_earlier_kernels();
  let_next_kernel_start();

  RowVectors<T, kVecs> s, residual;
  load_row<T, Team, kVecs>(x, vectors, s);
  if (kAll || added != nullptr) {
    load_row<T, Team, kVecs>(added, vectors, residual);
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int v = Team::rank() + i * Team::kSize;
      if (v >= vectors) continue;
      float a[kWidth], b[kWidth];
      unpack(s[i], a);
      unpack(residual[i], b);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) a[j] += b[j];
      s[i] = pack<T>(a);
    }
  }
  Statistics statistics;
  if constexpr (kLayer) {
    const Moments m = row_moments<T, Team, kVecs>(s, vectors, scratch[Team::index()]);
    statistics = {m.mean, rsqrtf(m.m2 / m.count + p.eps)};
  } else {
    const float squares = row_squares<T, Team, kVecs>(s, vectors, scratch[Team::index()]);
    statistics = {0.f, rsqrtf(squares / static_cast<float>(p.columns) + p.eps)};
  }
  if (Team::rank() == 0) {
    if (p.rstd) *p.rstd.row<float>(row) = statistics.rstd;
    if (p.mean) *p.mean.row<float>(row) = statistics.mean;
  }
  T* y = kAll || p.y ? p.y.row<T>(row) : nullptr;
  T* sum = kAll || (added != nullptr && p.sum) ? p.sum.row<T>(row) : nullptr;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int v = Team::rank() + i * Team::kSize;
    if (v >= vectors) continue;
    if (kAll || sum != nullptr) store(sum + v * kWidth, s[i]);
    if (!kAll && y == nullptr) continue;
    float f[kWidth], w[kWidth], b[kWidth];
    unpack(s[i], f);
    load_parameter<T, kAll>(p.weight, v * kWidth, w);
    if constexpr (kLayer) load_parameter<T, kAll>(p.bias, v * kWidth, b);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      f[j] = kLayer ? (f[j] - statistics.mean) * statistics.rstd * w[j] + b[j]
                    : f[j] * statistics.rstd * w[j];
    }
    store(y + v * kWidth, pack<T>(f));
  }
}

// kWidth 1: any strides. Wider: unit column stride and 16-byte aligned rows.
template <class T, int kWidth, int kThreads>
__global__ void __launch_bounds__(kThreads) forward_looped(const __grid_constant__ Forward p) {
  __shared__ float scratch[2][kThreads / kWarpSize];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const float columns = static_cast<float>(p.columns);
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const T* x = p.inputs[0].row<T>(row);
    const T* residual = p.inputs[1] ? p.inputs[1].row<T>(row) : nullptr;
    const auto load_s = [&](int64_t column, float(&s)[kWidth]) {
      unpack(load<kWidth>(x + column * p.inputs[0].column_stride), s);
      if (residual == nullptr) return;
      float r[kWidth];
      unpack(load<kWidth>(residual + column * p.inputs[1].column_stride), r);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) s[j] += r[j];
      unpack(pack<T>(s), s);
    };
    const auto each = [&](auto&& body) {
      for (int64_t c = threadIdx.x * kWidth; c < p.columns; c += kThreads * kWidth) body(c);
    };

    float s[kWidth];
    float mean = 0;
    if (p.layer) {
      float sum = 0;
      each([&](int64_t c) {
        load_s(c, s);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sum += s[j];
      });
      mean = block_sum<kThreads>(sum, scratch[0]) / columns;
    }
    float square = 0;
    each([&](int64_t c) {
      load_s(c, s);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) square += (s[j] - mean) * (s[j] - mean);
    });
    const float rstd = rsqrtf(block_sum<kThreads>(square, scratch[1]) / columns + p.eps);
    if (threadIdx.x == 0) {
      if (p.rstd) *p.rstd.row<float>(row) = rstd;
      if (p.mean) *p.mean.row<float>(row) = mean;  // 0 of an rms_norm
    }
    T* y = p.y ? p.y.row<T>(row) : nullptr;
    T* sum = p.sum ? p.sum.row<T>(row) : nullptr;
    each([&](int64_t c) {
      load_s(c, s);
      if (sum != nullptr) store(sum + c * p.sum.column_stride, pack<T>(s));
      if (y == nullptr) return;
      float w[kWidth], b[kWidth];
      load_parameter<T>(p.weight, c, w);
      load_parameter<T>(p.bias, c, b);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) s[j] = (s[j] - mean) * rstd * w[j] + b[j];
      store(y + c * p.y.column_stride, pack<T>(s));
    });
    __syncthreads();  // before the next row writes scratch
  }
}

}  // namespace fk::cuda::norm
