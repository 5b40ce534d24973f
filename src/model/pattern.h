// A tokenizer's split pattern: a regular expression as Hugging Face's files write them (Oniguruma's
// syntax), matched with PCRE2.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/status.h"

namespace fk::model {

class Pattern {
 public:
  // `literal`: the text itself, no expression.
  static Status compile(std::string_view expression, bool literal,
                        std::shared_ptr<const Pattern>* pattern);
  ~Pattern();
  Pattern(const Pattern&) = delete;
  Pattern& operator=(const Pattern&) = delete;

  // The [begin, end) of each match in valid UTF-8, empty ones left out. Fails where the expression
  // takes too much work (a hostile one can).
  Status find_all(std::string_view text, std::vector<std::pair<size_t, size_t>>* matches) const;

 private:
  Pattern() = default;

  struct Code;
  std::unique_ptr<Code> code_;
};

}  // namespace fk::model
