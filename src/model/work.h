// This file declares the budget of encoding one text. A tokenizer's file says what is done with a
// text, and a hostile file may ask for any amount of work and memory: whatever a file asks for is
// paid from this budget, and encoding fails when it is spent.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/status.h"

namespace fk::model {

// A step is about ten nanoseconds. Known tokenizers take 10 to 20 for each byte.
constexpr uint64_t kStepsPerByte = 128;
constexpr uint64_t kFreeSteps = 1 << 22;
// A text may become this long in bytes, for each byte that it had. If all of it are spaces, each
// becomes a sign of three bytes.
constexpr uint64_t kLengthPerByte = 4;
constexpr uint64_t kFreeLength = 64 << 10;
// All normalizers and splits may write this many bytes together, for each byte of the text.
constexpr uint64_t kWrittenPerByte = 32;
constexpr uint64_t kFreeWritten = 1 << 20;
// Positions in a text are 32-bit numbers.
constexpr uint64_t kMaxLength = INT32_MAX;

class Work {
 public:
  explicit Work(size_t text_bytes);

  // Pays for `steps`. Returns false if they are not left; `error` then says so.
  bool spend(uint64_t steps) {
    if (steps > steps_left_) return false;
    steps_left_ -= steps;
    return true;
  }
  Status steps(uint64_t count) { return spend(count) ? Status() : error(); }
  // Returns the error for when the steps are spent.
  Status error() const;

  // Returns how long the text may become, in bytes.
  uint64_t longest() const;
  // Pays for writing a changed text of `bytes`. Fails if it is longer than a text may become, or if
  // all changed texts together are.
  Status write(uint64_t bytes);
  // Pays for a word of `bytes` that is about to be encoded.
  Status word(uint64_t bytes);

 private:
  Status too_long(const char* what, uint64_t limit, uint64_t each, uint64_t free) const;

  uint64_t text_;  // the text's length in bytes
  uint64_t steps_left_, written_left_, words_left_;
};

}  // namespace fk::model
