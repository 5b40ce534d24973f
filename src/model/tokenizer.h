// This file declares the interface of tokenizers, which turn text into token ids and back, with the
// same results as Hugging Face's `tokenizers` for the same model; and conversations as text or ids.
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
  std::string role;  // "system", "user" or "assistant"
  std::string content;
};

// Lists the chat formats that we write without running a template. The template's text tells which
// one it is.
enum class ChatFormat : uint8_t { kNone, kChatMl, kLlama2, kLlama3, kMistral };

struct EncodeOptions {
  bool add_special = true;    // add the tokens that the model's post-processor adds, such as <s>
  bool parse_special = true;  // read "<|im_end|>" in the text as that token, not as characters
};

// Describes a stretch of a text, and whether special tokens are looked for in it.
struct TextPart {
  std::string_view text;
  bool parse_special = true;
};

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // Appends the ids of the parts' joined text to *ids. Bytes that are not UTF-8 are read as U+FFFD.
  // Fails if the tokenizer's file asks for more work than a text may take (model/work.h).
  virtual Status encode_parts(const std::vector<TextPart>& parts, bool add_special,
                              std::vector<int32_t>* ids) const = 0;
  Status encode(std::string_view text, const EncodeOptions& options,
                std::vector<int32_t>* ids) const {
    return encode_parts({{text, options.parse_special}}, options.add_special, ids);
  }
  // Sets *text to the text of `ids`. Bytes that are not UTF-8 come out as U+FFFD, and unknown ids
  // give nothing. Fails if the file's tokens are so long that the text would take much memory.
  virtual Status decode(const std::vector<int32_t>& ids, bool skip_special,
                        std::string* text) const = 0;

  // Returns the bytes that one token adds in the middle of a text, which may be a part of a
  // character.
  virtual std::string token_bytes(int32_t id) const = 0;
  // Returns the id of the token with this spelling in the file, or -1.
  virtual int32_t find(std::string_view token) const = 0;
  // Returns a token's spelling in the file, or "" if there is no such id.
  virtual std::string token(int32_t id) const = 0;
  virtual bool is_special(int32_t id) const = 0;
  // Returns the number of ids; the largest is one less.
  virtual int32_t size() const = 0;
  // Returns whether a text's first token loses its leading space (SentencePiece's dummy prefix).
  virtual bool strips_first_space() const = 0;

  int32_t bos = -1;          // the token that begins a text; -1: none
  std::vector<int32_t> eos;  // the tokens that end a text or a message
  ChatFormat chat_format = ChatFormat::kNone;
  std::string chat_template;   // Jinja text; empty where the file has none
  std::string default_system;  // the system message that the template writes if none is given
};

// Turns ids into text as they come, and never cuts inside a UTF-8 character. What `push` and
// `finish` return, joined, is what `decode` returns.
class TokenStream {
 public:
  // `continues` says that the ids follow others (a prompt), so that a leading space is kept.
  explicit TokenStream(const Tokenizer& tokenizer, bool continues = true, bool skip_special = true);
  // Adds a token and returns the text that is now certain, which is often empty.
  std::string push(int32_t id);
  // Returns what is left; an unfinished character becomes U+FFFD.
  std::string finish();

 private:
  const Tokenizer& tokenizer_;
  bool first_;  // the next text begins a text, and loses its leading space
  bool skip_special_;
  std::string pending_;  // the first bytes of a character
};

// Writes a conversation as text, with special tokens spelled out: with `prompt`, up to where the
// assistant speaks, otherwise to the last message's end. Encode it with add_special = false and
// parse_special = true. If a user's content spells a special token, it is then encoded as that
// token, as in Transformers; `encode_chat` is the safe way.
Status format_chat(const Tokenizer& tokenizer, const std::vector<ChatMessage>& messages,
                   bool prompt, std::string* text);
// Writes a conversation as ids. The contents of messages are never read as special tokens.
Status encode_chat(const Tokenizer& tokenizer, const std::vector<ChatMessage>& messages,
                   bool prompt, std::vector<int32_t>* ids);

}  // namespace fk::model
