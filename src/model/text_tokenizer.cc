#include "model/text_tokenizer.h"

#include <algorithm>
#include <deque>

#include "model/unicode.h"

namespace fk::model {
namespace {

constexpr size_t kMaxText = size_t{1} << 30;  // positions in a word are 32-bit numbers

// The value of "<0x0A>", -1 for other spellings.
int byte_of(std::string_view spelling) {
  if (spelling.size() != 6 || spelling.substr(0, 3) != "<0x" || spelling[5] != '>') return -1;
  int value = 0;
  for (char c : spelling.substr(3, 2)) {
    const int digit = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                             : -1;
    if (digit < 0) return -1;
    value = value * 16 + digit;
  }
  return value;
}

std::string replace_all(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  size_t at = 0;
  for (size_t found; (found = text.find(from, at)) != std::string_view::npos;) {
    out.append(text.substr(at, found - at)).append(to);
    at = found + from.size();
  }
  return out.append(text.substr(at));
}

// Where the white space at the end of `text` begins.
size_t trailing_space(std::string_view text) {
  size_t end = text.size();
  while (end > 0) {
    size_t begin = end - 1;
    while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) --begin;
    if (!is_white_space(utf8_decode(text.substr(begin, end - begin)))) break;
    end = begin;
  }
  return end;
}

size_t leading_space(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const size_t length = utf8_length(text.substr(at));
    if (!is_white_space(utf8_decode(text.substr(at, length)))) break;
    at += length;
  }
  return at;
}

bool starts_with(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

struct Range {
  size_t begin, end;
  bool match;
};

// Matches and what lies between them, joined as the behaviour says.
std::vector<Range> arrange(const std::vector<std::pair<size_t, size_t>>& matches, size_t size,
                           const SplitStep& step) {
  std::vector<Range> all;
  size_t at = 0;
  for (const auto& [begin, end] : matches) {
    if (begin > at) all.push_back({at, begin, step.invert});
    all.push_back({begin, end, !step.invert});
    at = end;
  }
  if (at < size) all.push_back({at, size, step.invert});

  std::vector<Range> out;
  bool previous = false;
  switch (step.behavior) {
    case SplitStep::kIsolated:
      return all;
    case SplitStep::kRemoved:
      std::copy_if(all.begin(), all.end(), std::back_inserter(out),
                   [](const Range& r) { return !r.match; });
      return out;
    case SplitStep::kContiguous:
    case SplitStep::kWithPrevious:
      for (const Range& range : all) {
        const bool joins = step.behavior == SplitStep::kContiguous ? range.match == previous
                                                                   : range.match && !previous;
        if (joins && !out.empty()) {
          out.back().end = range.end;
        } else {
          out.push_back(range);
        }
        previous = range.match;
      }
      return out;
    case SplitStep::kWithNext:
      for (size_t i = all.size(); i-- > 0;) {
        if (all[i].match && !previous && !out.empty()) {
          out.back().begin = all[i].begin;
        } else {
          out.push_back(all[i]);
        }
        previous = all[i].match;
      }
      std::reverse(out.begin(), out.end());
      return out;
  }
  return out;
}

Status normalize(const std::vector<NormalizeStep>& steps, std::string* text) {
  for (const NormalizeStep& step : steps) {
    switch (step.kind) {
      case NormalizeStep::kNfc:
        *text = nfc(*text);
        break;
      case NormalizeStep::kPrepend:
        if (!text->empty()) text->insert(0, step.text);
        break;
      case NormalizeStep::kReplace: {
        std::vector<std::pair<size_t, size_t>> matches;
        FK_RETURN_IF_ERROR(step.pattern->find_all(*text, &matches));
        std::string out;
        size_t at = 0;
        for (const auto& [begin, end] : matches) {
          out.append(*text, at, begin - at).append(step.text);
          at = end;
        }
        *text = out.append(*text, at, std::string::npos);
        break;
      }
    }
  }
  return {};
}

}  // namespace

// In the order of a tokenizer's own description: contractions, words, numbers, other signs, spaces.
const char kGpt2Pattern[] =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
const char kLlama3Pattern[] = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|)"
                              R"( ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
const char kQwen2Pattern[] = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|)"
                             R"( ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
const char kTekkenPattern[] =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|)"
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|)"
    R"(\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
const char kNumberPattern[] = R"(\p{N})";

const std::array<std::string, 256>& byte_alphabet() {
  static const auto* alphabet = [] {
    auto* made = new std::array<std::string, 256>;
    uint32_t next = 256;  // bytes that do not print move up there
    for (uint32_t b = 0; b < 256; ++b) {
      const bool prints =
          (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
      utf8_append(prints ? b : next++, &(*made)[b]);
    }
    return made;
  }();
  return *alphabet;
}

bool from_byte_alphabet(std::string_view spelling, std::string* bytes) {
  static const auto* byte_of_code_point = [] {
    auto* made = new std::array<int, 0x180>;
    made->fill(-1);
    for (int b = 0; b < 256; ++b) {
      (*made)[utf8_decode(byte_alphabet()[static_cast<size_t>(b)])] = b;
    }
    return made;
  }();
  bytes->clear();
  while (!spelling.empty()) {
    const size_t length = utf8_length(spelling);
    if (length == 0) return false;
    const uint32_t c = utf8_decode(spelling.substr(0, length));
    if (c >= byte_of_code_point->size() || (*byte_of_code_point)[c] < 0) return false;
    *bytes += static_cast<char>((*byte_of_code_point)[c]);
    spelling.remove_prefix(length);
  }
  return true;
}

void set_byte_level_ids(TextTokenizer* tokenizer) {
  tokenizer->bpe.bytes = true;
  const bool whole_words = tokenizer->bpe.ignore_merges;  // else only merges make long tokens
  std::string bytes;
  for (size_t i = 0; i < tokenizer->tokens.size(); ++i) {
    if (tokenizer->tokens[i].empty() || !from_byte_alphabet(tokenizer->tokens[i], &bytes)) continue;
    if (whole_words) tokenizer->bpe.ids[bytes] = static_cast<int32_t>(i);
    if (bytes.size() == 1) {
      tokenizer->bpe.byte_ids[static_cast<unsigned char>(bytes[0])] = static_cast<int32_t>(i);
    }
  }
}

void set_byte_token_ids(TextTokenizer* tokenizer) {
  for (size_t i = 0; i < tokenizer->tokens.size(); ++i) {
    if (const int byte = byte_of(tokenizer->tokens[i]); byte >= 0) {
      tokenizer->bpe.byte_ids[byte] = static_cast<int32_t>(i);
    }
  }
}

Status set_sentencepiece_ids(const std::vector<float>& scores, TextTokenizer* tokenizer) {
  tokenizer->byte_tokens = true;
  tokenizer->bpe.byte_fallback = true;
  tokenizer->bpe.fuse_unknown = true;
  set_byte_token_ids(tokenizer);
  std::vector<Merge> merges;
  FK_RETURN_IF_ERROR(merges_from_scores(tokenizer->bpe, scores, &merges));
  tokenizer->bpe.merges.build(merges);
  return {};
}

Status TextTokenizer::finish() {
  pieces_.assign(tokens.size(), "");
  special_.assign(tokens.size(), false);
  by_spelling_.reserve(tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (!tokens[i].empty()) by_spelling_[tokens[i]] = static_cast<int32_t>(i);
  }
  for (const AddedToken& token : added) {
    special_[static_cast<size_t>(token.id)] = token.special;
    by_spelling_[token.content] = token.id;
  }
  for (size_t i = 0; i < tokens.size(); ++i) {
    std::string& piece = pieces_[i];
    if (byte_level) {
      if (!from_byte_alphabet(tokens[i], &piece)) piece = tokens[i];
    } else if (const int byte = byte_tokens ? byte_of(tokens[i]) : -1; byte >= 0) {
      piece = static_cast<char>(byte);
    } else {
      piece = space.empty() ? tokens[i] : replace_all(tokens[i], space, " ");
    }
  }
  bool single_word = false;
  contents_.resize(added.size());
  for (size_t i = 0; i < added.size(); ++i) {
    contents_[i] = added[i].content;
    if (added[i].normalized) FK_RETURN_IF_ERROR(normalize(normalizers, &contents_[i]));
    if (contents_[i].empty()) continue;
    single_word |= added[i].single_word;
    AddedByByte& table = added[i].normalized ? after_ : before_;
    table[static_cast<unsigned char>(contents_[i][0])].push_back(i);
  }
  for (AddedByByte* table : {&before_, &after_}) {
    for (std::vector<size_t>& list : *table) {
      std::stable_sort(list.begin(), list.end(), [&](size_t a, size_t b) {
        return contents_[a].size() > contents_[b].size();
      });
    }
  }
  static constexpr char kWord[] = R"([\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}])";
  if (single_word) FK_RETURN_IF_ERROR(Pattern::compile(kWord, false, &word_));
  return {};
}

void TextTokenizer::cut_added(std::string_view text, const AddedByByte& table,
                              const std::vector<std::pair<size_t, size_t>>& plain,
                              std::vector<Segment>* segments) const {
  const auto touches_word = [&](size_t begin, size_t end) {
    // The characters just before and just after.
    size_t before = begin;
    while (before > 0 && before-- > 0 &&
           (static_cast<unsigned char>(text[before]) & 0xC0) == 0x80) {
    }
    const size_t after = end < text.size() ? utf8_length(text.substr(end)) : 0;
    std::vector<std::pair<size_t, size_t>> matches;
    const Status left = word_->find_all(text.substr(before, begin - before), &matches);
    const Status right = word_->find_all(text.substr(end, after), &matches);
    return !left.ok() || !right.ok() || !matches.empty();
  };
  size_t done = 0;
  size_t at = 0;
  while (at < text.size()) {
    const auto& list = table[static_cast<unsigned char>(text[at])];
    const auto found = std::find_if(list.begin(), list.end(), [&](size_t i) {
      return text.compare(at, contents_[i].size(), contents_[i]) == 0;
    });
    if (found == list.end()) {
      ++at;
      continue;
    }
    const AddedToken& token = added[*found];
    size_t begin = at, end = at + contents_[*found].size();
    at = end;
    const bool hidden =
        token.special && std::any_of(plain.begin(), plain.end(), [&](const auto& range) {
          return begin < range.second && range.first < end;
        });
    if (hidden || (token.single_word && touches_word(begin, end))) continue;
    if (token.lstrip) begin = std::max(done, trailing_space(text.substr(0, begin)));
    if (token.rstrip) end += leading_space(text.substr(end));
    if (begin > done) segments->push_back({text.substr(done, begin - done), -1});
    segments->push_back({text.substr(begin, end - begin), token.id});
    done = end;  // a token inside the white space that was taken along is still found
  }
  if (done < text.size()) segments->push_back({text.substr(done), -1});
}

Status TextTokenizer::encode_parts(const std::vector<TextPart>& parts, bool add_special,
                                   std::vector<int32_t>* ids) const {
  std::string text;
  std::vector<std::pair<size_t, size_t>> plain;
  for (const TextPart& part : parts) {
    const size_t begin = text.size();
    text += to_utf8(part.text);
    if (!part.parse_special) plain.emplace_back(begin, text.size());
  }
  if (text.size() > kMaxText) return invalid("text: expected at most 1 GiB");
  if (add_special) ids->insert(ids->end(), prefix.begin(), prefix.end());
  std::vector<Segment> segments;
  cut_added(text, before_, plain, &segments);
  for (const Segment& segment : segments) {
    if (segment.id >= 0) {
      ids->push_back(segment.id);
      continue;
    }
    const size_t begin = static_cast<size_t>(segment.text.data() - text.data());
    const size_t end = begin + segment.text.size();
    const bool hides = std::any_of(plain.begin(), plain.end(), [&](const auto& range) {
      return begin < range.second && range.first < end;
    });
    FK_RETURN_IF_ERROR(encode_segment(segment.text, begin == 0, hides, ids));
  }
  if (add_special) ids->insert(ids->end(), suffix.begin(), suffix.end());
  return {};
}

Status TextTokenizer::encode_segment(std::string_view text, bool first, bool plain,
                                     std::vector<int32_t>* ids) const {
  std::string normal(text);
  FK_RETURN_IF_ERROR(normalize(normalizers, &normal));
  std::vector<std::pair<size_t, size_t>> all;
  if (plain) all.emplace_back(0, normal.size());
  std::vector<Segment> segments;
  cut_added(normal, after_, all, &segments);
  for (const Segment& segment : segments) {
    if (segment.id >= 0) {
      ids->push_back(segment.id);
    } else {
      const bool leads = first && segment.text.data() == normal.data();
      FK_RETURN_IF_ERROR(encode_words(segment.text, leads, ids));
    }
  }
  return {};
}

Status TextTokenizer::encode_words(std::string_view text, bool first,
                                   std::vector<int32_t>* ids) const {
  struct Word {
    std::string_view text;
    bool first;  // begins where the whole text begins
  };
  std::deque<std::string> changed;  // keeps what words view
  std::vector<Word> words = {{text, first}}, next;
  for (const SplitStep& step : splits) {
    next.clear();
    for (Word word : words) {
      const bool wanted =
          step.prepend == Prepend::kAlways || (step.prepend == Prepend::kFirst && word.first);
      if (step.kind == SplitStep::kMetaspace) {
        std::string signs = replace_all(word.text, " ", step.sign);
        if (wanted && !starts_with(signs, step.sign)) signs.insert(0, step.sign);
        word.text = changed.emplace_back(std::move(signs));
      } else if (wanted && !starts_with(word.text, " ")) {
        word.text = changed.emplace_back(" " + std::string(word.text));
      }
      std::vector<std::pair<size_t, size_t>> matches;
      if (step.kind == SplitStep::kMetaspace && step.split) {
        for (size_t at = 0; (at = word.text.find(step.sign, at)) != std::string_view::npos;) {
          matches.emplace_back(at, at + step.sign.size());
          at += step.sign.size();
        }
      } else if (step.pattern != nullptr) {
        FK_RETURN_IF_ERROR(step.pattern->find_all(word.text, &matches));
      } else {
        next.push_back(word);
        continue;
      }
      for (const Range& range : arrange(matches, word.text.size(), step)) {
        next.push_back({word.text.substr(range.begin, range.end - range.begin),
                        word.first && range.begin == 0});
      }
    }
    words.swap(next);
  }
  for (const Word& word : words) bpe.encode(word.text, ids);
  return {};
}

std::string TextTokenizer::decode(const std::vector<int32_t>& ids, bool skip_special) const {
  TokenStream stream(*this, /*continues=*/false, skip_special);
  std::string text;
  for (int32_t id : ids) text += stream.push(id);
  return text + stream.finish();
}

std::string TextTokenizer::token_bytes(int32_t id) const {
  return id >= 0 && id < size() ? pieces_[static_cast<size_t>(id)] : "";
}

int32_t TextTokenizer::find(std::string_view token) const {
  const auto found = by_spelling_.find(std::string(token));
  return found == by_spelling_.end() ? -1 : found->second;
}

std::string TextTokenizer::token(int32_t id) const {
  return id >= 0 && id < size() ? tokens[static_cast<size_t>(id)] : "";
}

bool TextTokenizer::is_special(int32_t id) const {
  return id >= 0 && id < size() && special_[static_cast<size_t>(id)];
}

}  // namespace fk::model
