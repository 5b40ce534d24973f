// This is the pass behind the attention kernels (cuda/rotate.h): sums become gradients, rotated
// back. Its floor is one read and one write of each element.
#include "cuda/dependent_launch.cuh"
#include "ops/attention/cuda/rotate.cuh"

namespace fk::cuda::attention {
namespace {

struct Finish {
  Rows rows;
  const void* sums;
  int64_t columns;     // of the sums
  int64_t patch_rows;  // of a head; 0: sums lie as the gradient does
  Result gradient;
};

template <class T>
__global__ void __launch_bounds__(kPassThreads) finish_rows(const __grid_constant__ Finish p) {
  wait_for_earlier_kernels();
  const Rows& rows = p.rows;
  int64_t piece, head, row;
  const int64_t place = divide(
      (static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * kPassThreads + threadIdx.x,
      (rows.columns + 7) / 8, &piece);
  const int64_t b = divide(divide(place, rows.heads, &head), rows.rows, &row);
  if (b >= rows.batch) return;
  const int first = static_cast<int>(piece) * 8;
  const T* sums = static_cast<const T*>(p.sums) + place * p.columns;
  float values[8];
  if (sizeof(T) == 2 && rows.pieces) {
    if constexpr (sizeof(T) == 2) rows.rotate_piece(sums, first, row, -1.f, values);
  } else {
    rows.rotate_columns(
        first, row, -1.f, [&](int c) { return to_float(sums[c]); }, values);
  }
  p.gradient.store_eight(p.gradient.at(b, row, head), first, values);
}

// The sums lie in patches (cuda/tiles.cuh); one thread takes two rows, 8 apart, of a patch.
__global__ void __launch_bounds__(kPassThreads) finish_patches(const __grid_constant__ Finish p) {
  wait_for_earlier_kernels();
  const Rows& rows = p.rows;
  const int64_t index =
      (static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * kPassThreads + threadIdx.x;
  int64_t piece, patch, head;
  const int64_t strip = divide(index / 8, p.columns / 8, &piece);
  const int64_t place = divide(strip, p.patch_rows / 16, &patch);
  const int64_t b = divide(place, rows.heads, &head);
  if (b >= rows.batch) return;
  int64_t row = patch * 16, end = rows.rows;
  if (rows.problem.packed) {
    const auto first_row = [&](int64_t s) {
      return first_patch_row(rows.problem, rows.problem.sequence(s).q_begin, s);
    };
    const int64_t s = rows.last_sequence([&](int64_t x) { return first_row(x) <= patch * 16; });
    const Sequence sequence = rows.problem.sequence(s);
    row += sequence.q_begin - first_row(s);
    end = sequence.q_begin + sequence.q_len;
  }
  const int in_patch = static_cast<int>(index % 8);
  const float* sums =
      static_cast<const float*>(p.sums) + strip * p.columns * 16 + in_patch * 4 * kPatchLane;
  float loaded[2][8] = {};
  if (rows.rotation.pairs == 0) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      float four[4];
      const float* from = sums + piece * 128 + pair * kPatchLane;
      if constexpr (kPatchElement == 1) {
        unpack(load<4>(from), four);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) four[e] = from[e * kPatchElement];
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) loaded[e / 2][pair * 2 + e % 2] = four[e];
    }
  }
  const int first = static_cast<int>(piece) * 8;
#pragma unroll 1  // much code
  for (int r = 0; r < 2; ++r) {
    const int64_t at = row + in_patch + r * 8;
    if (at >= end) return;
    float values[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) values[e] = r == 0 ? loaded[0][e] : loaded[1][e];
    if (rows.rotation.pairs > 0) {
      rows.rotate_columns(
          first, at, -1.f,
          [&](int c) {
            return sums[c / 8 * 128 + c % 8 / 2 * kPatchLane + (r * 2 + c % 2) * kPatchElement];
          },
          values);
    }
    p.gradient.store_eight(p.gradient.at(b, at, head), first, values);
  }
}

Status finish(const Problem& problem, const void* sums, int64_t columns, bool queries, bool patches,
              const Rotation& rotation, const Tensor& gradient, void (*kernel)(Finish),
              cudaStream_t stream) {
  if (gradient.numel() == 0) return {};
  Finish p;
  p.rows = rows_of_tensor(problem, gradient, queries, rotation);
  p.sums = sums;
  p.columns = columns;
  p.patch_rows = patches ? patch_rows(problem, p.rows.rows) : 0;
  p.gradient = result_of(gradient);
  const int64_t rows = p.rows.batch * p.rows.heads * (patches ? p.patch_rows / 2 : p.rows.rows);
  return launch_early(kernel, "attention finish_gradient",
                      {grid_of(ceil_div(rows * ceil_div(columns, 8), kPassThreads)), kPassThreads},
                      stream, p);
}

}  // namespace

Status finish_gradient(const Problem& problem, const float* sums, int64_t columns, bool queries,
                       bool patches, const Rotation& rotation, const Tensor& gradient,
                       cudaStream_t stream) {
  return finish(problem, sums, columns, queries, patches, rotation, gradient,
                patches ? finish_patches : finish_rows<float>, stream);
}

Status rotate_back(const Problem& problem, const void* x, bool queries, const Rotation& rotation,
                   const Tensor& gradient, cudaStream_t stream) {
  return finish(
      problem, x, gradient.size(-1), queries, false, rotation, gradient,
      gradient.dtype == DType::kFloat16 ? finish_rows<__half> : finish_rows<__nv_bfloat16>, stream);
}

}  // namespace fk::cuda::attention
