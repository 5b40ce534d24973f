// How a pattern's matches cut a text into words: Hugging Face's "behaviors".
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "core/status.h"
#include "model/pattern.h"

namespace fk::model {

// Which segments get a space (or its sign) in front.
enum class Prepend { kNever, kFirst, kAlways };

struct SplitStep {
  enum Kind { kPattern, kMetaspace, kByteLevel } kind = kPattern;
  std::shared_ptr<const Pattern> pattern;  // null where it does not split
  enum Behavior { kIsolated, kRemoved, kWithPrevious, kWithNext, kContiguous } behavior = kIsolated;
  bool invert = false;
  Prepend prepend = Prepend::kNever;  // kMetaspace, kByteLevel
  std::string sign;                   // kMetaspace
};

// Takes the matches and what lies between them in their order, and gives them on, joined as the
// behavior says: `word(begin, end)` is called as soon as a word is complete, so that a text of many
// words takes no memory for them.
template <class Word>
class Joiner {
 public:
  Joiner(const SplitStep& step, const Word& word) : step_(step), word_(word) {}

  Status add(size_t begin, size_t end, bool match) {
    match = match != step_.invert;
    const bool joins = held_ && joined(match);
    last_ = match;
    if (joins) {
      end_ = end;
      return {};
    }
    FK_RETURN_IF_ERROR(finish());
    held_ = match ? step_.behavior != SplitStep::kRemoved : true;
    begin_ = begin;
    end_ = end;
    return {};
  }

  Status finish() {
    if (!held_) return {};
    held_ = false;
    return word_(begin_, end_);
  }

 private:
  // Whether what comes belongs to what was held back.
  bool joined(bool match) const {
    switch (step_.behavior) {
      case SplitStep::kContiguous:
        return match == last_;
      case SplitStep::kWithPrevious:
        return match && !last_;
      case SplitStep::kWithNext:
        return !match && last_;
      default:
        return false;
    }
  }

  const SplitStep& step_;
  const Word& word_;
  bool held_ = false, last_ = false;
  size_t begin_ = 0, end_ = 0;
};

// Calls `word(begin, end)` for each word of `text`.
template <class Word>
Status split(const SplitStep& step, std::string_view text, Matcher* matcher, const Word& word) {
  Joiner<Word> joiner(step, word);
  Matches matches(*step.pattern, text, matcher);
  size_t at = 0, begin, end;
  while (matches.next(&begin, &end)) {
    if (begin > at) FK_RETURN_IF_ERROR(joiner.add(at, begin, false));
    FK_RETURN_IF_ERROR(joiner.add(begin, end, true));
    at = end;
  }
  FK_RETURN_IF_ERROR(matches.status());
  if (at < text.size()) FK_RETURN_IF_ERROR(joiner.add(at, text.size(), false));
  return joiner.finish();
}

}  // namespace fk::model
