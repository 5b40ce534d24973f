// Finds the matches of a tokenizer's split pattern, which is a literal text or a regular expression
// in the syntax of Hugging Face's files (Oniguruma's). PCRE2 does the matching. A hostile
// expression could take any amount of time, so every item of it that is tried is counted and paid
// from the text's work (model/work.h).
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

// This much of one tokenizer's expressions becomes machine code, in bytes of what PCRE2 compiles
// them to; machine code is 20 to 35 times as long. Three times as much would no longer stay in the
// processor's cache, and a step would take 20 to 100 ns, where PCRE2's interpreter takes 6 to 13
// for expressions of any length. Known tokenizers need up to 3 KB.
constexpr size_t kMachineCode = 16 << 10;

// Holds a compiled pattern. It does not change, and several threads may use it.
class Pattern {
 public:
  // Compiles an expression; with `literal` it is the text to find. If the expression fits into
  // *machine_code_left, it is taken from that and becomes machine code; otherwise it is
  // interpreted. The error does not name the file.
  static Status compile(std::string_view expression, bool literal, size_t* machine_code_left,
                        std::shared_ptr<const Pattern>* pattern);
  ~Pattern();
  Pattern(const Pattern&) = delete;
  Pattern& operator=(const Pattern&) = delete;

 private:
  friend class Matcher;
  friend class Matches;
  struct Code;

  Pattern() = default;
  Status compile_expression(std::string_view expression, size_t* machine_code_left);

  std::string literal_;  // empty where the pattern is an expression
  // Holds, for each beginning of literal_, the length of its longest border.
  std::vector<uint32_t> fallback_;
  std::unique_ptr<Code> code_;  // null where the pattern is a literal
};

// Holds what matching one text needs in addition to the pattern: the text's work, and PCRE2's
// memory.
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

// Goes through the matches of a pattern in a text, which is valid UTF-8. Empty matches are left
// out.
class Matches {
 public:
  Matches(const Pattern& pattern, std::string_view text, Matcher* matcher);

  // Sets [begin, end) to the next match. Returns false after the last one, and if `status` is an
  // error.
  bool next(size_t* begin, size_t* end);
  const Status& status() const { return status_; }

 private:
  bool next_literal(size_t* begin, size_t* end);
  bool next_expression(size_t* begin, size_t* end);

  const Pattern& pattern_;
  std::string_view text_;
  Matcher& matcher_;
  size_t at_ = 0;  // where the search goes on
  Status status_;
};

}  // namespace fk::model
