// What a call's outputs look like, told from its inputs and attributes alone: for callers that
// allocate the outputs themselves (the torch and XLA glue).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/declaration.h"
#include "core/status.h"
#include "core/tensor.h"

namespace fk {

// An output's dtype and row-major shape.
struct OutputType {
  DLDataType dtype{};
  int ndim = 0;
  int64_t shape[kMaxDims] = {};
};

// The sizes that the inputs of one call give to the shape symbols. Inputs that contradict each
// other are not noticed here: the call itself checks every argument and has the better message.
class ShapeInference {
 public:
  // Reads the slots of the inputs and attributes; outputs' slots may hold anything.
  Status bind(const OpDeclaration& op, const fk_slot* slots);

  Status output(const Field& field, OutputType* out) const;

 private:
  void bind_tensor(const Field& field, const DLTensor& tensor);
  int symbol_of(const std::string& name) const;  // -1 if there is none

  const OpDeclaration* op_ = nullptr;
  const fk_slot* slots_ = nullptr;
  const Field* axis_field_ = nullptr;
  int64_t axis_ = 0;
  int64_t size_[kMaxSymbols];
  bool known_[kMaxSymbols] = {};
  int64_t leading_[kMaxDims];
  int leading_ndim_ = -1;  // -1: not known
  int form_[kMaxForms];    // by the declaration's forms, the alternative; -1: not known
};

}  // namespace fk
