// Cuts added tokens, such as "<|im_end|>", out of a text before the rest is encoded, as Hugging
// Face's `tokenizers` does: from the left, and of several that begin at one place the longest.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/status.h"
#include "model/pattern.h"
#include "model/token_search.h"

namespace fk::model {

struct AddedToken {
  int32_t id = -1;
  std::string content;
  bool special = false;
  bool single_word = false;  // counts only where no letter or digit touches it
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;       // takes the white space after it along
  bool normalized = false;   // is looked for in the normalised text
};

// Lists ranges [begin, end) of bytes in a text, in ascending order and without overlap.
using Ranges = std::vector<std::pair<size_t, size_t>>;
// Returns whether [begin, end) overlaps one of the ranges.
bool overlaps(const Ranges& ranges, size_t begin, size_t end);

// Holds a set of added tokens. Add all of them, call `finish` once, then cut as many texts as you
// like.
class AddedTokens {
 public:
  // Adds a token. `content` is the text to look for, which may differ from token.content; an empty
  // one is never found.
  void add(const AddedToken& token, std::string content);
  // Prepares the search.
  Status finish();

  // Receives one piece of a text: a token's id with an empty `text`, or the text between two tokens
  // with the id -1.
  using Piece = std::function<Status(std::string_view text, int32_t id)>;
  // Passes `text` to `piece`, piece by piece. Inside the ranges `literal`, special tokens are not
  // looked for: their characters count as text. The work is paid from the matcher's.
  Status cut(std::string_view text, const Ranges& literal, Matcher* matcher,
             const Piece& piece) const;

 private:
  // Sets *touches to whether a word's character stands right before `begin` or right after `end`.
  Status touches_word(std::string_view text, size_t begin, size_t end, Matcher* matcher,
                      bool* touches) const;

  std::vector<AddedToken> tokens_;
  std::vector<std::string> contents_;
  TokenSearch search_;
  std::shared_ptr<const Pattern> word_;  // null where no token is a single_word
};

}  // namespace fk::model
