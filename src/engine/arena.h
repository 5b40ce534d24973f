// Zeroed memory straight from the system, in huge pages where there are any: weights are read from
// end to end for every token, and would miss the address cache on each small page.
#pragma once

#include <cstdint>

namespace fk::engine {

class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  // False where the system refuses. Pages become real when they are first written.
  bool reserve(int64_t bytes);
  // The next `bytes`, 64-byte aligned, of what was reserved.
  uint8_t* take(int64_t bytes);
  uint8_t* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  uint8_t* data_ = nullptr;
  int64_t size_ = 0;
  int64_t used_ = 0;
};

constexpr int64_t aligned64(int64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace fk::engine
