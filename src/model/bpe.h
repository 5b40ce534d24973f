// This file declares byte-pair encoding of one word: the word begins as a row of symbols
// (characters or bytes), and neighbours are merged in the order of the merges' ranks until none is
// left.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "model/string_table.h"

namespace fk::model {

// Names two neighbouring tokens, the token that they become, and the rank; lower ranks merge
// first.
struct Merge {
  int32_t left, right, result, rank;
};

// Finds merges by their pair, in one flat hash table. The hash has a secret (see StringTable).
class MergeTable {
 public:
  // Fills the table. If a pair comes twice, the last one counts.
  void build(const std::vector<Merge>& merges);
  // Returns the merge of a pair, or null.
  const Merge* find(int32_t left, int32_t right) const;

 private:
  // Returns where the search for a pair begins.
  size_t slot(int32_t left, int32_t right) const;

  std::vector<Merge> slots_;  // a power of two of them; empty ones have left = -1
};

// Encodes words. A tokenizer's reader fills its public members.
class Bpe {
 public:
  // Holds the ids of the strings that symbols may be, looked up in the text: UTF-8 characters and
  // what they merge to, or bytes.
  StringTable ids;
  MergeTable merges;
  bool bytes = false;          // symbols are bytes, not characters
  bool byte_fallback = false;  // a character without an id becomes the tokens of its bytes
  bool fuse_unknown = false;   // neighbouring unknown characters become one token
  bool ignore_merges = false;  // a word that is a token becomes that token without any merge
  int32_t unknown = -1;        // the id of unknown characters; -1: they vanish
  int32_t byte_ids[256];       // the ids of bytes, for `bytes` and byte_fallback; -1: none

  Bpe() { std::fill(std::begin(byte_ids), std::end(byte_ids), -1); }

  // Holds memory for encoding a word, which the caller keeps for the next one.
  class Scratch {
    friend class Bpe;
    struct Symbol {
      int32_t id, previous, next;
      int32_t rank, result;  // of its merge with the next symbol; rank -1: there is none
    };
    std::vector<Symbol> symbols;
    std::vector<uint64_t> heap;  // a merge's rank in the high half, the left symbol in the low
  };
  // Appends the ids of `word` to *out.
  void encode(std::string_view word, Scratch* scratch, std::vector<int32_t>* out) const;

 private:
  // Splits the word into its first symbols.
  void first_symbols(std::string_view word, Scratch* scratch) const;
  void look_up(int32_t at, Scratch* scratch) const;
  void merge(Scratch* scratch) const;
};

// Derives the merges of a vocabulary that has scores instead (SentencePiece): every way to put a
// token together from two others, the highest score first. `scores` has one entry per id.
Status merges_from_scores(const Bpe& bpe, const std::vector<float>& scores,
                          std::vector<Merge>* merges);

}  // namespace fk::model
