#include "core/infer.h"

#include <algorithm>
#include <string>

namespace fk {
namespace {

Status unknown_dtype(const Field& output) {
  return invalid(output.name + ": its dtype cannot be told from the inputs");
}

}  // namespace

OutputInference::OutputInference(const OpDeclaration& op, const fk_slot* slots)
    : op_(op), slots_(slots), shapes_(op, slots) {
  for (size_t i = 0; i < op.fields.size(); ++i) {
    const Field& f = op.fields[i];
    if (f.kind == Kind::kAxis) {
      axis_field_ = &f;
      axis_ = slots[i].integer;
    } else if (f.symbol >= 0) {
      shapes_.tell(f.symbol, slots[i].integer, f);
    }
  }
  for (size_t i = 0; i < op.fields.size(); ++i) {
    if (op.fields[i].kind == Kind::kInput && slots[i].tensor != nullptr) {
      learn(op.fields[i], *slots[i].tensor);
    }
  }
  shapes_.tell_sizes_not_given();
}

void OutputInference::learn(const Field& input, const DLTensor& tensor) {
  if (tensor.ndim > kMaxDims || input.shape_of >= 0) return;
  int64_t moved[kMaxDims];
  const int64_t* sizes = tensor.shape;
  if (input.along_axis) {
    const int64_t axis = axis_ < 0 ? axis_ + tensor.ndim : axis_;
    if (axis < 0 || axis >= tensor.ndim) return;
    std::copy_n(tensor.shape, tensor.ndim, moved);
    std::rotate(moved + axis, moved + axis + 1, moved + tensor.ndim);
    sizes = moved;
  }
  static_cast<void>(shapes_.match(input, tensor.ndim, sizes).ok());
}

Status OutputInference::infer(const Field& output, OutputType* type) const {
  FK_RETURN_IF_ERROR(shapes_.infer_shape(output, &type->ndim, type->shape));
  if (output.along_axis && output.shape_of < 0) {
    const int64_t axis = axis_ < 0 ? axis_ + type->ndim : axis_;
    if (axis < 0 || axis >= type->ndim) {
      return invalid(axis_field_->name + ": expected " + std::to_string(-type->ndim) + " to " +
                     std::to_string(type->ndim - 1) + ", got " + std::to_string(axis_));
    }
    int64_t* shape = type->shape;
    std::rotate(shape + axis, shape + type->ndim - 1, shape + type->ndim);
  }
  return infer_dtype(output, &type->dtype);
}

Status OutputInference::infer_dtype(const Field& output, DLDataType* dtype) const {
  switch (output.dtype_rule) {
    case DTypeRule::kFloat32:
    case DTypeRule::kParameter:
      *dtype = {kDLFloat, 32, 1};
      return {};
    case DTypeRule::kInt32:
      *dtype = {kDLInt, 32, 1};
      return {};
    case DTypeRule::kIndex:
      *dtype = {kDLInt, 64, 1};
      return {};
    case DTypeRule::kActivation:
      for (size_t i = 0; i < op_.fields.size(); ++i) {
        const Field& f = op_.fields[i];
        if (f.kind != Kind::kInput || f.dtype_rule != DTypeRule::kActivation) continue;
        if (slots_[i].tensor == nullptr) continue;
        *dtype = slots_[i].tensor->dtype;
        if (dtype->code == FLASHKERNEL_DL_FLOAT8_E4M3FN) *dtype = {kDLBfloat, 16, 1};
        return {};
      }
      return unknown_dtype(output);
    case DTypeRule::kSameAs: {
      const DLTensor* other = slots_[output.dtype_of].tensor;
      if (other == nullptr) return unknown_dtype(output);
      *dtype = other->dtype;
      return {};
    }
  }
  return {};
}

}  // namespace fk
