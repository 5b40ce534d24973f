// Keeps the workspaces of calls that have ended for the calls to come. Fresh memory comes from the
// system page by page: for the 10 MB of a layer of an LSTM that takes as long as the layer. Some
// programs' malloc keeps such memory by itself; Erlang's is told not to.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <mutex>
#include <utility>

#include "core/workspace.h"

namespace fk {

// AddressSanitizer sees a write past a workspace only where the next byte belongs to nobody. So
// under it each call has memory of its own, of exactly the bytes that it asks for.
#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kMemoryIsWatched = true;
#elif defined(__has_feature)
inline constexpr bool kMemoryIsWatched = __has_feature(address_sanitizer);
#else
inline constexpr bool kMemoryIsWatched = false;
#endif

class KeptMemory {
 public:
  struct Block {
    void* memory = nullptr;
    size_t bytes = 0;
  };

  // The process's own. It is never taken apart: a call may still run when the process ends.
  static KeptMemory& of_process() {
    static auto& kept = *new KeptMemory(kMemoryIsWatched ? 0 : kLargest);
    return kept;
  }

  // It keeps no block of more bytes than `largest`; 0 keeps none, and blocks are of exactly the
  // bytes that they are asked for.
  explicit KeptMemory(size_t largest = kLargest) : largest_(largest) {}
  KeptMemory(const KeptMemory&) = delete;
  KeptMemory& operator=(const KeptMemory&) = delete;
  ~KeptMemory() {
    for (const Block& b : blocks_) std::free(b.memory);
  }

  // Memory of so many bytes or more, aligned as a workspace must be; none where there is none.
  Block take(size_t bytes) {
    // Nobody waits here: a process may have been forked while another thread was inside.
    if (std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock); lock.owns_lock()) {
      Block* best = nullptr;
      for (Block& b : blocks_) {
        if (b.bytes >= bytes && (best == nullptr || b.bytes < best->bytes)) best = &b;
      }
      if (best != nullptr) return std::exchange(*best, Block{});
    }
    if (bytes > std::numeric_limits<size_t>::max() - WorkspaceParts::kAlignment) return {};
    const size_t whole = largest_ == 0 ? bytes : WorkspaceParts::rounded(bytes);
    return {allocate(whole), whole};
  }

  // Memory of exactly so many bytes, aligned as a workspace must be, which std::free takes back.
  // NULL where there is none.
  static void* allocate(size_t bytes) {
    void* memory = nullptr;
    return posix_memalign(&memory, WorkspaceParts::kAlignment, bytes) == 0 ? memory : nullptr;
  }

  // Takes a block back. The largest are kept, and of these none that few calls would need.
  void give(Block block) {
    if (block.memory == nullptr) return;
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (lock.owns_lock() && block.bytes <= largest_) {
      Block& least =
          *std::min_element(std::begin(blocks_), std::end(blocks_),
                            [](const Block& x, const Block& y) { return x.bytes < y.bytes; });
      if (least.bytes < block.bytes) std::swap(least, block);
    }
    std::free(block.memory);
  }

 private:
  static constexpr size_t kLargest = size_t{32} << 20;

  const size_t largest_;
  std::mutex mutex_;
  Block blocks_[2];  // so many calls at a time find memory here
};

}  // namespace fk
