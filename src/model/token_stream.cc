// Turns ids into text as they come, in whole characters.
#include "model/tokenizer.h"
#include "model/unicode.h"

namespace fk::model {

TokenStream::TokenStream(const Tokenizer& tokenizer, bool continues, bool skip_special)
    : tokenizer_(tokenizer),
      first_(!continues && tokenizer.strips_first_space()),
      skip_special_(skip_special) {}

std::string TokenStream::push(int32_t id) {
  if (skip_special_ && tokenizer_.is_special(id)) return "";
  const std::string bytes = tokenizer_.token_bytes(id);
  if (bytes.empty()) return "";
  pending_ += bytes;
  if (first_) {
    if (pending_[0] == ' ') pending_.erase(0, 1);
    first_ = false;
  }
  std::string text;
  std::string_view rest = pending_;
  while (!rest.empty() && !utf8_incomplete(rest)) {
    const size_t length = utf8_length(rest);
    if (length > 0) {
      text += rest.substr(0, length);
    } else {
      text += kReplacement;
    }
    rest.remove_prefix(length > 0 ? length : utf8_invalid_length(rest));
  }
  pending_ = std::string(rest);
  return text;
}

std::string TokenStream::finish() {
  std::string text = to_utf8(pending_);
  pending_.clear();
  return text;
}

}  // namespace fk::model
