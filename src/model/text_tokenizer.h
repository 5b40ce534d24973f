// The tokenizer of every supported model, as the parts that its file describes: added tokens are
// cut out of the text, the rest is normalised, split into words, and each word encoded by BPE.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "model/added_tokens.h"
#include "model/bpe.h"
#include "model/normalize.h"
#include "model/split.h"
#include "model/string_table.h"
#include "model/tokenizer.h"

namespace fk::model {

constexpr std::string_view kMetaspace = "\xE2\x96\x81";  // U+2581, a space in SentencePiece

class TextTokenizer : public Tokenizer {
 public:
  Status encode_parts(const std::vector<TextPart>& parts, bool add_special,
                      std::vector<int32_t>* ids) const override;
  Status decode(const std::vector<int32_t>& ids, bool skip_special,
                std::string* text) const override;
  std::string token_bytes(int32_t id) const override;
  int32_t find(std::string_view token) const override;
  std::string token(int32_t id) const override;
  bool is_special(int32_t id) const override;
  int32_t size() const override { return static_cast<int32_t>(tokens.size()); }
  bool strips_first_space() const override { return strip_first_space; }

  // Filled by a format's reader; `finish` then checks and prepares them.
  std::vector<std::string> tokens;  // spelling by id; empty: no such id
  std::vector<AddedToken> added;
  std::vector<NormalizeStep> normalizers;
  std::vector<SplitStep> splits;
  Bpe bpe;
  std::vector<int32_t> prefix, suffix;  // ids around every text
  bool byte_level = false;              // spellings are in the byte-level alphabet
  std::string space;                    // what stands for a space in spellings, if anything
  bool byte_tokens = false;             // "<0x0A>" is the byte 10
  bool strip_first_space = false;

  // The error does not name the file.
  Status finish();

 private:
  struct Encoding;  // what encoding one text needs beside the text

  // `plain`: special tokens are plain characters in it. `first`: it begins where the text begins.
  Status encode_segment(std::string_view text, bool first, bool plain, Encoding* encoding) const;
  // With the splits from `step` on.
  Status encode_words(std::string_view text, bool first, size_t step, Encoding* encoding) const;

  std::vector<std::string> pieces_;  // bytes by id
  std::vector<bool> special_;
  StringTable by_spelling_;
  AddedTokens before_, after_;  // normalisation
};

// The byte-level alphabet (GPT-2's): a printable character for each byte.
const std::array<std::string, 256>& byte_alphabet();
// The bytes that a spelling stands for; false where it has a character outside the alphabet.
bool from_byte_alphabet(std::string_view spelling, std::string* bytes);

// Gives the BPE its ids where spellings are in the byte-level alphabet.
void set_byte_level_ids(TextTokenizer* tokenizer);
// The ids of "<0x00>" to "<0xFF>".
void set_byte_token_ids(TextTokenizer* tokenizer);
// SentencePiece's form, from bpe.ids and the scores by id: merges and byte tokens. The error does
// not name the file.
Status set_sentencepiece_ids(const std::vector<float>& scores, TextTokenizer* tokenizer);

// The patterns of the tokenizers we know by name.
extern const char kGpt2Pattern[];
extern const char kLlama3Pattern[];
extern const char kQwen2Pattern[];
extern const char kTekkenPattern[];
extern const char kNumberPattern[];  // one digit each

}  // namespace fk::model
