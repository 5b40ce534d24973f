// This file declares a bump allocator over zeroed memory that comes straight from the system, in
// huge pages where the system has them: the engine reads its weights from end to end for every
// token, and with small pages it would miss the address cache (TLB) on each of them.
#pragma once

#include <cstdint>

namespace fk::engine {

class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  // Reserves address space for `bytes`, rounded up to whole huge pages; call it once. Returns false
  // where the system refuses. A page takes up memory only once it is first written.
  bool reserve(int64_t bytes);
  // Hands out the next `bytes` of what was reserved, 64-byte aligned. Does not check that they are
  // still there: the caller reserves enough for everything it takes. The arena owns the memory.
  uint8_t* take(int64_t bytes);
  // Returns null until `reserve` has succeeded.
  uint8_t* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  uint8_t* data_ = nullptr;
  int64_t size_ = 0;
  int64_t used_ = 0;
};

// Returns `bytes` rounded up to a multiple of 64, the size of a cache line.
constexpr int64_t aligned64(int64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace fk::engine
