// This file makes host memory the GPU's for the length of a call: a kernel that reads or writes
// behind a tensor is found, though the tensor lies in the middle of somebody's heap.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "flashkernel/dlpack.h"

namespace fk::softgpu {

// Holds the bytes between a tensor's first and its last element. An empty tensor has none.
struct ByteRange {
  char* begin = nullptr;
  size_t bytes = 0;
};
ByteRange range_of(const DLTensor& tensor);

class CallMemory {
 public:
  CallMemory() = default;
  ~CallMemory();
  CallMemory(const CallMemory&) = delete;
  CallMemory& operator=(const CallMemory&) = delete;

  // `what` names the memory in reports. What cudaMalloc gave is the GPU's already.
  void add(const ByteRange& range, const std::string& what, bool writable);

 private:
  std::vector<ByteRange> ranges_;
};

}  // namespace fk::softgpu
