#include "core/tensor.h"

#include <algorithm>
#include <cstring>

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

// This is as many bytes as any address space has, and so few that sums and products of a few sizes
// and strides do not overflow.
constexpr int64_t kMaxBytes = int64_t{1} << 57;

// Returns whether the tensor's lowest and its highest element lie at most kMaxBytes apart. The
// tensor must not be empty.
bool spans_address_space(const Tensor& t) {
  int64_t elements = 1;
  for (int i = 0; i < t.ndim; ++i) {
    int64_t reach;
    if (__builtin_mul_overflow(t.shape[i] - 1, t.strides[i], &reach)) return true;
    if (reach < 0 ? __builtin_sub_overflow(elements, reach, &elements)
                  : __builtin_add_overflow(elements, reach, &elements)) {
      return true;
    }
  }
  int64_t bytes;
  return __builtin_mul_overflow(elements, size_of(t.dtype), &bytes) || bytes > kMaxBytes;
}

// Nobody moves along a dimension of size 1, nor anywhere in an empty tensor, so their strides may
// be any numbers. They become those of a tensor without gaps there, which addresses can be computed
// with.
void neutralise_strides(Tensor* t, bool empty) {
  int64_t without_gaps = 1;
  for (int i = t->ndim - 1; i >= 0; --i) {
    if (empty || t->shape[i] == 1) t->strides[i] = without_gaps;
    without_gaps = t->strides[i] * std::max<int64_t>(t->shape[i], 1);
  }
}

}  // namespace

Status from_dlpack(const DLTensor& in, bool needs_data, Tensor* out) {
  if (in.ndim < 0 || in.ndim > kMaxDims) {
    return invalid("expected at most " + std::to_string(kMaxDims) + " dimensions, got " +
                   std::to_string(in.ndim));
  }
  // This is a number, since what a caller sends need not be a value of the enum.
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
  bool empty = false, gapless = true;
  int64_t elements = 1;  // without the sizes that are 0
  bool too_large = false;
  for (int i = in.ndim - 1; i >= 0; --i) {
    const int64_t n = in.shape[i];
    if (n < 0) {
      return invalid("expected sizes of at least 0, got " + shape_string(in.shape, in.ndim));
    }
    out->shape[i] = n;
    out->strides[i] = in.strides != nullptr ? in.strides[i] : elements;
    empty = empty || n == 0;
    gapless = gapless && out->strides[i] == elements;
    too_large = too_large || __builtin_mul_overflow(elements, std::max<int64_t>(n, 1), &elements) ||
                elements > kMaxBytes;
  }
  if (too_large || elements * size_of(out->dtype) > kMaxBytes) {
    return invalid("shape " + shape_string(in.shape, in.ndim) + " is too large to address");
  }
  if (!gapless) {  // which few tensors are, and the rest takes longer than all before
    if (!empty && spans_address_space(*out)) {
      return invalid("strides " + shape_string(out->strides, in.ndim) +
                     " reach too far to address");
    }
    neutralise_strides(out, empty);
  }
  if (in.byte_offset > static_cast<uint64_t>(kMaxBytes)) {
    return invalid("byte_offset " + std::to_string(in.byte_offset) + " is too large to address");
  }
  if (needs_data && in.data == nullptr && !empty) return invalid("data is NULL");
  if (in.data == nullptr) return {};
  // The sum is one of numbers, since the offset of an empty tensor may lie anywhere.
  const uintptr_t address = reinterpret_cast<uintptr_t>(in.data) + in.byte_offset;
  if (!empty && (address & static_cast<uintptr_t>(size_of(out->dtype) - 1)) != 0) {
    return invalid(std::string("expected data aligned to the ") +
                   std::to_string(size_of(out->dtype)) + " bytes of " + name_of(out->dtype) +
                   ", got an address that is not");
  }
  out->data = reinterpret_cast<void*>(address);
  return {};
}

}  // namespace fk
