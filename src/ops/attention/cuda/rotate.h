// This file declares the passes before and after the attention kernels on CUDA: operands rotated by
// their position, or brought into a form that tensor cores take (cuda/tiles.cuh), and gradients
// rotated back. Operands go into the workspace, without gaps, as (B, L, heads, columns) or (T,
// heads, columns), their columns filled up with zeros to a multiple of 8.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>

#include "core/status.h"
#include "ops/attention/problem.h"

namespace fk::cuda::attention {

using fk::attention::Problem;

// Holds tables of cosines and sines, (M, R).
struct Rotation {
  const void *cos = nullptr, *sin = nullptr;
  DType cos_dtype = DType::kFloat32, sin_dtype = DType::kFloat32;
  int64_t cos_strides[2] = {}, sin_strides[2] = {};
  int64_t positions = 0;
  int pairs = 0;  // 0: nothing is rotated
  bool interleaved = false;
};

template <class Args>
Rotation rotation_of(const Args& a) {
  Rotation r;
  if (!a.rotary_cos || a.rotary_cos.size(0) == 0) return r;
  r.cos = a.rotary_cos.data;
  r.sin = a.rotary_sin.data;
  r.cos_dtype = a.rotary_cos.dtype;
  r.sin_dtype = a.rotary_sin.dtype;
  for (int i = 0; i < 2; ++i) {
    r.cos_strides[i] = a.rotary_cos.stride(i);
    r.sin_strides[i] = a.rotary_sin.stride(i);
  }
  r.positions = a.rotary_cos.size(0);
  r.pairs = static_cast<int>(a.rotary_cos.size(1));
  r.interleaved = a.rotary_interleaved;
  return r;
}

// Elements are stored as they are, as one float16 with a common scale per batch entry and key head,
// or as two such terms, the low ones in a tensor of their own behind the high ones.
enum class Form { kSame, kScaled, kTwoTerms };

inline int64_t prepared_columns(const Tensor& x) { return (x.size(-1) + 7) / 8 * 8; }
inline int64_t prepared_elements(const Tensor& x) {
  return x.size(-1) == 0 ? 0 : x.numel() / x.size(-1) * prepared_columns(x);
}

// The backward needs these of each row: lse as a power of 2 (inf where it was -inf, since such rows
// have no gradients), and delta = rowsum(dout out) - dlse. Both are (batch, heads, queries).
struct RowStatistics {
  fk::attention::View out, lse, dlse;
  float *exponents = nullptr, *delta = nullptr;
  uint32_t* maxima = nullptr;  // of delta, as Preparation has them

  // Stores both for a row whose products with out sum up to `sum`, and returns delta.
  FK_HOST_DEVICE float store(const Problem& p, int64_t b, int64_t row, int64_t head,
                             float sum) const {
    const auto at = [&](const fk::attention::View& view) {
      return static_cast<const float*>(
          view.data)[b * view.batch + row * view.row + head * view.head];
    };
    if (dlse.data != nullptr) sum -= at(dlse);
    const bool none = at(lse) == -INFINITY;
    const int64_t to = (b * p.heads + head) * p.q_len + row;
    exponents[to] = none ? INFINITY : at(lse) * fk::attention::kLog2e;
    delta[to] = none ? 0.f : sum;
    return delta[to];
  }
};

// Describes a tensor (q, k, v or dout) that is to be written in another form.
struct Preparation {
  const Tensor* x;
  bool queries;  // its rows are those of q
  Rotation rotation;
  void* to;
  // Scaled forms have the largest finite magnitudes here, (batch, key heads), and behind them, for
  // each of these, those of most_slices slices of its rows.
  uint32_t* maxima = nullptr;
  fk::attention::View scales = {};  // what 8-bit elements are multiplied by, by sequence and head
  // Where dout in float32 is prepared, its statistics may be found on the way.
  const RowStatistics* statistics = nullptr;
};

// Returns whether prepare can find these statistics on the way.
bool takes_statistics(const Tensor& dout, const Tensor& out);

// Returns how many slices a batch entry has at most: enough for a whole GPU, but few to read again.
inline int64_t most_slices(int64_t batch) {
  return std::clamp<int64_t>(1024 / std::max<int64_t>(1, batch), 8, 512);
}

// The tensors of one call of prepare are all of one dtype, and at most so many.
constexpr int kMostPreparations = 4;
// Sums that are added to later are zeroed on the way; their number is a multiple of 4.
Status prepare(const Problem& problem, Form form, const Preparation* tensors, int count,
               cudaStream_t stream, float* sums = nullptr, int64_t sum_count = 0);

// Writes gradient = `sums`, rotated back. The sums are float32 without gaps, `columns` of them a
// head, or lie in the patches of cuda/tiles.cuh.
Status finish_gradient(const Problem& problem, const float* sums, int64_t columns, bool queries,
                       bool patches, const Rotation& rotation, const Tensor& gradient,
                       cudaStream_t stream);

// Writes gradient = x, rotated back. x has the gradient's dtype and no gaps.
Status rotate_back(const Problem& problem, const void* x, bool queries, const Rotation& rotation,
                   const Tensor& gradient, cudaStream_t stream);

}  // namespace fk::cuda::attention
