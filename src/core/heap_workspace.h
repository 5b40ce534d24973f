// Workspace from the heap, for one call of a caller that has no allocator of its own.
#pragma once

#include <cstddef>
#include <cstdlib>

#include "core/workspace.h"
#include "flashkernel/abi.h"

namespace fk {

class HeapWorkspace {
 public:
  HeapWorkspace() = default;
  ~HeapWorkspace() { std::free(memory_); }
  HeapWorkspace(const HeapWorkspace&) = delete;
  HeapWorkspace& operator=(const HeapWorkspace&) = delete;

  // Has the call ask here for the workspace that it needs. It must end before this does.
  void serve(fk_exec* exec) {
    exec->allocate = [](void* self, size_t bytes) -> void* {
      void*& memory = static_cast<HeapWorkspace*>(self)->memory_;
      std::free(memory);
      return memory = allocate(bytes);
    };
    exec->allocator = this;
  }

  // Memory as aligned as a workspace must be, which std::free takes back. NULL where there is none.
  static void* allocate(size_t bytes) {
    return std::aligned_alloc(WorkspaceParts::kAlignment, WorkspaceParts::rounded(bytes));
  }

 private:
  void* memory_ = nullptr;
};

}  // namespace fk
