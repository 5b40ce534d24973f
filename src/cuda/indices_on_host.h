// Brings the index tensors of a call on a GPU to the host, where FK_CHECK=1 asks for their values
// to be checked (checks_values_on_gpu): the checks read host memory.
#pragma once

#include <vector>

#include "core/declaration.h"
#include "core/status.h"
#include "core/tensor.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace fk::cuda {

// While an object of this class lives, the index tensors among a call's inputs point to copies in
// host memory; its destructor puts the originals back. Making the copies waits for the stream. In a
// stream capture nothing can wait: the tensors then stay on the GPU, and the checks pass them over.
class IndicesOnHost {
 public:
  // `args` is the op's argument struct, whose tensors are changed; `stream` is a cudaStream_t.
  IndicesOnHost(const OpDeclaration& op, void* args, int device, void* stream);
  ~IndicesOnHost();
  IndicesOnHost(const IndicesOnHost&) = delete;
  IndicesOnHost& operator=(const IndicesOnHost&) = delete;

  // Whether the copies could be made.
  const Status& status() const { return status_; }

 private:
  // A tensor that points to a copy, and what it pointed to before.
  struct Moved {
    Tensor* tensor;
    Tensor original;
    std::vector<char> copy;
  };

  Status move_all(const OpDeclaration& op, char* args, int device, CUstream_st* stream);
  Status move(Tensor* tensor);

  std::vector<Moved> moved_;
  Status status_;  // declared after moved_, which must exist when the constructor computes it
};

}  // namespace fk::cuda
