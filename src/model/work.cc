// This file keeps the budget of encoding one text, and makes the errors for when it is spent.
#include "model/work.h"

#include <algorithm>
#include <string>

namespace fk::model {
namespace {

// Encoding a byte of a word costs this many steps, as measured on large words.
constexpr uint64_t kStepsPerWordByte = 8;

}  // namespace

Work::Work(size_t text_bytes)
    : text_(text_bytes),
      steps_left_(kStepsPerByte * text_bytes + kFreeSteps),
      written_left_(kWrittenPerByte * text_bytes + kFreeWritten),
      words_left_(longest()) {}

uint64_t Work::longest() const {
  return std::min(kLengthPerByte * text_ + kFreeLength, kMaxLength);
}

Status Work::error() const {
  return invalid("text: expected at most " + std::to_string(kStepsPerByte * text_ + kFreeSteps) +
                 " steps for its " + std::to_string(text_) + " bytes (" +
                 std::to_string(kStepsPerByte) + " for each and " + std::to_string(kFreeSteps) +
                 "), but the tokenizer's patterns and other parts take more");
}

Status Work::too_long(const char* what, uint64_t limit, uint64_t each, uint64_t free) const {
  return invalid("text: expected at most " + std::to_string(limit) + " bytes " + what +
                 " for its " + std::to_string(text_) + " (" + std::to_string(each) +
                 " for each and " + std::to_string(free) +
                 "), but the tokenizer makes more of them");
}

Status Work::write(uint64_t bytes) {
  if (bytes > longest()) {
    return too_long("after each normalizer and split", longest(), kLengthPerByte, kFreeLength);
  }
  if (bytes > written_left_) {
    return too_long("from all normalizers and splits", kWrittenPerByte * text_ + kFreeWritten,
                    kWrittenPerByte, kFreeWritten);
  }
  written_left_ -= bytes;
  return {};
}

Status Work::word(uint64_t bytes) {
  if (bytes > words_left_) {
    return too_long("in all words", longest(), kLengthPerByte, kFreeLength);
  }
  words_left_ -= bytes;
  return steps(1 + kStepsPerWordByte * bytes);
}

}  // namespace fk::model
