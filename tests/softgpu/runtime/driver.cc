// This file holds the one function of the driver that the library asks for: it describes a tensor
// to the copy engine.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "softgpu/runtime/errors.h"
#include "softgpu/softgpu.h"

using namespace fk::softgpu;

namespace {

// Returns 0 where the type is not known here.
uint32_t bytes_of(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
      return 4;
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64:
      return 8;
    default:
      return 0;
  }
}

CUresult refuse(CUresult result, const std::string& why) {
  std::fprintf(stderr, "softgpu: cuTensorMapEncodeTiled: %s\n", why.c_str());
  return result;
}

CUresult encode_tiled(CUtensorMap* to, CUtensorMapDataType type, cuuint32_t rank, void* address,
                      const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                      const cuuint32_t* steps, CUtensorMapInterleave interleave,
                      CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                      CUtensorMapFloatOOBfill fill) {
  TensorMap map;
  if (rank < 1 || rank > 5) return refuse(CUDA_ERROR_INVALID_VALUE, "expected 1 to 5 dimensions");
  map.rank = rank;
  map.element_bytes = bytes_of(type);
  map.type = static_cast<uint32_t>(type);
  map.address = reinterpret_cast<uint64_t>(address);
  map.swizzle = static_cast<Swizzle>(swizzle);
  map.strides[0] = map.element_bytes;
  for (cuuint32_t i = 0; i < rank; ++i) {
    map.sizes[i] = sizes[i];
    map.box[i] = box[i];
    if (i > 0) map.strides[i] = strides[i - 1];
    if (steps[i] != 1) return refuse(CUDA_ERROR_NOT_SUPPORTED, "steps between elements");
  }
  if (map.element_bytes == 0 || swizzle > CU_TENSOR_MAP_SWIZZLE_128B ||
      interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) {
    return refuse(CUDA_ERROR_NOT_SUPPORTED,
                  "a type, interleave, swizzle or fill that the software GPU does not know");
  }
  static_assert(sizeof(CUtensorMap) == 128, "what encode_tensor_map writes");
  const std::string problem = encode_tensor_map(to, map);
  return problem.empty() ? CUDA_SUCCESS : refuse(CUDA_ERROR_INVALID_VALUE, problem);
}

cudaError_t find_entry(const char* name, void** entry, cudaDriverEntryPointQueryResult* result) {
  const bool known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *entry = known ? reinterpret_cast<void*>(encode_tiled) : nullptr;
  if (result != nullptr) {
    *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  }
  return corrupted();
}

}  // namespace

extern "C" {

#if CUDART_VERSION >= 12050
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  return find_entry(name, entry, result);
}
#else
cudaError_t cudaGetDriverEntryPoint(const char* name, void** entry, unsigned long long,
                                    cudaDriverEntryPointQueryResult* result) {
  return find_entry(name, entry, result);
}
#endif

}  // extern "C"
