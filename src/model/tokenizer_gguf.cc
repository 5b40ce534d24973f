// Reads the tokenizer inside a GGUF file: "gpt2" (byte-level BPE) or "llama" (SentencePiece).
#include <algorithm>

#include "model/chat.h"
#include "model/formats.h"
#include "model/mapped_file.h"
#include "model/text_tokenizer.h"
#include "model/unicode.h"

namespace fk::model {
namespace {

// Lists the numbers in tokenizer.ggml.token_type.
enum TokenType {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6
};

// Says how the models of one name in tokenizer.ggml.pre split text.
struct PreTokenizer {
  const char* name;
  const char* pattern;
  bool digits;   // numbers are cut into digits before
  bool nfc;      // the text is composed (NFC) before
  bool add_bos;  // <s> begins every text, where the file does not say
};
constexpr PreTokenizer kPreTokenizers[] = {
    {"gpt-2", kGpt2Pattern, false, false, false},
    {"default", kGpt2Pattern, false, false, false},
    {"smollm", kGpt2Pattern, true, false, false},
    {"starcoder", kGpt2Pattern, true, false, false},
    {"llama-bpe", kLlama3Pattern, false, false, true},
    {"llama3", kLlama3Pattern, false, false, true},
    {"llama-v3", kLlama3Pattern, false, false, true},
    {"qwen2", kQwen2Pattern, false, true, false},
    {"deepseek-r1-qwen", kQwen2Pattern, false, true, false},
    {"tekken", kTekkenPattern, false, false, true},
};

// Reads the tokens and their types.
Status read_tokens(const Gguf& gguf, TextTokenizer* tokenizer, std::vector<int32_t>* types) {
  std::vector<std::string_view> tokens;
  FK_RETURN_IF_ERROR(gguf.get("tokenizer.ggml.tokens", &tokens));
  if (tokens.empty() || tokens.size() > (1 << 24)) {
    return gguf.error("tokenizer.ggml.tokens",
                      "expected 1 to 2^24 tokens, got " + std::to_string(tokens.size()));
  }
  types->assign(tokens.size(), kNormal);
  FK_RETURN_IF_ERROR(gguf.get("tokenizer.ggml.token_type", types));
  if (types->size() != tokens.size()) {
    return gguf.error("tokenizer.ggml.token_type",
                      "expected one for each of the " + std::to_string(tokens.size()) +
                          " tokens, got " + std::to_string(types->size()));
  }
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (!is_utf8(tokens[i])) {
      return gguf.error("tokenizer.ggml.tokens",
                        "expected UTF-8, got other bytes in token " + std::to_string(i));
    }
    tokenizer->tokens.emplace_back(tokens[i]);
    const int32_t type = (*types)[i];
    if (type != kControl && type != kUserDefined && type != kUnknown) continue;
    AddedToken token;
    token.id = static_cast<int32_t>(i);
    token.content = tokens[i];
    token.special = type != kUserDefined;
    tokenizer->added.push_back(std::move(token));
  }
  return {};
}

// Reads the merges, whose order is their rank.
Status read_merges(const Gguf& gguf, TextTokenizer* tokenizer) {
  std::vector<std::string_view> lines;
  FK_RETURN_IF_ERROR(gguf.get("tokenizer.ggml.merges", &lines));
  StringTable ids;
  ids.reserve(tokenizer->tokens.size());
  for (size_t i = 0; i < tokenizer->tokens.size(); ++i) {
    ids.set(tokenizer->tokens[i], static_cast<int32_t>(i));
  }
  std::vector<Merge> merges;
  merges.reserve(lines.size());
  std::string joined;
  for (size_t i = 0; i < lines.size(); ++i) {
    const auto error = [&](const std::string& what) {
      return gguf.error("tokenizer.ggml.merges",
                        "merge " + std::to_string(i) + " " + shown_text(lines[i]) + ": " + what);
    };
    const size_t gap = lines[i].find(' ', 1);
    if (gap == std::string_view::npos || gap + 1 == lines[i].size()) {
      return error("expected two tokens with a space between");
    }
    const int32_t left = ids.find(lines[i].substr(0, gap));
    const int32_t right = ids.find(lines[i].substr(gap + 1));
    joined.assign(lines[i].substr(0, gap)).append(lines[i].substr(gap + 1));
    const int32_t result = ids.find(joined);
    if (left < 0 || right < 0 || result < 0) {
      return error("expected both parts and what they make among the tokens");
    }
    merges.push_back({left, right, result, static_cast<int32_t>(i)});
  }
  tokenizer->bpe.merges.build(merges);
  return {};
}

// Reads what a "gpt2" tokenizer needs. *add_bos: see PreTokenizer.
Status read_byte_level(const Gguf& gguf, TextTokenizer* tokenizer, bool* add_bos) {
  std::string name = "default";
  FK_RETURN_IF_ERROR(gguf.get("tokenizer.ggml.pre", &name));
  const auto pre = std::find_if(std::begin(kPreTokenizers), std::end(kPreTokenizers),
                                [&](const PreTokenizer& p) { return name == p.name; });
  if (pre == std::end(kPreTokenizers)) {
    std::string known;
    for (const PreTokenizer& p : kPreTokenizers) known += std::string(" ") + p.name;
    return unsupported(gguf.file() + ": tokenizer.ggml.pre: expected one of" + known + ", got " +
                       shown_text(name));
  }
  *add_bos = pre->add_bos;
  if (pre->nfc) tokenizer->normalizers.push_back({NormalizeStep::kNfc, "", nullptr});
  if (pre->digits) {
    SplitStep digits;
    FK_RETURN_IF_ERROR(
        Pattern::compile(kNumberPattern, false, &tokenizer->machine_code_left, &digits.pattern));
    tokenizer->splits.push_back(digits);
  }
  SplitStep split;
  split.kind = SplitStep::kByteLevel;
  FK_RETURN_IF_ERROR(
      Pattern::compile(pre->pattern, false, &tokenizer->machine_code_left, &split.pattern));
  bool prefix = false;
  FK_RETURN_IF_ERROR(gguf.get("tokenizer.ggml.add_space_prefix", &prefix));
  if (prefix) split.prepend = Prepend::kAlways;
  tokenizer->splits.push_back(split);
  tokenizer->byte_level = true;
  tokenizer->bpe.ignore_merges = pre->pattern == kLlama3Pattern || pre->pattern == kTekkenPattern;
  set_byte_level_ids(tokenizer);
  return read_merges(gguf, tokenizer);
}

// Reads what a "llama" tokenizer needs.
Status read_sentencepiece(const Gguf& gguf, const std::vector<int32_t>& types,
                          TextTokenizer* tokenizer, bool* add_bos) {
  std::vector<float> scores;
  FK_RETURN_IF_ERROR(gguf.get("tokenizer.ggml.scores", &scores));
  if (scores.size() != types.size()) {
    return gguf.error("tokenizer.ggml.scores", "expected one for each of the " +
                                                   std::to_string(types.size()) + " tokens, got " +
                                                   std::to_string(scores.size()));
  }
  bool prefix = true;
  FK_RETURN_IF_ERROR(gguf.get("tokenizer.ggml.add_space_prefix", &prefix));
  SplitStep split;
  split.kind = SplitStep::kMetaspace;
  split.sign = kMetaspace;
  tokenizer->splits.push_back(split);
  // The space is put in front even where the text already begins with one.
  if (prefix) tokenizer->normalizers.push_back({NormalizeStep::kPrepend, " ", nullptr});
  *add_bos = true;
  int64_t unknown = -1;
  FK_RETURN_IF_ERROR(gguf.get("tokenizer.ggml.unknown_token_id", &unknown, 0,
                              static_cast<int64_t>(types.size()) - 1));
  for (size_t i = 0; i < types.size(); ++i) {
    if (types[i] == kNormal || types[i] == kUserDefined) {
      tokenizer->bpe.ids.set(tokenizer->tokens[i], static_cast<int32_t>(i));
    }
    if (types[i] == kUnknown && unknown < 0) unknown = static_cast<int64_t>(i);
  }
  tokenizer->bpe.unknown = static_cast<int32_t>(unknown);
  tokenizer->space = kMetaspace;
  tokenizer->strip_first_space = prefix;
  const Status status = set_sentencepiece_ids(scores, tokenizer);
  return status.ok() ? status : gguf.error("tokenizer.ggml.tokens", status.message());
}

}  // namespace

Status tokenizer_from_gguf(const Gguf& gguf, std::unique_ptr<Tokenizer>* tokenizer) {
  auto made = std::make_unique<TextTokenizer>();
  std::string model;
  FK_RETURN_IF_ERROR(gguf.get("tokenizer.ggml.model", &model));
  if (model != "gpt2" && model != "llama") {
    return unsupported(gguf.file() + ": tokenizer.ggml.model: expected gpt2 or llama, got " +
                       (model.empty() ? "none" : shown_text(model)));
  }
  std::vector<int32_t> types;
  FK_RETURN_IF_ERROR(read_tokens(gguf, made.get(), &types));
  bool add_bos = false, add_eos = false;
  FK_RETURN_IF_ERROR(model == "gpt2" ? read_byte_level(gguf, made.get(), &add_bos)
                                     : read_sentencepiece(gguf, types, made.get(), &add_bos));
  FK_RETURN_IF_ERROR(gguf.get("tokenizer.ggml.add_bos_token", &add_bos));
  FK_RETURN_IF_ERROR(gguf.get("tokenizer.ggml.add_eos_token", &add_eos));
  const int64_t last = static_cast<int64_t>(types.size()) - 1;
  int64_t bos = -1;
  FK_RETURN_IF_ERROR(gguf.get("tokenizer.ggml.bos_token_id", &bos, 0, last));
  made->bos = static_cast<int32_t>(bos);
  for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"}) {
    int64_t id = -1;
    FK_RETURN_IF_ERROR(gguf.get(key, &id, 0, last));
    if (id >= 0) made->eos.push_back(static_cast<int32_t>(id));
  }
  if (add_bos && made->bos >= 0) made->prefix = {made->bos};
  if (add_eos && !made->eos.empty()) made->suffix = {made->eos[0]};
  FK_RETURN_IF_ERROR(gguf.get("tokenizer.chat_template", &made->chat_template));
  const Status status = made->finish();
  if (!status.ok()) return file_error(gguf.file(), status.message());
  set_chat(made.get());
  *tokenizer = std::move(made);
  return {};
}

}  // namespace fk::model
