// Reads llama2.c's tokenizer.bin: the longest token's length, then for each token its score, length
// and bytes. Spaces in tokens are plain spaces. Tokens 0 to 2 are <unk>, <s> and </s>, then come
// 256 bytes.
#include <cmath>

#include "model/check_config.h"
#include "model/formats.h"
#include "model/mapped_file.h"
#include "model/reader.h"
#include "model/text_tokenizer.h"
#include "model/unicode.h"

namespace fk::model {

Status tokenizer_from_llama2c(const std::string& file, std::string_view bytes, int64_t vocab,
                              std::unique_ptr<Tokenizer>* tokenizer) {
  constexpr int32_t kSpecial = 3;
  constexpr int32_t kFirstText = kSpecial + 256;
  auto made = std::make_unique<TextTokenizer>();
  Reader reader(bytes);
  int32_t longest;
  if (!reader.read(&longest)) return file_error(file, "is too short for a tokenizer");
  if (longest < 1) {
    return file_error(file,
                      "longest token: expected 1 byte or more, got " + std::to_string(longest));
  }
  std::vector<float> scores;
  while (reader.left() > 0) {
    const std::string where = "token " + std::to_string(scores.size()) + ": ";
    float score;
    int32_t length;
    std::string_view text;
    if (!reader.read(&score) || !reader.read(&length)) {
      return file_error(file, where + "the file ends in the middle of it");
    }
    if (length < 0 || length > longest) {
      return file_error(file, where + "length: expected 0 to " + std::to_string(longest) +
                                  ", got " + std::to_string(length));
    }
    if (!reader.read(static_cast<uint64_t>(length), &text)) {
      return file_error(file, where + "the file ends in the middle of it");
    }
    if (!std::isfinite(score)) return file_error(file, where + "score: expected a finite number");
    if (!is_utf8(text)) return file_error(file, where + "expected UTF-8, got other bytes");
    if (scores.size() >= kMaxVocab) return file_error(file, "has more than 2^24 tokens");
    const int32_t id = static_cast<int32_t>(scores.size());
    if (id >= kFirstText && made->bpe.ids.find(text) < 0) made->bpe.ids.set(text, id);
    made->tokens.emplace_back(text);
    scores.push_back(score);
  }
  if (made->tokens.size() < kFirstText || (vocab > 0 && made->size() != vocab)) {
    return file_error(file, "expected " +
                                (vocab > 0 ? std::to_string(vocab) + " tokens, as the model has"
                                           : "at least 259 tokens") +
                                ", got " + std::to_string(made->tokens.size()));
  }
  for (int32_t id = 0; id < kSpecial; ++id) {
    static constexpr const char* kNames[] = {"<unk>", "<s>", "</s>"};
    AddedToken token;
    token.id = id;
    token.content = made->tokens[static_cast<size_t>(id)] = kNames[id];
    token.special = true;
    made->added.push_back(token);
  }
  made->normalizers.push_back({NormalizeStep::kPrepend, " ", nullptr});
  made->strip_first_space = true;
  made->bpe.unknown = 0;
  made->bos = 1;
  made->eos = {1, 2};
  made->prefix = {1};
  Status status = set_sentencepiece_ids(scores, made.get());
  if (status.ok()) status = made->finish();
  if (!status.ok()) return file_error(file, status.message());
  *tokenizer = std::move(made);
  return {};
}

}  // namespace fk::model
