// Calls of the matrix product for any architecture.
#include "cuda/gemm/portable_product.cuh"

namespace fk::cuda {

ProductOperand operand(const Tensor& t, bool rows_are_outer) {
  return {t.data, t.dtype == DType::kFloat32, rows_are_outer, rows_of(t), t.stride(-1)};
}

ProductResult result(const Tensor& t) {
  if (!t) return {};
  return {t.data, t.dtype == DType::kFloat32, rows_of(t), t.stride(-1)};
}

bool in_vectors(const Tensor& t, DType dtype) {
  const int64_t width = 16 / size_of(dtype);
  bool fits = t.dtype == dtype && t.stride(-1) == 1 && t.size(-1) % width == 0;
  for (int i = 0; i + 1 < t.ndim; ++i) fits &= t.shape[i] == 1 || t.strides[i] % width == 0;
  return fits && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

Status multiply(const PortableArguments& f, DType dtype, bool vectors, int device,
                cudaStream_t stream) {
  if (f.rows == 0 || f.columns == 0) return {};
  const auto tiles = [](int64_t n) { return (n + kPortableTile - 1) / kPortableTile; };
  const int64_t blocks = tiles(f.rows) * tiles(f.columns);
  if (blocks > INT32_MAX) return {FK_UNSUPPORTED, "the result has more than 2^43 elements"};
  const LaunchShape shape{{static_cast<unsigned>(blocks)}, {kPortableThreads}};
  const auto run = [&](auto with_vectors, auto without) {
    return launch_early(vectors ? with_vectors : without, "portable_product", shape, stream, f);
  };
  if (dtype == DType::kFloat32) {
    return run(portable_product_in_float<float, true>, portable_product_in_float<float, false>);
  }
  if (dtype == DType::kFloat16) {
    return run(portable_product<__half, true>, portable_product<__half, false>);
  }
  if (device_properties(device).code < 80) {
    return run(portable_product_in_float<__nv_bfloat16, true>,
               portable_product_in_float<__nv_bfloat16, false>);
  }
  return run(portable_product<__nv_bfloat16, true>, portable_product<__nv_bfloat16, false>);
}

}  // namespace fk::cuda
