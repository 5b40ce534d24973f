// A matrix product of at most 16 rows of A, C[m, n] = sum over k of A[m, k] B[n, k]; and the sum of
// the parts of a product whose K was split.
//
// Floor: B read once from memory, whose bandwidth binds; A comes from the caches. The tensor cores
// have B for their left operand, 16 of its rows at a time, and take a lane's 16 bytes of a row as
// they come: which k an element stands for does not matter as long as A's are in the same places.
// So nothing goes through shared memory but, at the end, the sums of a block's warps, which share
// K.
//
// Two rows of B per lane and kAhead steps are under way at once: 8 KB of a warp, 64 KB of a block.
#include <algorithm>
#include <atomic>
#include <random>

#include "cuda/dependent_launch.cuh"
#include "cuda/gemm/portable_product.cuh"
#include "cuda/gemm/row_norm.cuh"

namespace fk::cuda {

namespace {

struct FewRows {
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kColumns = 16;  // of a block, the rows of B
  static constexpr int kAhead = 4;     // steps of 64 bytes of K that a warp loads at once
  static constexpr int kPitch = kColumns + 4;
};

// 64 bytes of K of 16 rows of B by 8 kBlocks rows of A.
template <class T, int kBlocks>
struct FewRowsStep {
  uint4 w[2], x[kBlocks];

  __device__ __forceinline__ void multiply(float (&sum)[2][4]) const {
    // The first and the second half of each lane's bytes are a fragment each.
    uint32_t left[2][4];
    RightFragments<T, 1> right;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto word = [&](const uint4& v, int i) {
        return half == 0 ? (i == 0 ? v.x : v.y) : (i == 0 ? v.z : v.w);
      };
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        left[half][i] = word(w[i % 2], i / 2);
        right.words[half][0][i] = i % 2 < kBlocks ? word(x[i % 2 < kBlocks ? i % 2 : 0], i / 2) : 0;
      }
    }
    right.prepare();
    right.template multiply<kBlocks>(sum, left);
  }
};

// Tells whether there are tensor cores for T.
template <class T>
constexpr bool kRunsFewRows =
#if __CUDA_ARCH__ >= 800
    true;
#else
    std::is_same_v<T, __half>;
#endif

template <class T, int kBlocks>
__device__ __forceinline__ void multiply_few_rows_of(const PortableArguments& a) {
  if constexpr (kRunsFewRows<T>) {
    using Step = FewRowsStep<T, kBlocks>;
    constexpr int kWidth = kVecWidth<T>, kDepth = 4 * kWidth;  // of a step
    __shared__ float sums[FewRows::kWarps][8 * kBlocks][FewRows::kPitch];
    wait_for_earlier_kernels();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t column = blockIdx.x * int64_t{FewRows::kColumns};
    const int64_t outputs = a.gated ? column / 2 : column;
    const OuterRange columns{outputs, a.columns, a.gated ? a.columns : 0};
    const int64_t steps = (a.depth + kDepth - 1) / kDepth;
    const int64_t each = (steps + a.splits - 1) / a.splits;
    const int64_t first = blockIdx.y * each;
    const int64_t last = first + each < steps ? first + each : steps;

    // The rows that this lane reads, from its own place in a step on; null: zeros.
    const int inner = lane % 4 * kWidth;
    const T *w[2], *x[kBlocks];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t n = columns.index(lane / 4 + 8 * i);
      w[i] = n < 0 ? nullptr : a.b.at<T>(n, inner);
    }
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int64_t m = lane / 4 + 8 * i;
      x[i] = m >= a.rows ? nullptr : a.a.at<T>(m, inner);
    }
    const auto take = [&](const T* row, int64_t k) {
      if (row == nullptr || k + inner >= a.depth) return make_uint4(0, 0, 0, 0);
      const Vec<T, kWidth> v = load_read_only_in_place<kWidth>(row + k);
      uint4 words;
      memcpy(&words, v.data, sizeof(words));
      return words;
    };

    // Neighbouring warps read neighbouring 128 bytes of a row.
    float sum[2][4] = {};
    constexpr int kAhead = FewRows::kAhead;
    const auto step_of = [&](int64_t i, int j) {
      return i + (j / 2 * FewRows::kWarps + warp) * 2 + j % 2;
    };
#pragma unroll 1
    for (int64_t i = first; i < last; i += kAhead * FewRows::kWarps) {
      Step ahead[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int64_t s = step_of(i, j), k = s < last ? s * kDepth : a.depth;
#pragma unroll
        for (int e = 0; e < 2; ++e) ahead[j].w[e] = take(w[e], k);
#pragma unroll
        for (int e = 0; e < kBlocks; ++e) ahead[j].x[e] = take(x[e], k);
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (step_of(i, j) < last) ahead[j].multiply(sum);
      }
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sums[warp][8 * b + 2 * (lane % 4) + e % 2][lane / 4 + e / 2 * 8] = sum[b][e];
      }
    }
    __syncthreads();
    let_next_kernel_start();

    // A thread adds up some columns of one row.
    const auto total = [&](int m, int c, float(&to)[kWidth]) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) to[i] = 0;
#pragma unroll 1
      for (int s = 0; s < FewRows::kWarps; ++s) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) to[i] += sums[s][m][c + i];
      }
    };
    const bool pairs = a.gated && a.partials == nullptr;
    const int along = (pairs ? FewRows::kColumns / 2 : FewRows::kColumns) / kWidth;
    const int m = threadIdx.x / along, c = threadIdx.x % along * kWidth;
    if (m >= a.rows || m >= 8 * kBlocks) return;
    float to[kWidth], up[kWidth] = {};
    total(m, c, to);
    if (a.partials != nullptr) {
      float* const at = a.partials + (blockIdx.y * a.rows + m) * a.partial_width + column + c;
#pragma unroll
      for (int i = 0; i < kWidth; i += 4) {
        if (column + c + i >= a.partial_width) continue;
        store(at + i, Vec<float, 4>{{to[i], to[i + 1], to[i + 2], to[i + 3]}});
      }
      return;
    }
    if (pairs) total(m, c + 8, up);
    const int64_t n = (pairs ? outputs : column) + c;
    if (n < a.columns) ResultVector<T>(a, m, n).finish(to, up);
  }
}

template <class T, int kBlocks>
__global__ void __launch_bounds__(FewRows::kThreads)
    product_of_few_rows(const __grid_constant__ PortableArguments a) {
  multiply_few_rows_of<T, kBlocks>(a);
}

// The same where K is not split, and the last block to store its columns normalises the rows.
template <class T, int kBlocks>
__global__ void __launch_bounds__(FewRows::kThreads)
    product_of_few_rows_with_norm(const __grid_constant__ PortableArguments a,
                                  const __grid_constant__ RowNorm norm) {
  if constexpr (kRunsFewRows<T>) {
    multiply_few_rows_of<T, kBlocks>(a);
    if (norm.last.here(gridDim.x)) normalise_rows<T>(a, norm);
  }
}

// The sums of splits, each of which a thread takes some columns of.
constexpr int kFinishThreads = 256;

template <int kWidth>
__device__ __forceinline__ void sum_of_splits(const PortableArguments& a, int64_t m, int64_t at,
                                              float (&x)[kWidth]) {
#pragma unroll
  for (float& value : x) value = 0;
#pragma unroll 1
  for (int s = 0; s < a.splits; ++s) {
    const float* const from = a.partials + (s * a.rows + m) * a.partial_width + at;
#pragma unroll
    for (int e = 0; e < kWidth; e += 4) {
      const Vec<float, 4> v = load<4>(from + e);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[e + j] += v.data[j];
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kFinishThreads)
    add_splits(const __grid_constant__ PortableArguments a, int64_t along) {
  constexpr int kWidth = kVecWidth<T>;
  wait_for_earlier_kernels();
  const int64_t i = blockIdx.x * int64_t{kFinishThreads} + threadIdx.x;
  const int64_t m = i / along, n = i % along * kWidth;
  if (m >= a.rows) return;
  float x[kWidth], up[kWidth] = {};
  if (a.gated) {
    const int64_t at = n / a.gate_block * (2 * a.gate_block) + n % a.gate_block;
    sum_of_splits(a, m, at, x);
    sum_of_splits(a, m, at + a.gate_block, up);
  } else {
    sum_of_splits(a, m, n, x);
  }
  ResultVector<T>(a, m, n).finish(x, up);
}

// The same where a block has a row, whose norm it writes.
template <class T>
__global__ void __launch_bounds__(kFinishThreads)
    add_splits_and_normalise(const __grid_constant__ PortableArguments a,
                             const __grid_constant__ RowNorm norm) {
  constexpr int kWidth = kVecWidth<T>;
  __shared__ float scratch[2][kFinishThreads / 32];
  wait_for_earlier_kernels();
  const int64_t m = blockIdx.x;
  Vec<T, kWidth> y[kBlockHolds];
#pragma unroll
  for (int i = 0; i < kBlockHolds; ++i) {
    const int64_t n = (threadIdx.x + i * kFinishThreads) * int64_t{kWidth};
    if (n >= a.columns) continue;
    float x[kWidth];
    sum_of_splits(a, m, n, x);
    ResultVector<T>(a, m, n).finish(x, x);
    y[i] = pack<T>(x);
  }
  int turn = 0;
  write_norm<T>(norm, m, a.columns, threadIdx.x, kFinishThreads, y,
                [&](float x) { return block_sum<kFinishThreads>(x, scratch[turn++]); });
}

LaunchShape shape_of_few_rows(const PortableArguments& f) {
  const int64_t columns = f.gated ? ceil_div(f.columns, 8) * 16 : f.columns;
  return {{static_cast<unsigned>(ceil_div(columns, int64_t{FewRows::kColumns})),
           static_cast<unsigned>(f.splits)},
          {FewRows::kThreads}};
}

template <class T>
Status launch_few_rows(const PortableArguments& f, cudaStream_t stream) {
  return launch_early(f.rows <= 8 ? product_of_few_rows<T, 1> : product_of_few_rows<T, 2>,
                      "product_of_few_rows", shape_of_few_rows(f), stream, f);
}

template <class T>
Status launch_add_splits(const PortableArguments& f, cudaStream_t stream) {
  const int64_t along = ceil_div(f.columns, int64_t{kVecWidth<T>});
  const int64_t blocks = ceil_div(f.rows * along, int64_t{kFinishThreads});
  return launch_early(add_splits<T>, "add_splits",
                      {{static_cast<unsigned>(blocks)}, {kFinishThreads}}, stream, f, along);
}

template <class T>
Status launch_with_norm(const PortableArguments& f, const RowNorm& norm, cudaStream_t stream) {
  if (f.splits == 1) {
    return launch_early(
        f.rows <= 8 ? product_of_few_rows_with_norm<T, 1> : product_of_few_rows_with_norm<T, 2>,
        "product_of_few_rows_with_norm", shape_of_few_rows(f), stream, f, norm);
  }
  return launch_early(add_splits_and_normalise<T>, "add_splits_and_normalise",
                      {{static_cast<unsigned>(f.rows)}, {kFinishThreads}}, stream, f, norm);
}

bool goes_in_vectors(const ProductResult& r, DType dtype) {
  bool fits = r.column == 1 && reinterpret_cast<uintptr_t>(r.data) % 16 == 0;
  for (int i = 0; i < r.rows.ndim; ++i) fits &= r.rows.strides[i] * size_of(dtype) % 16 == 0;
  return fits;
}

bool reads_in_vectors(const norm::Parameter& p) {
  return p.data == nullptr || (p.stride == 1 && reinterpret_cast<uintptr_t>(p.data) % 16 == 0);
}

}  // namespace

bool holds_rows(const PortableArguments& f, const RowNorm& norm, DType dtype) {
  const int64_t width = 16 / size_of(dtype);
  const int64_t held = f.splits == 1 ? 32 * kWarpHolds : kFinishThreads * kBlockHolds;
  return f.results_in_vectors && f.columns % width == 0 && f.columns <= held * width &&
         goes_in_vectors(norm.normed, dtype) && reads_in_vectors(norm.weight) &&
         reads_in_vectors(norm.bias) && f.out.data != nullptr && !f.gated && f.rows <= INT32_MAX;
}

Status multiply_few_rows(const PortableArguments& f, DType dtype, cudaStream_t stream) {
  if (dtype == DType::kFloat32) return launch_few_rows<float>(f, stream);
  if (dtype == DType::kFloat16) return launch_few_rows<__half>(f, stream);
  return launch_few_rows<__nv_bfloat16>(f, stream);
}

Status finish_with_norm(const PortableArguments& f, const RowNorm& norm, DType dtype,
                        cudaStream_t stream) {
  if (dtype == DType::kFloat32) return launch_with_norm<float>(f, norm, stream);
  if (dtype == DType::kFloat16) return launch_with_norm<__half>(f, norm, stream);
  return launch_with_norm<__nv_bfloat16>(f, norm, stream);
}

unsigned long long new_tag() {
  // Any start will do that other processes' memory is unlikely to hold.
  static std::atomic<unsigned long long> next{std::random_device()()};
  // A bijection that scatters consecutive numbers (the finalizer of MurmurHash3).
  unsigned long long x = ++next;
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdULL;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  x ^= x >> 33;
  return std::max(x >> 16, 1ULL);
}

Status finish_splits(const PortableArguments& f, DType dtype, cudaStream_t stream) {
  if (dtype == DType::kFloat32) return launch_add_splits<float>(f, stream);
  if (dtype == DType::kFloat16) return launch_add_splits<__half>(f, stream);
  return launch_add_splits<__nv_bfloat16>(f, stream);
}

}  // namespace fk::cuda
