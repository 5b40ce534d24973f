// Text to token ids and back, as Hugging Face's `tokenizers` does it for the same model.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/status.h"

namespace fk::model {

struct ChatMessage {
  std::string role;  // "system", "user", "assistant"
  std::string content;
};

// The formats we write natively; a template's text says which one it is.
enum class ChatFormat : uint8_t { kNone, kChatMl, kLlama2, kLlama3, kMistral };

struct EncodeOptions {
  bool add_special = true;    // what the model's own post-processor adds, <s> in front for example
  bool parse_special = true;  // "<|im_end|>" in the text is that token; else its plain characters
};

// A stretch of a text, and whether special tokens are looked for in it.
struct TextPart {
  std::string_view text;
  bool parse_special = true;
};

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // Appends the ids of the parts' joined text to *ids. Bytes that are not UTF-8 are read as U+FFFD.
  // Fails where the file asks for more work than the text may take.
  virtual Status encode_parts(const std::vector<TextPart>& parts, bool add_special,
                              std::vector<int32_t>* ids) const = 0;
  Status encode(std::string_view text, const EncodeOptions& options,
                std::vector<int32_t>* ids) const {
    return encode_parts({{text, options.parse_special}}, options.add_special, ids);
  }
  // All the text of `ids`; bytes that form no UTF-8 come out as U+FFFD. Unknown ids give nothing.
  // Fails where the file's tokens are so long that the text would take much memory.
  virtual Status decode(const std::vector<int32_t>& ids, bool skip_special,
                        std::string* text) const = 0;

  // The bytes that one token adds in the middle of a text. May be a part of a character.
  virtual std::string token_bytes(int32_t id) const = 0;
  virtual int32_t find(std::string_view token) const = 0;  // by its spelling in the file; -1: none
  virtual std::string token(int32_t id) const = 0;         // its spelling in the file
  virtual bool is_special(int32_t id) const = 0;
  virtual int32_t size() const = 0;
  // Whether a text's first token loses its leading space (SentencePiece's dummy prefix).
  virtual bool strips_first_space() const = 0;

  int32_t bos = -1;
  std::vector<int32_t> eos;  // ends of text, and of a turn
  ChatFormat chat_format = ChatFormat::kNone;
  std::string chat_template;
  std::string default_system;  // what the template says where no system message is given
};

// Text of a growing sequence, never cut inside a UTF-8 character: what `push` and `finish` return,
// joined, is what `decode` gives.
class TokenStream {
 public:
  // `continues`: the ids follow others (a prompt), so that a first space is kept.
  explicit TokenStream(const Tokenizer& tokenizer, bool continues = true, bool skip_special = true);
  std::string push(int32_t id);  // the text that is now certain; often empty
  std::string finish();          // what is left, an unfinished character as U+FFFD

 private:
  const Tokenizer& tokenizer_;
  bool first_;
  bool skip_special_;
  std::string pending_;
};

// The text of a conversation, special tokens spelled out, up to where the assistant speaks
// (`prompt`) or to the last message's end. Encode it with add_special = false, parse_special =
// true. A user's content that spells a special token is encoded as that token, as in Transformers;
// `encode_chat` is the safe way.
Status format_chat(const Tokenizer& tokenizer, const std::vector<ChatMessage>& messages,
                   bool prompt, std::string* text);
// The same as ids, with the contents' own characters never read as special tokens.
Status encode_chat(const Tokenizer& tokenizer, const std::vector<ChatMessage>& messages,
                   bool prompt, std::vector<int32_t>* ids);

}  // namespace fk::model
