// This file describes random arguments for any op, which are derived from its declaration: sizes
// for the shape symbols, dtypes, optional inputs present or absent, attributes, memory layouts. The
// C++ tests and `fk check` run these through every implementation and compare with the reference,
// so a new op is covered by being declared.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/op.h"

namespace fk {

struct DrawOptions {
  DType dtype = DType::kFloat32;  // of the activations
  uint64_t seed = 0;
  int64_t min_elements = 0;  // of all tensors together
  int64_t max_elements = 1 << 14;
  bool strided = false;       // gaps, transposed, reversed and repeated dimensions
  bool empty = false;         // one size is 0
  bool alias = false;         // outputs share memory with inputs where the op allows it
  bool skip_outputs = false;  // some outputs are not asked for
  bool special = false;       // some values are infinite or NaN
};

// Holds one tensor argument: its values, row-major, and how it will lie in memory. An absent tensor
// is not `present` and has neither.
struct DrawnTensor {
  bool present = false;
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  std::vector<double> values;  // outputs: empty until a run
  std::vector<int64_t> strides;
  int64_t first = 0;     // elements of its memory before the one with index (0, 0, ...)
  int64_t elements = 0;  // its memory, in elements
  int alias = -1;        // outputs: the field whose memory it shares

  int64_t numel() const;
};

struct DrawnCall {
  const fk_op* op = nullptr;
  std::vector<DrawnTensor> tensors;  // by field; absent for attributes
  std::vector<fk_slot> attributes;   // by field; unused for tensors

  std::string describe() const;  // "x float32 (3, 17), axis=0"
};

// Draws arguments the op accepts. A backward op gets what its forward's reference computed.
Status draw_call(const fk_op& op, const DrawOptions& options, DrawnCall* drawn_call);

// Tells whether the op takes the call's shapes, dtypes and attributes, and the values that its
// index tensors have so far.
Status check_call(const DrawnCall& drawn_call);

// Returns the name of the implementation that takes the call on a device, or "" if there is none.
std::string implementation_of(const DrawnCall& drawn_call, DLDeviceType device);

// This is the memory in which a call's tensors live during a run; `fk check` brings one for CUDA.
class CheckMemory {
 public:
  virtual ~CheckMemory() = default;
  virtual DLDevice device() const = 0;
  virtual Status allocate(size_t bytes, void** data) = 0;  // 256-byte aligned
  virtual void release(void* data) = 0;
  virtual Status copy_in(void* to, const void* from, size_t bytes) = 0;
  virtual Status copy_out(void* to, const void* from, size_t bytes) = 0;  // when all work is done
};

CheckMemory& host_memory();

// Runs the op on a copy of the call's inputs and returns the output tensors, by field, with their
// values. Outputs and workspace start as NaN; writing outside an output or the workspace, or into
// an input, is an error. `implementation` is one's name, or NULL for the one that dispatch takes.
Status run_call(const DrawnCall& drawn_call, const char* implementation, CheckMemory& memory,
                std::vector<DrawnTensor>* outputs);

// Returns the largest error over all outputs, in units of what is allowed: a step of the output's
// dtype, plus some float32 rounding errors of the tensor's largest value (and, for an op that
// multiplies matrices, four of the activations' dtype). An error up to 1 is right. `worst` says
// where it is.
double largest_error(const DrawnCall& drawn_call, const std::vector<DrawnTensor>& expected,
                     const std::vector<DrawnTensor>& got, std::string* worst);

}  // namespace fk
