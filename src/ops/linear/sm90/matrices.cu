// Hopper's matrix product for other rooms (cuda/gemm/sm90_call.h).
#include "cuda/gemm/sm90_call.h"
#include "ops/linear/sm90/call.h"

namespace fk::cuda_sm90 {

namespace {

// An operand where it lies; `copied` says that it would have to be copied.
Matrix in_place(const Tensor& t, DType dtype) {
  WorkspaceParts none(nullptr);
  return Matrix(t, dtype, none);
}

bool serves(const Tensor& t, DType dtype) { return !in_place(t, dtype).copied && aligned(t); }

}  // namespace

int64_t MatrixProduct::rows() const { return a_rows_are_outer ? rows_of(a).count : a.size(-1); }
int64_t MatrixProduct::columns() const { return b_rows_are_outer ? rows_of(b).count : b.size(-1); }
int64_t MatrixProduct::depth() const { return a_rows_are_outer ? a.size(-1) : rows_of(a).count; }

bool takes(const MatrixProduct& p) {
  constexpr int64_t kMaxSize = int64_t{1} << 30;
  const DType dtype = p.a.dtype;
  if (dtype != DType::kFloat16 && dtype != DType::kBFloat16) return false;
  if (cuda::device_properties(p.a.device_id).code < 90) return false;
  if (!p.a_rows_are_outer && p.b_rows_are_outer) return false;
  for (const int64_t size : {p.rows(), p.columns(), p.depth()}) {
    if (size == 0 || size > kMaxSize) return false;
  }
  return (p.rows() / 128 + 1) * (p.columns() / 128 + 1) < kMaxSize && serves(p.a, dtype) &&
         serves(p.b, dtype) && in_even_rows(p.out);
}

int64_t matrix_partial_floats(int64_t rows, int64_t columns, int64_t depth, int device) {
  if (cuda::device_properties(device).code < 90) return 0;
  return partial_floats(rows, columns, depth, false, 1, device);
}

Status multiply(const MatrixProduct& p, cudaStream_t stream) {
  Product f;
  f.dtype = p.a.dtype;
  f.a = in_place(p.a, f.dtype);
  f.b = in_place(p.b, f.dtype);
  f.a_major = p.a_rows_are_outer ? cuda::Major::kK : cuda::Major::kOuter;
  f.b_major = p.b_rows_are_outer ? cuda::Major::kK : cuda::Major::kOuter;
  f.rows = p.rows();
  f.columns = p.columns();
  f.depth = p.depth();
  f.out = p.out;
  f.partials = p.partials;
  if (p.bias) {
    f.epilogue.bias = p.bias.data;
    f.epilogue.float_bias = p.bias.dtype == DType::kFloat32;
    f.epilogue.bias_stride = p.bias.stride(0);
  }
  return multiply(f, p.a.device_id, stream);
}

}  // namespace fk::cuda_sm90
