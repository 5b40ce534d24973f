// Tells which outputs lie in memory as an input does, and how.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/declaration.h"
#include "flashkernel/abi.h"

namespace fk::torch {

// Finds the first input, of those always there, that has an output's type; or -1.
inline int input_like(const OpDeclaration& op, const Field& output) {
  if (op.float8 && output.dtype_rule == DTypeRule::kActivation) return -1;
  for (size_t i = 0; i < op.fields.size(); ++i) {
    const Field& f = op.fields[i];
    if (f.kind == Kind::kInput && !f.optional && f.along_axis == output.along_axis &&
        f.shapes.size() == 1 && f.type == output.type && f.dtype_rule != DTypeRule::kParameter) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

// Finds the input that an output lies in memory as: the one whose shape it is declared to have; for
// a gradient, the one it is the gradient of; otherwise the first that has its type; or -1. Outputs
// of any number of dims are made of rows, which kernels write one after another.
inline int input_of_layout(const OpDeclaration& op, const Field& output) {
  if (output.shape_of >= 0) return output.shape_of;
  for (const Dims& dims : output.shapes) {
    if (has_leading_dims(dims)) return -1;
  }
  const int own = output.name[0] == 'd' ? op.find(output.name.substr(1)) : -1;
  if (own >= 0 && op.fields[own].type == output.type) return own;
  return input_like(op, output);
}

// Computes the strides that torch.empty_like gives: the tensor's own where it has no gaps,
// otherwise without gaps in the same order, which torch's insertion sort settles where strides are
// 0.
inline void strides_like(const DLTensor& tensor, int64_t* strides) {
  int order[kMaxDims];  // of the dims, the innermost first
  const auto is_outside = [&](int a, int b) {
    if (tensor.strides[a] != tensor.strides[b]) return tensor.strides[a] > tensor.strides[b];
    return tensor.shape[a] > tensor.shape[b];
  };
  for (int i = 0; i < tensor.ndim; ++i) {
    order[i] = tensor.ndim - 1 - i;
    for (int at = i, before = i - 1; before >= 0; --before) {
      const int a = order[before], b = order[at];
      if (tensor.strides[a] == 0 || tensor.strides[b] == 0) continue;
      if (is_outside(a, b)) {
        std::swap(order[before], order[at]);
        at = before;
      } else if (tensor.strides[a] < tensor.strides[b]) {
        break;
      }
    }
  }
  int64_t stride = 1;
  bool without_gaps = true;
  for (int i = 0; i < tensor.ndim; ++i) {
    const int64_t size = tensor.shape[order[i]];
    strides[order[i]] = stride;
    without_gaps = without_gaps && (size == 1 || tensor.strides[order[i]] == stride);
    stride *= size > 1 ? size : 1;
  }
  if (without_gaps) std::copy_n(tensor.strides, tensor.ndim, strides);
}

}  // namespace fk::torch
