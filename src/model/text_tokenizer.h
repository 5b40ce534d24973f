// The tokenizer of every supported model, as the parts that its file describes: added tokens are
// cut out of the text, the rest is normalised, split into words, and each word encoded by BPE.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "model/bpe.h"
#include "model/pattern.h"
#include "model/tokenizer.h"

namespace fk::model {

constexpr std::string_view kMetaspace = "\xE2\x96\x81";  // U+2581, a space in SentencePiece

struct AddedToken {
  int32_t id = -1;
  std::string content;
  bool special = false;
  bool single_word = false;  // only where no letter touches it
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;
  bool normalized = false;  // looked for after normalisation
};

struct NormalizeStep {
  enum Kind { kNfc, kPrepend, kReplace } kind;
  std::string text;  // kPrepend: what; kReplace: by what
  std::shared_ptr<const Pattern> pattern;
};

// Which segments get a space (or its sign) in front.
enum class Prepend { kNever, kFirst, kAlways };

struct SplitStep {
  enum Kind { kPattern, kMetaspace, kByteLevel } kind = kPattern;
  // kPattern; kByteLevel: null where it does not split.
  std::shared_ptr<const Pattern> pattern;
  enum Behavior { kIsolated, kRemoved, kWithPrevious, kWithNext, kContiguous } behavior = kIsolated;
  bool invert = false;
  Prepend prepend = Prepend::kNever;  // kMetaspace, kByteLevel
  bool split = false;                 // kMetaspace: words begin at the sign
  std::string sign;                   // kMetaspace
};

class TextTokenizer : public Tokenizer {
 public:
  Status encode_parts(const std::vector<TextPart>& parts, bool add_special,
                      std::vector<int32_t>* ids) const override;
  std::string decode(const std::vector<int32_t>& ids, bool skip_special) const override;
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
  using AddedByByte = std::array<std::vector<size_t>, 256>;  // by first byte, longest first
  struct Segment {
    std::string_view text;
    int32_t id;  // of an added token; -1: plain text
  };

  // `plain`: ranges in which special tokens are plain characters.
  void cut_added(std::string_view text, const AddedByByte& table,
                 const std::vector<std::pair<size_t, size_t>>& plain,
                 std::vector<Segment>* segments) const;
  Status encode_segment(std::string_view text, bool first, bool plain,
                        std::vector<int32_t>* ids) const;
  Status encode_words(std::string_view text, bool first, std::vector<int32_t>* ids) const;

  std::vector<std::string> pieces_;  // bytes by id
  std::vector<bool> special_;
  std::unordered_map<std::string, int32_t> by_spelling_;
  std::vector<std::string> contents_;  // of `added`, as they are looked for
  AddedByByte before_, after_;         // normalisation
  std::shared_ptr<const Pattern> word_;
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
