// Calls of Hopper's product of few rows: how many blocks share K, and the descriptors of copies.
#include <algorithm>

#include "cuda/gemm/portable_call.cuh"
#include "ops/linear/sm90/few_rows.cuh"
#include "ops/linear/sm90/few_rows.h"

namespace fk::cuda_sm90 {

namespace {

// Returns with how many blocks that share K the last multiprocessor ends first, in slices. To share
// costs as much as some slices.
int few_rows_splits(int64_t tiles, int64_t slices, int most, int device) {
  constexpr int64_t kLeastSlices = 3, kCost = 4;
  const int64_t multiprocessors = cuda::device_properties(device).multiprocessors;
  int best = 1;
  int64_t least = INT64_MAX;
  for (int splits = 1; splits <= most && (splits == 1 || slices / splits >= kLeastSlices);
       splits *= 2) {
    const int64_t time =
        ceil_div(tiles * splits, multiprocessors) * ceil_div(slices, int64_t{splits}) +
        (splits > 1 ? kCost : 0);
    if (time >= least) continue;
    least = time;
    best = splits;
  }
  return best;
}

Status few_rows_map(CUtensorMap* map, const Matrix& m, DType dtype, int outer) {
  cuda::TensorMapShape shape;
  shape.dims = 2;
  shape.sizes[0] = m.columns;
  shape.sizes[1] = m.rows;
  shape.strides[1] = m.stride * size_of(dtype);
  shape.box[0] = 128 / static_cast<int>(size_of(dtype));
  shape.box[1] = outer;
  return cuda::make_tensor_map(map, m.data, dtype, shape);
}

template <class T, int kX, cuda::Major kWeight>
Status launch_few_rows(FewRowsArguments f, const Product& p, DType operands, int device,
                       cudaStream_t stream) {
  using Plan = FewRowsPlan<T, kX>;
  FK_RETURN_IF_ERROR(few_rows_map(&f.x, p.a, operands, kX));
  FK_RETURN_IF_ERROR(few_rows_map(&f.weight, p.b, operands, p.gated ? 32 : 64));
  if (p.gated) FK_RETURN_IF_ERROR(few_rows_map(&f.second, p.second_b, operands, 32));
  f.slices = static_cast<int>(ceil_div(p.depth, int64_t{Plan::kDepth}));
  const int64_t tiles = ceil_div(p.columns, int64_t{Plan::kColumns / (p.gated ? 2 : 1)});
  f.splits = few_rows_splits(tiles, f.slices, p.gated ? 4 : 8, device);
  cuda::LaunchShape shape{{static_cast<unsigned>(tiles), 1, static_cast<unsigned>(f.splits)},
                          {Plan::kThreads},
                          Plan::kSharedBytes,
                          f.splits > 1};
  return cuda::launch_early(few_rows_product<T, kX, kWeight>, "few_rows_product", shape, stream, f);
}

template <class T, cuda::Major kWeight>
Status launch_rows(const FewRowsArguments& f, const Product& p, DType operands, int device,
                   cudaStream_t stream) {
  if (p.rows <= 16) return launch_few_rows<T, 16, kWeight>(f, p, operands, device, stream);
  if constexpr (sizeof(T) == 1) {
    if (p.rows > 32) return launch_few_rows<T, 64, kWeight>(f, p, operands, device, stream);
  }
  return launch_few_rows<T, 32, kWeight>(f, p, operands, device, stream);
}

}  // namespace

bool takes_few_rows(const Tensor& x, const Tensor& weight) {
  if (cuda::device_properties(x.device_id).code < 90) return false;
  const auto lies_well = [](const Tensor& t) {
    const Rows r = rows_of(t);
    return r.ndim <= 1 && r.count > 0 && r.count < (int64_t{1} << 30) && t.size(-1) > 0 &&
           t.size(-1) < (int64_t{1} << 30) && (t.stride(-1) == 1 || t.size(-1) == 1) &&
           cuda::tensor_map_takes(r.count, r.last_stride * size_of(t.dtype));
  };
  return rows_of(x).count <= most_few_rows(x.dtype) && lies_well(x) && lies_well(weight);
}

Status multiply_few_rows(const Product& p, DType operands, const ScaledLinearFwd* scaled,
                         int device, cudaStream_t stream) {
  FewRowsArguments f = {};
  cuda::PortableArguments& results = f.results;
  results.out = cuda::result(p.out);
  results.before = cuda::result(p.before);
  results.before_up = cuda::result(p.before_up);
  results.residual = cuda::result(p.residual);
  results.gated = p.gated;
  results.rows = p.rows;
  results.columns = p.columns;
  results.epilogue = p.epilogue;
  results.results_in_vectors = cuda::results_in_vectors(results, p.dtype);
  if (scaled != nullptr) {
    f.x_scale = x_scales(*scaled);
    f.weight_scale = weight_scales(*scaled);
    return launch_rows<__nv_fp8_e4m3, cuda::Major::kK>(f, p, operands, device, stream);
  }
  const auto with = [&](auto type) {
    using T = decltype(type);
    return p.b_major == cuda::Major::kK
               ? launch_rows<T, cuda::Major::kK>(f, p, operands, device, stream)
               : launch_rows<T, cuda::Major::kOuter>(f, p, operands, device, stream);
  };
  return operands == DType::kFloat16 ? with(__half()) : with(__nv_bfloat16());
}

}  // namespace fk::cuda_sm90
