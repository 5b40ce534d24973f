// Workspace from the heap, for one call of a caller that has no allocator of its own.
#pragma once

#include <cstddef>

#include "core/kept_memory.h"
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

 private:
  KeptMemory::Block block_;
};

}  // namespace fk
