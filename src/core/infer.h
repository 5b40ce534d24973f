// Tells what a call's outputs look like from its inputs and attributes alone, for callers that
// allocate the outputs themselves (the torch and XLA glue).
#pragma once

#include <cstdint>

#include "core/call_shapes.h"
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

// Inputs that contradict each other are not noticed here: the call itself checks every argument and
// has the better message.
class OutputInference {
 public:
  // Reads the slots of inputs and attributes; outputs' slots may hold anything.
  OutputInference(const OpDeclaration& op, const fk_slot* slots);

  Status infer(const Field& output, OutputType* type) const;

 private:
  void learn(const Field& input, const DLTensor& tensor);
  Status infer_dtype(const Field& output, DLDataType* dtype) const;

  const OpDeclaration& op_;
  const fk_slot* slots_;
  const Field* axis_field_ = nullptr;
  int64_t axis_ = 0;
  CallShapes shapes_;
};

}  // namespace fk
