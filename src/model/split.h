// Splits a text into words at a pattern's matches, by Hugging Face's "behaviors".
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "core/status.h"
#include "model/pattern.h"

namespace fk::model {

// Says which segments of a text get a space (or the sign that stands for one) in front.
enum class Prepend { kNever, kFirst, kAlways };

// Describes one of a tokenizer's pre-tokenizers.
struct SplitStep {
  enum Kind { kPattern, kMetaspace, kByteLevel } kind = kPattern;
  std::shared_ptr<const Pattern> pattern;  // null where the step does not split
  // Says what becomes of a match: a word of its own, nothing, a part of the word before or after
  // it, or one word with the matches next to it.
  enum Behavior { kIsolated, kRemoved, kWithPrevious, kWithNext, kContiguous } behavior = kIsolated;
  bool invert = false;                // matches and what lies between them change places
  Prepend prepend = Prepend::kNever;  // of kMetaspace and kByteLevel
  std::string sign;                   // of kMetaspace: what replaces a space
};

// Receives the matches and what lies between them, in their order, and joins them as the behavior
// says. It calls word(begin, end) as soon as a word is complete, so that no list of words takes up
// memory.
template <class Word>
class Joiner {
 public:
  Joiner(const SplitStep& step, const Word& word) : step_(step), word_(word) {}

  Status add(size_t begin, size_t end, bool match) {
    match = match != step_.invert;
    const bool joins = has_word_ && joined(match);
    last_ = match;
    if (joins) {
      end_ = end;
      return {};
    }
    FK_RETURN_IF_ERROR(finish());
    has_word_ = match ? step_.behavior != SplitStep::kRemoved : true;
    begin_ = begin;
    end_ = end;
    return {};
  }

  Status finish() {
    if (!has_word_) return {};
    has_word_ = false;
    return word_(begin_, end_);
  }

 private:
  // Returns whether the next stretch belongs to the word that is held back.
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
  bool has_word_ = false;  // there is a word that may still grow: [begin_, end_)
  bool last_ = false;      // the last stretch was a match
  size_t begin_ = 0, end_ = 0;
};

// Calls word(begin, end) for each word of `text`. The step must have a pattern.
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
