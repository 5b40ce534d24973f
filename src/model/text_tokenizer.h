// This is the tokenizer of every supported model, made of the parts that the model's file
// describes: added tokens are cut out of the text, the rest is normalised and split into words, and
// each word is encoded by BPE.
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

// This is U+2581, which stands for a space in SentencePiece.
constexpr std::string_view kMetaspace = "\xE2\x96\x81";

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

  // A format's reader fills these, and then calls `finish`.
  std::vector<std::string> tokens;  // the spelling of each id; empty: there is no such id
  std::vector<AddedToken> added;
  std::vector<NormalizeStep> normalizers;
  std::vector<SplitStep> splits;
  size_t machine_code_left = kMachineCode;  // for the patterns of these two (model/pattern.h)
  Bpe bpe;
  std::vector<int32_t> prefix, suffix;  // the ids before and after every text
  bool byte_level = false;              // spellings are in the byte-level alphabet
  std::string space;                    // what stands for a space in spellings; empty: nothing does
  bool byte_tokens = false;             // a token spelled "<0x0A>" is the byte 10
  bool strip_first_space = false;       // see strips_first_space

  // Checks and prepares the parts. The error does not name the file.
  Status finish();

 private:
  struct Encoding;

  // Encodes text between two added tokens that are looked for before normalisation. `first` says
  // that the text begins here; `ignore_special` that special tokens in it count as characters.
  Status encode_segment(std::string_view text, bool first, bool ignore_special,
                        Encoding* encoding) const;
  // Splits a segment by the splits from number `step` on and encodes the words.
  Status encode_words(std::string_view text, bool first, size_t step, Encoding* encoding) const;

  std::vector<std::string> pieces_;  // the bytes that each id stands for
  std::vector<bool> special_;        // whether each id is special
  StringTable by_spelling_;
  AddedTokens before_, after_;  // those looked for before and after normalisation
};

// Returns GPT-2's byte-level alphabet, which has a printable character for each byte.
const std::array<std::string, 256>& byte_alphabet();
// Sets *bytes to what a spelling in that alphabet stands for; returns false if it has a character
// outside of the alphabet.
bool from_byte_alphabet(std::string_view spelling, std::string* bytes);

// Sets the BPE's ids for a tokenizer whose spellings are in the byte-level alphabet.
void set_byte_level_ids(TextTokenizer* tokenizer);
// Sets the BPE's ids of bytes to those of the tokens "<0x00>" to "<0xFF>".
void set_byte_token_ids(TextTokenizer* tokenizer);
// Sets the BPE's merges and ids of bytes for a SentencePiece tokenizer, from bpe.ids and the score
// of each id. The error does not name the file.
Status set_sentencepiece_ids(const std::vector<float>& scores, TextTokenizer* tokenizer);

// These are the split patterns of the tokenizers that GGUF files name.
extern const char kGpt2Pattern[];
extern const char kLlama3Pattern[];
extern const char kQwen2Pattern[];
extern const char kTekkenPattern[];
extern const char kNumberPattern[];  // matches one digit

}  // namespace fk::model
