// A tokenizer's split pattern: a text, or a regular expression as Hugging Face's files write them
// (Oniguruma's syntax), matched with PCRE2. A hostile expression can take any time for a text, so
// every item of it that is tried is counted, and paid from the text's work.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "model/work.h"

namespace fk::model {

constexpr size_t kMaxExpression = 8 << 10;  // the longest known one has 900 bytes

class Pattern {
 public:
  // `literal`: the text itself, no expression.
  static Status compile(std::string_view expression, bool literal,
                        std::shared_ptr<const Pattern>* pattern);
  ~Pattern();
  Pattern(const Pattern&) = delete;
  Pattern& operator=(const Pattern&) = delete;

 private:
  friend class Matcher;
  friend class Matches;
  struct Code;

  Pattern() = default;
  Status compile_expression(std::string_view expression);

  std::string literal_;             // empty: an expression
  std::vector<uint32_t> fallback_;  // per beginning of `literal_`, its longest border
  std::unique_ptr<Code> code_;
};

// What matching needs beside the pattern, for one text at a time: its work and PCRE2's memory.
class Matcher {
 public:
  explicit Matcher(Work* work);
  ~Matcher();
  Matcher(const Matcher&) = delete;
  Matcher& operator=(const Matcher&) = delete;

  Work& work() { return work_; }

 private:
  friend class Matches;
  struct Memory;

  Work& work_;
  std::unique_ptr<Memory> memory_;  // made by the first expression
};

// The matches of a pattern in valid UTF-8, one after the other, empty ones left out.
class Matches {
 public:
  Matches(const Pattern& pattern, std::string_view text, Matcher* matcher);

  // The next [begin, end). False after the last, and where `status` is an error.
  bool next(size_t* begin, size_t* end);
  const Status& status() const { return status_; }

 private:
  bool next_literal(size_t* begin, size_t* end);
  bool next_expression(size_t* begin, size_t* end);

  const Pattern& pattern_;
  std::string_view text_;
  Matcher& matcher_;
  size_t at_ = 0;
  Status status_;
};

}  // namespace fk::model
