// Encodes and decodes text with the parts that a format's reader has filled in.
#include "model/text_tokenizer.h"

#include <algorithm>

#include "model/unicode.h"

namespace fk::model {
namespace {

constexpr size_t kMaxText = size_t{1} << 30;  // bytes of the longest text that is encoded
// Ids may decode to this many bytes, for each id and in addition. Hostile files have tokens of any
// length.
constexpr uint64_t kDecodedPerId = 64;
constexpr uint64_t kFreeDecoded = 16 << 20;

// Returns the byte that a spelling like "<0x0A>" stands for, or -1 for other spellings.
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

bool starts_with(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

}  // namespace

// The alternatives of each pattern stand in the order of the model's own description: contractions,
// words, numbers, other signs, spaces.
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
    uint32_t next = 256;  // the code points of bytes that do not print begin here
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
  const bool whole_words = tokenizer->bpe.ignore_merges;  // otherwise only bytes are looked up
  std::string bytes;
  for (size_t i = 0; i < tokenizer->tokens.size(); ++i) {
    if (tokenizer->tokens[i].empty() || !from_byte_alphabet(tokenizer->tokens[i], &bytes)) continue;
    if (whole_words) tokenizer->bpe.ids.set(bytes, static_cast<int32_t>(i));
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
    if (!tokens[i].empty()) by_spelling_.set(tokens[i], static_cast<int32_t>(i));
  }
  for (const AddedToken& token : added) {
    special_[static_cast<size_t>(token.id)] = token.special;
    by_spelling_.set(token.content, token.id);
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
  size_t bytes = 0;
  for (const AddedToken& token : added) bytes += token.content.size();
  Work work(bytes);
  Matcher matcher(&work);
  for (const AddedToken& token : added) {
    std::string content = token.content;
    if (token.normalized) {
      const Status status = normalize(normalizers, &matcher, &content);
      if (!status.ok()) return {status.code(), "added_tokens: " + status.message()};
    }
    (token.normalized ? after_ : before_).add(token, std::move(content));
  }
  FK_RETURN_IF_ERROR(before_.finish());
  return after_.finish();
}

// Holds the state of encoding one text.
struct TextTokenizer::Encoding {
  Encoding(size_t bytes, std::vector<int32_t>* out) : work(bytes), matcher(&work), ids(out) {}

  Work work;
  Matcher matcher;
  Bpe::Scratch scratch;
  std::vector<int32_t>* ids;
};

Status TextTokenizer::encode_parts(const std::vector<TextPart>& parts, bool add_special,
                                   std::vector<int32_t>* ids) const {
  std::string text;
  Ranges ignore_special;
  for (const TextPart& part : parts) {
    const size_t begin = text.size();
    if (part.text.size() <= kMaxText) text += to_utf8(part.text);
    if (part.text.size() > kMaxText || text.size() > kMaxText) {
      return invalid("text: expected at most " + std::to_string(kMaxText) + " bytes, got more");
    }
    if (!part.parse_special && text.size() > begin) ignore_special.emplace_back(begin, text.size());
  }
  Encoding encoding(text.size(), ids);
  if (add_special) ids->insert(ids->end(), prefix.begin(), prefix.end());
  FK_RETURN_IF_ERROR(before_.cut(
      text, ignore_special, &encoding.matcher, [&](std::string_view segment, int32_t id) {
        if (id >= 0) {
          ids->push_back(id);
          return Status();
        }
        const size_t begin = static_cast<size_t>(segment.data() - text.data());
        const bool hides = overlaps(ignore_special, begin, begin + segment.size());
        return encode_segment(segment, begin == 0, hides, &encoding);
      }));
  if (add_special) ids->insert(ids->end(), suffix.begin(), suffix.end());
  return {};
}

Status TextTokenizer::encode_segment(std::string_view text, bool first, bool ignore_special,
                                     Encoding* encoding) const {
  std::string normal(text);
  FK_RETURN_IF_ERROR(normalize(normalizers, &encoding->matcher, &normal));
  Ranges all;
  if (ignore_special && !normal.empty()) all.emplace_back(0, normal.size());
  return after_.cut(normal, all, &encoding->matcher, [&](std::string_view segment, int32_t id) {
    if (id >= 0) {
      encoding->ids->push_back(id);
      return Status();
    }
    return encode_words(segment, first && segment.data() == normal.data(), 0, encoding);
  });
}

Status TextTokenizer::encode_words(std::string_view text, bool first, size_t step,
                                   Encoding* encoding) const {
  if (step == splits.size()) {
    FK_RETURN_IF_ERROR(encoding->work.word(text.size()));
    bpe.encode(text, &encoding->scratch, encoding->ids);
    return {};
  }
  const SplitStep& how = splits[step];
  const bool wanted = how.prepend == Prepend::kAlways || (how.prepend == Prepend::kFirst && first);
  std::string changed;  // holds the changed text, to which `text` then points
  if (how.kind == SplitStep::kMetaspace) {
    const auto spaces = static_cast<size_t>(std::count(text.begin(), text.end(), ' '));
    FK_RETURN_IF_ERROR(encoding->work.write(text.size() + (spaces + 1) * how.sign.size()));
    changed = replace_all(text, " ", how.sign);
    if (wanted && !starts_with(changed, how.sign)) changed.insert(0, how.sign);
    text = changed;
  } else if (wanted && !starts_with(text, " ")) {
    FK_RETURN_IF_ERROR(encoding->work.write(text.size() + 1));
    changed.append(" ").append(text);
    text = changed;
  }
  if (how.pattern == nullptr) return encode_words(text, first, step + 1, encoding);
  return split(how, text, &encoding->matcher, [&](size_t begin, size_t end) {
    return encode_words(text.substr(begin, end - begin), first && begin == 0, step + 1, encoding);
  });
}

Status TextTokenizer::decode(const std::vector<int32_t>& ids, bool skip_special,
                             std::string* text) const {
  const uint64_t limit = kDecodedPerId * ids.size() + kFreeDecoded;
  uint64_t bytes = 0;
  for (int32_t id : ids) {
    if (id >= 0 && id < size()) bytes += pieces_[static_cast<size_t>(id)].size();
    if (bytes > limit) {
      return invalid("ids: expected at most " + std::to_string(limit) + " bytes of text for " +
                     std::to_string(ids.size()) + " of them (" + std::to_string(kDecodedPerId) +
                     " for each and " + std::to_string(kFreeDecoded) +
                     "), but the tokenizer makes more of them");
    }
  }
  text->clear();
  text->reserve(static_cast<size_t>(bytes));
  TokenStream stream(*this, /*continues=*/false, skip_special);
  for (int32_t id : ids) *text += stream.push(id);
  *text += stream.finish();
  return {};
}

std::string TextTokenizer::token_bytes(int32_t id) const {
  return id >= 0 && id < size() ? pieces_[static_cast<size_t>(id)] : "";
}

int32_t TextTokenizer::find(std::string_view token) const { return by_spelling_.find(token); }

std::string TextTokenizer::token(int32_t id) const {
  return id >= 0 && id < size() ? tokens[static_cast<size_t>(id)] : "";
}

bool TextTokenizer::is_special(int32_t id) const {
  return id >= 0 && id < size() && special_[static_cast<size_t>(id)];
}

}  // namespace fk::model
