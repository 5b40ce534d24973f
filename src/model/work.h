// What encoding one text may cost. A tokenizer's file says what is done with a text, and a hostile
// one asks for everything: whatever a file asks for is paid from here, and stops where that is
// spent.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/status.h"

namespace fk::model {

// A step is about ten nanoseconds. Known tokenizers take 10 to 20 for each byte.
constexpr uint64_t kStepsPerByte = 128;
constexpr uint64_t kFreeSteps = 1 << 22;
// How long a text may become, where every byte becomes a space's sign of three bytes and more.
constexpr uint64_t kLengthPerByte = 4;
constexpr uint64_t kFreeLength = 64 << 10;
// What all normalizers and splits may write together.
constexpr uint64_t kWrittenPerByte = 32;
constexpr uint64_t kFreeWritten = 1 << 20;
// Positions in a text are 32-bit numbers.
constexpr uint64_t kMaxLength = INT32_MAX;

class Work {
 public:
  explicit Work(size_t text_bytes);

  // False where the steps are spent; `error` then says so.
  bool spend(uint64_t steps) {
    if (steps > steps_left_) return false;
    steps_left_ -= steps;
    return true;
  }
  Status steps(uint64_t count) { return spend(count) ? Status() : error(); }
  Status error() const;

  uint64_t longest() const;  // that a text may become
  // The length of one text, and of all that is written on the way, of which this is a part.
  Status write(uint64_t bytes);
  // What comes out in the end, to be encoded word by word.
  Status word(uint64_t bytes);

 private:
  Status too_long(const char* what, uint64_t limit, uint64_t each, uint64_t free) const;

  uint64_t text_;
  uint64_t steps_left_, written_left_, words_left_;
};

}  // namespace fk::model
