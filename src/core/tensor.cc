#include "core/tensor.h"

#include <cstring>
#include <limits>

namespace fk {

const char* name_of(DType t) {
  switch (t) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat64:
      return "float64";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kInt8:
      return "int8";
    case DType::kUInt8:
      return "uint8";
    case DType::kFloat8E4M3:
      return "float8_e4m3fn";
  }
  return "?";
}

std::string shape_string(const int64_t* shape, int ndim) {
  std::string s = "(";
  for (int i = 0; i < ndim; ++i) {
    if (i > 0) s += ", ";
    s += std::to_string(shape[i]);
  }
  if (ndim == 1) s += ",";
  return s + ")";
}

namespace {

bool dtype_from_dlpack(DLDataType in, DType* out) {
  if (in.lanes != 1) return false;
  struct Row {
    uint8_t code, bits;
    DType dtype;
  };
  static constexpr Row kRows[] = {
      {kDLFloat, 32, DType::kFloat32},
      {kDLFloat, 16, DType::kFloat16},
      {kDLBfloat, 16, DType::kBFloat16},
      {kDLFloat, 64, DType::kFloat64},
      {kDLInt, 32, DType::kInt32},
      {kDLInt, 64, DType::kInt64},
      {kDLInt, 8, DType::kInt8},
      {kDLUInt, 8, DType::kUInt8},
      {FLASHKERNEL_DL_FLOAT8_E4M3FN, 8, DType::kFloat8E4M3},
  };
  for (const Row& row : kRows) {
    if (row.code == in.code && row.bits == in.bits) {
      *out = row.dtype;
      return true;
    }
  }
  return false;
}

// How many bytes lie between the tensor's lowest and its highest element, its own included; -1 if
// there are more than can be addressed. Not for empty tensors.
int64_t bytes_spanned(const Tensor& t) {
  int64_t elements = 1;
  for (int i = 0; i < t.ndim; ++i) {
    int64_t reach;
    if (__builtin_mul_overflow(t.shape[i] - 1, t.strides[i], &reach)) return -1;
    if (reach < 0 ? __builtin_sub_overflow(elements, reach, &elements)
                  : __builtin_add_overflow(elements, reach, &elements)) {
      return -1;
    }
  }
  int64_t bytes;
  return __builtin_mul_overflow(elements, size_of(t.dtype), &bytes) ? -1 : bytes;
}

}  // namespace

Status from_dlpack(const DLTensor& in, bool needs_data, Tensor* out) {
  if (in.ndim < 0 || in.ndim > kMaxDims) {
    return invalid("expected at most " + std::to_string(kMaxDims) + " dimensions, got " +
                   std::to_string(in.ndim));
  }
  // As a number: what a caller sends need not be a value of the enum.
  int32_t device_type = 0;
  static_assert(sizeof device_type == sizeof in.device.device_type);
  std::memcpy(&device_type, &in.device.device_type, sizeof device_type);
  if (device_type == kDLCPU || device_type == kDLCUDAHost) {
    out->device = Device::kCpu;
  } else if (device_type == kDLCUDA) {
    out->device = Device::kCuda;
  } else {
    return invalid("expected a CPU or CUDA tensor, got DLPack device type " +
                   std::to_string(device_type));
  }
  if (!dtype_from_dlpack(in.dtype, &out->dtype)) {
    return invalid("unknown dtype (DLPack code " + std::to_string(in.dtype.code) + ", " +
                   std::to_string(in.dtype.bits) + " bits, " + std::to_string(in.dtype.lanes) +
                   " lanes)");
  }
  out->defined = true;
  out->device_id = out->device == Device::kCuda ? in.device.device_id : 0;
  out->ndim = in.ndim;
  if (in.ndim > 0 && in.shape == nullptr) return invalid("shape is NULL");
  int64_t bytes = size_of(out->dtype);
  bool empty = false;
  for (int i = 0; i < in.ndim; ++i) {
    const int64_t n = in.shape[i];
    if (n < 0)
      return invalid("expected sizes of at least 0, got " + shape_string(in.shape, in.ndim));
    out->shape[i] = n;
    if (n == 0) empty = true;
  }
  for (int i = 0; i < in.ndim && !empty; ++i) {
    if (__builtin_mul_overflow(bytes, in.shape[i], &bytes)) {
      return invalid("shape " + shape_string(in.shape, in.ndim) + " is too large to address");
    }
  }
  int64_t contiguous_stride = 1;
  for (int i = in.ndim - 1; i >= 0; --i) {
    out->strides[i] = in.strides != nullptr ? in.strides[i] : contiguous_stride;
    if (!empty) contiguous_stride *= in.shape[i];
  }
  const int64_t span = empty ? 0 : bytes_spanned(*out);
  if (span < 0) {
    return invalid("strides " + shape_string(out->strides, in.ndim) + " reach too far to address");
  }
  if (in.byte_offset > static_cast<uint64_t>(std::numeric_limits<int64_t>::max() - span)) {
    return invalid("byte_offset " + std::to_string(in.byte_offset) + " is too large to address");
  }
  if (needs_data && in.data == nullptr && !empty) return invalid("data is NULL");
  out->data = in.data == nullptr ? nullptr : static_cast<char*>(in.data) + in.byte_offset;
  return {};
}

}  // namespace fk
