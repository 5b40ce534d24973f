// The library sees a tensor in this way: as a DLTensor with everything resolved (byte offset
// applied, strides always present, dtype as one enum), so that kernels never meet a special case.
#pragma once

#include <cstdint>
#include <string>

#include "core/status.h"

namespace fk {

constexpr int kMaxDims = 8;

enum class DType : uint8_t {
  kFloat32,
  kFloat16,
  kBFloat16,
  kFloat64,
  kInt32,
  kInt64,
  kInt8,
  kUInt8,
  kFloat8E4M3  // e4m3fn: no infinities, one NaN of each sign
};

constexpr int64_t size_of(DType t) {
  switch (t) {
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kInt8:
    case DType::kUInt8:
    case DType::kFloat8E4M3:
      return 1;
  }
  return 0;
}

const char* name_of(DType t);

enum class Device : uint8_t { kCpu, kCuda };

struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  Device device = Device::kCpu;
  bool defined = false;  // false: an optional argument that was not given
  int32_t device_id = 0;
  int32_t ndim = 0;
  int64_t shape[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};  // in elements; harmless where nobody moves along them

  explicit operator bool() const { return defined; }

  // Negative dimensions count from the end.
  int64_t size(int dim) const { return shape[dim < 0 ? dim + ndim : dim]; }
  int64_t stride(int dim) const { return strides[dim < 0 ? dim + ndim : dim]; }

  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < ndim; ++i) n *= shape[i];
    return n;
  }

  template <class T>
  T* ptr() const {
    return static_cast<T*>(data);
  }

  // Returns whether the tensor is row-major without gaps. Dimensions of size 1 may have any stride.
  bool contiguous() const {
    int64_t expected = 1;
    for (int i = ndim - 1; i >= 0; --i) {
      if (shape[i] != 1 && strides[i] != expected) return numel() == 0;
      expected *= shape[i];
    }
    return true;
  }
};

// Returns a text such as "(2, 768)".
std::string shape_string(const int64_t* shape, int ndim);
inline std::string shape_string(const Tensor& t) { return shape_string(t.shape, t.ndim); }

// Checks rank, dtype, sizes and reach (an address space must hold them) before anything is read.
// Strides of dimensions of size 1 and of empty tensors become those of a tensor without gaps. A
// query that never touches elements (workspace size) may come without data.
Status from_dlpack(const DLTensor& in, bool needs_data, Tensor* out);

}  // namespace fk
