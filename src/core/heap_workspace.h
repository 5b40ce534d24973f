// Workspace from the heap, for one call of a caller that has no allocator of its own.
#pragma once

#include <cstddef>
#include <cstdlib>

#include "core/kept_memory.h"
#include "core/workspace.h"
#include "flashkernel/abi.h"

namespace fk {

class HeapWorkspace {
 public:
  HeapWorkspace() = default;
  ~HeapWorkspace() { KeptMemory::of_process().give(block_); }
  HeapWorkspace(const HeapWorkspace&) = delete;
  HeapWorkspace& operator=(const HeapWorkspace&) = delete;

  // Has the call ask here for the workspace that it needs. It must end before this does.
  void serve(fk_exec* exec) {
    exec->allocate = [](void* self, size_t bytes) -> void* {
      KeptMemory::Block& block = static_cast<HeapWorkspace*>(self)->block_;
      KeptMemory::of_process().give(block);
      block = KeptMemory::of_process().take(bytes);
      return block.memory;
    };
    exec->allocator = this;
  }

  // Memory as aligned as a workspace must be, which std::free takes back. NULL where there is none.
  static void* allocate(size_t bytes) {
    return std::aligned_alloc(WorkspaceParts::kAlignment, WorkspaceParts::rounded(bytes));
  }

 private:
  KeptMemory::Block block_;
};

}  // namespace fk
