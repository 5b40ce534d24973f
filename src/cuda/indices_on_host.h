// Lets the checks of values, which read host memory, see what a call on a GPU was given
// (checks_values_on_gpu).
#pragma once

#include <vector>

#include "core/declaration.h"
#include "core/status.h"
#include "core/tensor.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace fk::cuda {

// While it lives, the index tensors among a call's inputs are copies in host memory. Taking them
// waits for the stream; in a stream capture, where nothing can wait, the tensors stay where they
// are and the checks pass them over.
class IndicesOnHost {
 public:
  // `args` is the op's argument struct.
  IndicesOnHost(const OpDeclaration& op, void* args, int device, void* stream);
  ~IndicesOnHost();
  IndicesOnHost(const IndicesOnHost&) = delete;
  IndicesOnHost& operator=(const IndicesOnHost&) = delete;

  const Status& status() const { return status_; }

 private:
  struct Moved {
    Tensor* tensor;
    Tensor original;
    std::vector<char> copy;
  };

  Status move_all(const OpDeclaration& op, char* args, int device, CUstream_st* stream);
  Status move(Tensor* tensor);

  std::vector<Moved> moved_;
  Status status_;  // after moved_, which filling it needs
};

}  // namespace fk::cuda
