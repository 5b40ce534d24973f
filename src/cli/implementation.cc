#include "cli/commands.h"

namespace fk::cli {
namespace {

DLDataType dlpack_dtype(DType dtype) {
  const auto bits = static_cast<uint8_t>(8 * size_of(dtype));
  switch (dtype) {
    case DType::kFloat8E4M3:
      return {FLASHKERNEL_DL_FLOAT8_E4M3FN, bits, 1};
    case DType::kBFloat16:
      return {kDLBfloat, bits, 1};
    case DType::kInt8:
    case DType::kInt32:
    case DType::kInt64:
      return {kDLInt, bits, 1};
    case DType::kUInt8:
      return {kDLUInt, bits, 1};
    default:
      return {kDLFloat, bits, 1};
  }
}

}  // namespace

std::string implementation_of(const Sample& sample, DLDeviceType device) {
  std::vector<DLTensor> tensors(sample.tensors.size());
  std::vector<fk_slot> slots = sample.attributes;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Kind kind = sample.op->declaration.fields[i].kind;
    if (kind != Kind::kInput && kind != Kind::kOutput) continue;
    const SampleTensor& t = sample.tensors[i];
    tensors[i].device = {device, 0};
    tensors[i].ndim = static_cast<int32_t>(t.shape.size());
    tensors[i].dtype = dlpack_dtype(t.dtype);
    tensors[i].shape = const_cast<int64_t*>(t.shape.data());
    tensors[i].strides = const_cast<int64_t*>(t.strides.data());
    slots[i].tensor = t.present ? &tensors[i] : nullptr;
  }
  const char* name = "";
  return query_implementation(*sample.op, slots.data(), &name).ok() ? name : "";
}

}  // namespace fk::cli
