// Tokens that are cut out of a text before anything else is done with it, as Hugging Face's
// `tokenizers` does: from the left, the longest one first.
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
  bool single_word = false;  // only where no letter touches it
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;
  bool normalized = false;  // looked for after normalisation
};

// Places in a text, in their order, none over another.
using Ranges = std::vector<std::pair<size_t, size_t>>;
bool overlaps(const Ranges& ranges, size_t begin, size_t end);

class AddedTokens {
 public:
  // `content`: what is looked for. An empty one is never found.
  void add(const AddedToken& token, std::string content);
  Status finish();

  // What lies between tokens comes with the id -1.
  using Piece = std::function<Status(std::string_view text, int32_t id)>;
  // Gives `text` piece by piece. In `plain` ranges special tokens are plain characters.
  Status cut(std::string_view text, const Ranges& plain, Matcher* matcher,
             const Piece& piece) const;

 private:
  Status touches_word(std::string_view text, size_t begin, size_t end, Matcher* matcher,
                      bool* touches) const;

  std::vector<AddedToken> tokens_;
  std::vector<std::string> contents_;
  TokenSearch search_;
  std::shared_ptr<const Pattern> word_;  // null where no token asks for it
};

}  // namespace fk::model
