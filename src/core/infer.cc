#include "core/infer.h"

#include <algorithm>
#include <string>

namespace fk {
namespace {

// The number of the alternative of a field's shapes that a rank fits, or -1. `leading`: how many
// dims "..." is.
int alternative(const Field& field, int ndim, int* leading) {
  for (size_t i = 0; i < field.shapes.size(); ++i) {
    const std::vector<Dim>& shape = field.shapes[i];
    const int named = static_cast<int>(shape.size());
    const bool has_leading = named > 0 && shape[0].symbol == Dim::kEllipsis;
    *leading = has_leading ? ndim - (named - 1) : 0;
    if (has_leading ? *leading >= 0 : ndim == named) return static_cast<int>(i);
  }
  return -1;
}

}  // namespace

Status ShapeInference::bind(const OpDeclaration& op, const fk_slot* slots) {
  std::fill_n(form_, kMaxForms, -1);
  op_ = &op;
  slots_ = slots;
  for (size_t i = 0; i < op.fields.size(); ++i) {
    const Field& f = op.fields[i];
    if (f.kind == Kind::kAxis) {
      axis_field_ = &f;
      axis_ = slots[i].integer;
    } else if (f.symbol >= 0) {
      size_[f.symbol] = slots[i].integer;
      known_[f.symbol] = true;
    }
  }
  for (size_t i = 0; i < op.fields.size(); ++i) {
    if (op.fields[i].kind == Kind::kInput && slots[i].tensor != nullptr) {
      bind_tensor(op.fields[i], *slots[i].tensor);
    }
  }
  for (const auto& [symbol, other] : op.size_unless_given) {
    const int to = symbol_of(symbol), from = symbol_of(other);
    if (to < 0 || from < 0 || known_[to] || !known_[from]) continue;
    size_[to] = size_[from];
    known_[to] = true;
  }
  return {};
}

int ShapeInference::symbol_of(const std::string& name) const {
  for (size_t s = 0; s < op_->symbols.size(); ++s) {
    if (op_->symbols[s] == name) return static_cast<int>(s);
  }
  return -1;
}

void ShapeInference::bind_tensor(const Field& field, const DLTensor& tensor) {
  int leading = 0;
  const int number = alternative(field, tensor.ndim, &leading);
  if (number < 0 || tensor.ndim > kMaxDims) return;
  if (field.form_index >= 0) {
    int& form = form_[field.form_index];
    if (form < 0) form = number;
    if (form != number) return;
  }
  int64_t moved[kMaxDims];
  const int64_t* sizes = tensor.shape;
  if (field.along_axis) {
    const int64_t axis = axis_ < 0 ? axis_ + tensor.ndim : axis_;
    if (axis < 0 || axis >= tensor.ndim) return;
    for (int i = 0, k = 0; i < tensor.ndim; ++i) {
      if (i != axis) moved[k++] = tensor.shape[i];
    }
    moved[tensor.ndim - 1] = tensor.shape[axis];
    sizes = moved;
  }
  for (const Dim& dim : field.shapes[static_cast<size_t>(number)]) {
    if (dim.symbol == Dim::kEllipsis) {
      if (leading_ndim_ < 0) {
        leading_ndim_ = leading;
        for (int i = 0; i < leading; ++i) leading_[i] = sizes[i];
      }
      sizes += leading;
      continue;
    }
    if (dim.symbol != Dim::kNumber && !dim.or_one && dim.blocks_of < 0 && !known_[dim.symbol]) {
      size_[dim.symbol] = *sizes - dim.offset;
      known_[dim.symbol] = true;
    }
    ++sizes;
  }
}

Status ShapeInference::output(const Field& field, OutputType* out) const {
  const auto unknown = [&](const std::string& what) {
    return invalid(field.name + ": its " + what + " cannot be told from the inputs");
  };
  out->ndim = 0;
  if (field.shape_of >= 0) {
    const DLTensor* other = slots_[field.shape_of].tensor;
    if (other == nullptr || other->ndim > kMaxDims) return unknown("shape");
    out->ndim = other->ndim;
    for (int i = 0; i < out->ndim; ++i) out->shape[i] = other->shape[i];
    out->dtype = other->dtype;
    return {};
  }
  const int form = field.form_index < 0 ? 0 : form_[field.form_index];
  if (form < 0) return unknown("shape");
  for (const Dim& dim : field.shapes[static_cast<size_t>(form)]) {
    if (dim.symbol == Dim::kEllipsis) {
      if (leading_ndim_ < 0) return unknown("shape");
      if (out->ndim + leading_ndim_ > kMaxDims) return unknown("shape");
      for (int i = 0; i < leading_ndim_; ++i) out->shape[out->ndim++] = leading_[i];
      continue;
    }
    if (out->ndim == kMaxDims) return unknown("shape");
    if (dim.symbol != Dim::kNumber && !known_[dim.symbol]) return unknown("shape");
    int64_t size = (dim.symbol == Dim::kNumber ? 0 : size_[dim.symbol]) + dim.offset;
    if (dim.blocks_of >= 0) size = block_count(size, slots_[dim.blocks_of].integer);
    if (size < 0) return invalid(field.name + ": its size would be " + std::to_string(size));
    out->shape[out->ndim++] = size;
  }
  if (field.along_axis) {
    const int64_t axis = axis_ < 0 ? axis_ + out->ndim : axis_;
    if (axis < 0 || axis >= out->ndim) {
      return invalid(axis_field_->name + ": expected " + std::to_string(-out->ndim) + " to " +
                     std::to_string(out->ndim - 1) + ", got " + std::to_string(axis_));
    }
    const int64_t size = out->shape[out->ndim - 1];
    for (int64_t i = out->ndim - 1; i > axis; --i) out->shape[i] = out->shape[i - 1];
    out->shape[axis] = size;
  }

  switch (field.dtype_rule) {
    case DTypeRule::kFloat32:
    case DTypeRule::kParameter:
      out->dtype = {kDLFloat, 32, 1};
      return {};
    case DTypeRule::kInt32:
      out->dtype = {kDLInt, 32, 1};
      return {};
    case DTypeRule::kIndex:
      out->dtype = {kDLInt, 64, 1};
      return {};
    case DTypeRule::kActivation:
      for (size_t i = 0; i < op_->fields.size(); ++i) {
        const Field& f = op_->fields[i];
        if (f.kind != Kind::kInput || f.dtype_rule != DTypeRule::kActivation) continue;
        if (slots_[i].tensor == nullptr) continue;
        out->dtype = slots_[i].tensor->dtype;
        if (out->dtype.code == FLASHKERNEL_DL_FLOAT8_E4M3FN) out->dtype = {kDLBfloat, 16, 1};
        return {};
      }
      return unknown("dtype");
    case DTypeRule::kSameAs: {
      const DLTensor* other = slots_[field.dtype_of].tensor;
      if (other == nullptr) return unknown("dtype");
      out->dtype = other->dtype;
      return {};
    }
  }
  return {};
}

}  // namespace fk
