// Cuts a text at the added tokens that TokenSearch finds in it, by Hugging Face's rules.
#include "model/added_tokens.h"

#include <algorithm>

#include "model/unicode.h"

namespace fk::model {
namespace {

constexpr uint64_t kSearchSteps = 2;  // what searching a byte of the text costs (model/work.h)

// Returns where the character that ends before `end` begins.
size_t before(std::string_view text, size_t end) {
  size_t begin = end - 1;
  while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) --begin;
  return begin;
}

// Returns where the white space at the end of `text` begins.
size_t trailing_space(std::string_view text) {
  size_t end = text.size();
  while (end > 0) {
    const size_t begin = before(text, end);
    if (!is_white_space(utf8_decode(text.substr(begin, end - begin)))) break;
    end = begin;
  }
  return end;
}

// Returns where the white space at the beginning of `text` ends.
size_t leading_space(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const size_t length = utf8_length(text.substr(at));
    if (!is_white_space(utf8_decode(text.substr(at, length)))) break;
    at += length;
  }
  return at;
}

// Sets *is to whether `text`, which is one character or empty, is a letter, a digit, or a character
// that joins them into a word.
Status is_word(std::string_view text, const Pattern& word, Matcher* matcher, bool* is) {
  *is = false;
  if (text.size() == 1) {
    const char c = text[0];
    *is = (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '_';
    return {};
  }
  if (text.empty()) return {};
  Matches matches(word, text, matcher);
  size_t begin, end;
  *is = matches.next(&begin, &end);
  return matches.status();
}

}  // namespace

bool overlaps(const Ranges& ranges, size_t begin, size_t end) {
  const auto after = std::upper_bound(
      ranges.begin(), ranges.end(), begin,
      [](size_t place, const std::pair<size_t, size_t>& range) { return place < range.second; });
  return after != ranges.end() && after->first < end;
}

void AddedTokens::add(const AddedToken& token, std::string content) {
  tokens_.push_back(token);
  contents_.push_back(std::move(content));
}

Status AddedTokens::finish() {
  search_.build(contents_);
  static constexpr char kWord[] = R"([\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}])";
  const bool needed = std::any_of(tokens_.begin(), tokens_.end(),
                                  [](const AddedToken& token) { return token.single_word; });
  size_t machine_code_left = kMachineCode;
  return needed ? Pattern::compile(kWord, false, &machine_code_left, &word_) : Status();
}

Status AddedTokens::touches_word(std::string_view text, size_t begin, size_t end, Matcher* matcher,
                                 bool* touches) const {
  const size_t left = begin > 0 ? before(text, begin) : 0;
  FK_RETURN_IF_ERROR(is_word(text.substr(left, begin - left), *word_, matcher, touches));
  if (*touches) return {};
  const size_t right = end < text.size() ? utf8_length(text.substr(end)) : 0;
  return is_word(text.substr(end, right), *word_, matcher, touches);
}

Status AddedTokens::cut(std::string_view text, const Ranges& literal, Matcher* matcher,
                        const Piece& piece) const {
  if (search_.empty()) return text.empty() ? Status() : piece(text, -1);
  FK_RETURN_IF_ERROR(matcher->work().steps(kSearchSteps * text.size()));
  std::vector<TokenSearch::Found> found;
  search_.find(text, &found);
  size_t done = 0;
  size_t at = 0;     // where the next token may begin
  size_t space = 0;  // the end of the white space that an rstrip token last took along
  for (; !found.empty(); found.pop_back()) {
    size_t begin = found.back().begin;
    if (begin < at) continue;
    const size_t index = found.back().token;
    const AddedToken& token = tokens_[index];
    size_t end = begin + contents_[index].size();
    at = end;
    if (token.special && overlaps(literal, begin, end)) continue;
    if (token.single_word) {
      bool touches;
      FK_RETURN_IF_ERROR(touches_word(text, begin, end, matcher, &touches));
      if (touches) continue;
    }
    // A token may begin inside white space that the token before has taken along: it is still
    // found.
    if (token.lstrip && begin < done) {
      begin = done;
    } else if (token.lstrip) {
      begin = done + trailing_space(text.substr(done, begin - done));
    }
    if (token.rstrip) {
      // Where tokens of white space follow each other, none of them scans all of it again.
      if (end >= space) space = end + leading_space(text.substr(end));
      end = space;
    }
    if (begin > done) FK_RETURN_IF_ERROR(piece(text.substr(done, begin - done), -1));
    // A token of white space that another has taken along as a whole is left out.
    if (begin < end) FK_RETURN_IF_ERROR(piece(std::string_view(), token.id));
    done = end;
  }
  return done < text.size() ? piece(text.substr(done), -1) : Status();
}

}  // namespace fk::model
