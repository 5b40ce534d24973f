// Cuts a call's workspace into parts. Without memory it only counts, so that one function says both
// what a kernel asks for and where it finds it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/integers.h"

namespace fk {

class WorkspaceParts {
 public:
  explicit WorkspaceParts(void* memory = nullptr) : memory_(static_cast<char*>(memory)) {}

  // Returns room for `count` elements, aligned as the workspace itself is, or NULL without memory.
  template <class T = float>
  T* take(int64_t count) {
    T* part = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += rounded(static_cast<size_t>(count) * sizeof(T));
    return part;
  }
  size_t bytes() const { return bytes_; }

  static constexpr size_t kAlignment = 256;
  // Returns what a part of so many bytes takes.
  static constexpr size_t rounded(size_t bytes) { return round_up(bytes, kAlignment); }

 private:
  char* memory_;
  size_t bytes_ = 0;
};

}  // namespace fk
