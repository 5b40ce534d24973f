// The dtypes of one call: the activations have one, which its first tells, and what other tensors
// may have follows from it.
#pragma once

#include "core/declaration.h"
#include "core/status.h"
#include "core/tensor.h"

namespace fk {

class CallDTypes {
 public:
  explicit CallDTypes(const OpDeclaration& op) : op_(op) {}

  // Whether a dtype is one that nearly every call has there. If not, `match` decides.
  bool surely_match(const Field& field, DType dtype) const {
    if (field.with_float8 || dtype == DType::kFloat8E4M3) return false;
    if (field.dtype_rule == DTypeRule::kActivation) {
      return activation_from_ != nullptr && dtype == activation_;
    }
    return dtype == DType::kFloat32 &&
           (field.dtype_rule == DTypeRule::kParameter || field.dtype_rule == DTypeRule::kFloat32);
  }

  // Compares a tensor's dtype with what the field may have. `another` is the dtype of the tensor
  // that a type `@name` names, or NULL where that is absent.
  Status match(const Field& field, DType dtype, const DType* another);

 private:
  // Returns the dtype of outputs T.
  DType result() const { return result_dtype(activation_); }

  const OpDeclaration& op_;
  const Field* activation_from_ = nullptr;  // NULL: not known yet
  DType activation_ = DType::kFloat32;
};

}  // namespace fk
