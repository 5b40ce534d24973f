// Encodes tensor maps, by the one driver call that the library needs.
#include <cuda_runtime_api.h>

#include <string>

#include "cuda/launch.h"
#include "cuda/tma.h"

namespace fk::cuda {

namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

// Finds the driver's function through the runtime, so that the library does not link with the
// driver and loads on machines without one. Returns null where there is none.
Encode find_encode() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                             12000, cudaEnableDefault, &result);
#else
  const cudaError_t error =
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
    static_cast<void>(cudaGetLastError());  // clears the error, or a later launch check finds it
    return nullptr;
  }
  return reinterpret_cast<Encode>(entry);
}

// The driver's name for a dtype; the copy engine moves 8-bit floats as bytes.
CUtensorMapDataType map_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kBFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::kInt32:
      return CU_TENSOR_MAP_DATA_TYPE_INT32;
    case DType::kInt64:
      return CU_TENSOR_MAP_DATA_TYPE_INT64;
    case DType::kFloat64:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT64;
    case DType::kInt8:
    case DType::kUInt8:
    case DType::kFloat8E4M3:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    case DType::kFloat32:
      break;
  }
  return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
}

// Gives the calling thread a context for the driver by choosing its current device again. A thread
// that has made no runtime call yet has none; torch runs backward passes on such threads.
Status choose_device() {
  int device = 0;
  FK_RETURN_IF_ERROR(check(cudaGetDevice(&device), "cudaGetDevice"));
  return check(cudaSetDevice(device), "cudaSetDevice");
}

}  // namespace

Status make_tensor_map(CUtensorMap* map, const void* data, DType dtype, const TensorMapShape& shape,
                       bool swizzle) {
  static const Encode encode = find_encode();
  if (encode == nullptr) return {FK_CUDA_ERROR, "the driver has no cuTensorMapEncodeTiled"};
  cuuint64_t sizes[5], strides[4];
  cuuint32_t box[5], steps[5];
  for (int i = 0; i < shape.dims; ++i) {
    sizes[i] = static_cast<cuuint64_t>(shape.sizes[i]);
    box[i] = static_cast<cuuint32_t>(shape.box[i]);
    steps[i] = 1;
    // A dimension of size 1 may have any stride, but the driver checks it and wants a multiple of
    // 16.
    if (i > 0)
      strides[i - 1] = shape.sizes[i] == 1 ? 16 : static_cast<cuuint64_t>(shape.strides[i]);
  }
  const auto call = [&] {
    return encode(map, map_type(dtype), static_cast<cuuint32_t>(shape.dims),
                  const_cast<void*>(data), sizes, strides, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE,
                  swizzle ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  // A thread chooses its device before its first call, which would fail otherwise, and again if
  // someone has taken its context away since.
  thread_local bool chosen = false;
  if (!chosen) FK_RETURN_IF_ERROR(choose_device());
  chosen = true;
  CUresult result = call();
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    FK_RETURN_IF_ERROR(choose_device());
    result = call();
  }
  if (result == CUDA_SUCCESS) return {};
  return {FK_CUDA_ERROR,
          "cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(result))};
}

}  // namespace fk::cuda
