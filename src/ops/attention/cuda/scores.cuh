// Changes scores between q.k and the softmax, one element at a time, and writes results as kernels
// make them.
#pragma once

#include "cuda/math.cuh"
#include "cuda/parameter.cuh"
#include "ops/attention/cuda/products.cuh"
#include "ops/attention/cuda/score_change.cuh"

namespace fk::cuda::attention {

// Says what is done to q.k besides the scale.
struct ScoreChange {
  View bias, slopes;
  DType bias_dtype = DType::kFloat32, slopes_dtype = DType::kFloat32;
  float scale = 1, softcap = 0;
  bool plain = true;  // scores are q.k times a positive scale: their maximum is that of q.k
};

// Says the same for one head.
struct HeadScore {
  const void* bias;  // NULL: none
  DType bias_dtype;
  int64_t bias_at, bias_row, bias_column;
  float slope, scale, softcap;
  int offset;
  bool direct = false;  // gradients are wanted of scores, as those of bias are

  __device__ __forceinline__ HeadScore(const ScoreChange& c, const BlockRows& place,
                                       float operand_scale, int offset_) {
    bias = c.bias.data;
    bias_dtype = c.bias_dtype;
    bias_at = place.b * c.bias.batch + place.head * c.bias.head;
    bias_row = c.bias.row;
    bias_column = c.bias.column;
    slope = c.slopes.data == nullptr
                ? 0.f
                : load_as(c.slopes_dtype, c.slopes.data,
                          place.b * c.slopes.batch + place.head * c.slopes.head);
    scale = c.scale * operand_scale;
    softcap = c.softcap;
    offset = offset_;
  }
};

// Turns products into natural scores and, if they are wanted, the gradients `ds` of scores into
// those of products. Rows are queries from i0 and columns keys from j0 on, or the other way round,
// both of this lane. Each change is made to all elements before the next one, since together they
// make much code.
template <bool kFast, bool kRowsAreQueries, bool kGradients, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void change_scores(
    const HeadScore& score, float (&s)[kRowTiles][kColumnTiles][4],
    [[maybe_unused]] float (&ds)[kRowTiles][kColumnTiles][4], int i0, int j0, int queries,
    int keys) {
  const auto for_all = [&](const auto& change) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = m * 16 + e / 2 * 8, column = n * 8 + e % 2;
          change(m, n, e, i0 + (kRowsAreQueries ? row : column),
                 j0 + (kRowsAreQueries ? column : row));
        }
      }
    }
  };
  if (score.softcap == 0.f) {
    for_all([&](int m, int n, int e, int, int) { s[m][n][e] *= score.scale; });
  } else {
    const Softcap<kFast> softcap(score.scale, score.softcap, 1.f);
    [[maybe_unused]] const float squeeze = score.direct ? 0.f : 1.f;
    for_all([&](int m, int n, int e, int, int) {
      const float squeezed = softcap.squeeze(s[m][n][e]);
      s[m][n][e] = squeezed * softcap.outer;
      if constexpr (kGradients) ds[m][n][e] *= 1.f - squeeze * squeezed * squeezed;
    });
  }
  if (score.bias != nullptr) {
    const int64_t bytes = score.bias_dtype == DType::kFloat32 ? 4 : 2;
    const char* first = static_cast<const char*>(score.bias) + score.bias_at * bytes;
    const int64_t bias_row = score.bias_row * bytes, bias_column = score.bias_column * bytes;
    // Places beyond the last are masked anyway, and read the last.
    const auto at = [&](int i, int j) -> const void* {
      return first + min(i, queries - 1) * bias_row + min(j, keys - 1) * bias_column;
    };
    if (score.bias_dtype == DType::kFloat32) {
      for_all([&](int m, int n, int e, int i, int j) {
        s[m][n][e] += *static_cast<const float*>(at(i, j));
      });
    } else {
      const bool half = score.bias_dtype == DType::kFloat16;
      for_all([&](int m, int n, int e, int i, int j) {
        const uint16_t bits = *static_cast<const uint16_t*>(at(i, j));
        s[m][n][e] += half ? __half2float(__ushort_as_half(bits))
                           : __uint_as_float(static_cast<uint32_t>(bits) << 16);
      });
    }
  }
  if (score.slope != 0.f) {
    for_all([&](int m, int n, int e, int i, int j) {
      s[m][n][e] -= alibi(score.slope, i + score.offset - j);
    });
  }
}

// Describes out or a gradient to the kernel that writes it.
struct Result {
  void* data = nullptr;
  int64_t batch = 0, row = 0, head = 0, column = 0;
  DType dtype = DType::kFloat32;
  int columns = 0;
  bool vectors = false;  // 16 bytes in one access

  __device__ __forceinline__ int64_t at(int64_t b, int64_t r, int64_t h) const {
    return b * batch + r * row + h * head;
  }
  __device__ __forceinline__ void store_one(int64_t at, float x) const {
    if (dtype == DType::kFloat32) {
      static_cast<float*>(data)[at] = x;
    } else if (dtype == DType::kFloat16) {
      static_cast<__half*>(data)[at] = from_float<__half>(x);
    } else {
      static_cast<__nv_bfloat16*>(data)[at] = from_float<__nv_bfloat16>(x);
    }
  }
  // Stores the columns [c, c + 8).
  __device__ __forceinline__ void store_eight(int64_t at, int c, const float (&x)[8]) const {
    if (vectors && dtype == DType::kFloat16) {
      store(static_cast<__half*>(data) + at + c, pack<__half>(x));
    } else if (vectors && dtype == DType::kBFloat16) {
      store(static_cast<__nv_bfloat16*>(data) + at + c, pack<__nv_bfloat16>(x));
    } else if (vectors && c + 8 <= columns) {
      float4* to = reinterpret_cast<float4*>(static_cast<float*>(data) + at + c);
      to[0] = make_float4(x[0], x[1], x[2], x[3]);
      to[1] = make_float4(x[4], x[5], x[6], x[7]);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (c + e < columns) store_one(at + (c + e) * column, x[e]);
      }
    }
  }
  // Says that write_tile reads a tile of float32.
  static constexpr bool kFromFloats = true;

  // Writes `valid` rows from `row` on, from a tile in shared memory, of float32 (float_place) or
  // already of the result's 16 bits (piece). `thread` is one of kThreads.
  template <int kDim, int kRows, int kThreads, bool kFloats>
  __device__ __forceinline__ void write_tile(uint32_t tile, int thread, int64_t b, int64_t row,
                                             int64_t h, int valid) const {
    constexpr int kPieces = kDim / 8;
#pragma unroll 1
    for (int i = thread; i < kRows * kPieces; i += kThreads) {
      const int r = i / kPieces, c = i % kPieces * 8;
      if (r >= valid || c >= columns) continue;
      const int64_t to = at(b, row + r, h);
      if constexpr (kFloats) {
        const uint4 low = load_shared(float_place<kDim>(tile, r, c));
        const uint4 high = load_shared(float_place<kDim>(tile, r, c + 4));
        const float x[8] = {__uint_as_float(low.x),  __uint_as_float(low.y),
                            __uint_as_float(low.z),  __uint_as_float(low.w),
                            __uint_as_float(high.x), __uint_as_float(high.y),
                            __uint_as_float(high.z), __uint_as_float(high.w)};
        store_eight(to, c, x);
      } else {
        const uint4 x = load_shared(piece<kDim>(tile, r, c / 8));
        uint16_t* out = static_cast<uint16_t*>(data) + to;
        if (vectors) {
          *reinterpret_cast<uint4*>(out + c) = x;
        } else {
          const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            if (c + e < columns) {
              out[(c + e) * column] = static_cast<uint16_t>(words[e / 2] >> (e % 2 * 16));
            }
          }
        }
      }
    }
  }
};

inline Result result_of(const Tensor& t) {
  if (!t) return {};
  const View view = fk::attention::view(t);
  Result r;
  r.data = t.data;
  r.batch = view.batch;
  r.row = view.row;
  r.head = view.head;
  r.column = view.column;
  r.dtype = t.dtype;
  r.columns = static_cast<int>(t.size(-1));
  const int64_t width = 16 / size_of(t.dtype);
  r.vectors =
      t.size(-1) % width == 0 && view.column == 1 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
  for (int i = 0; i + 1 < t.ndim; ++i) {
    r.vectors = r.vectors && (t.shape[i] == 1 || t.strides[i] % width == 0);
  }
  return r;
}

}  // namespace fk::cuda::attention
