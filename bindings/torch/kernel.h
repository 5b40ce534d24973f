// A kernel of the torch binding is an op with the outputs that a torch operator returns of it. This
// calls it on the tensor handles that ops.cc takes from torch's stack.
#pragma once

#include <cstdint>
#include <vector>

#include "core/op.h"
#include "shim.h"

namespace fk::torch {

constexpr int kMaxTensors = 32;
constexpr int kMaxSlots = 64;

// This is registered under one name, and laid out for the call.
struct Kernel {
  struct Argument {
    int field;
    bool is_tensor;
    bool boxed;     // optional in the schema: a tensor, or a number that may be left out
    bool writable;  // a tensor that an output is written over
  };
  struct Output {
    int field;
    int like;  // a field, an input always there, whose shape and dtype this output has; or -1
    int laid_out_as;  // a field, an input, whose order of dims in memory this output takes; or -1
    int over;         // a field, an input, that this output is written over; or -1
  };

  const fk_op* op = nullptr;
  std::vector<Argument> arguments;  // in the schema's order
  std::vector<int> absent;          // fields, inputs, that are not among the arguments
  std::vector<Output> outputs;      // all of the op's
  uint64_t wanted = 0;              // bit i: output i is computed and returned
  bool wanted_on_stack = false;  // a last argument holds `wanted`; all outputs are returned, those
                                 // not computed as tensors without elements
};

// These are the arguments and results of one call.
struct Call {
  Handle handles[kMaxSlots];  // by field: an input, borrowed; NULL where there is none
  fk_slot slots[kMaxSlots];   // by field: the attributes' values
  uint64_t wanted = 0;        // bit i: output i is computed

  // The results stand in the schema's order, and the caller must delete them. Of a kernel with
  // `wanted_on_stack`, NULL stands for each output that is not computed.
  Handle results[kMaxTensors];
  int num_results = 0;
};

// These are torch's functions, bound before the first kernel is registered.
extern const Shim* shim;

// Owns tensors until the end of a scope.
class Owned {
 public:
  Owned() = default;
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    for (int i = 0; i < count_; ++i) shim->aoti_torch_delete_tensor_object(handles_[i]);
  }

  void add(Handle handle) { handles_[count_++] = handle; }
  void release_all() { count_ = 0; }

 private:
  Handle handles_[kMaxTensors];
  int count_ = 0;
};

// Shares work among torch's threads: an fk_parallel_for_fn. Throws std::runtime_error where torch
// could not.
void parallel_for(void* pool, int64_t count, int64_t grain, fk_range_body body, void* context);

// Allocates the outputs and makes the call. Throws std::runtime_error with the call's own message.
void compute(const Kernel& kernel, Call* call);

// Makes a tensor without elements, which stands for an output of this call that was not computed.
Handle empty_result(const Kernel& kernel, const Call& call);

}  // namespace fk::torch
