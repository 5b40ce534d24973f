// Byte-pair encoding of one word: its symbols, merged in the order of their ranks.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "model/string_table.h"

namespace fk::model {

// What two neighbouring tokens become, and how early.
struct Merge {
  int32_t left, right, result, rank;
};

// Merges by their pair, in one flat array, with a hash that has a secret (see StringTable).
class MergeTable {
 public:
  void build(const std::vector<Merge>& merges);  // of equal pairs the last counts
  const Merge* find(int32_t left, int32_t right) const;

 private:
  size_t slot(int32_t left, int32_t right) const;

  std::vector<Merge> slots_;  // a power of two; empty ones have left = -1
};

class Bpe {
 public:
  // Which id a string of the text has: UTF-8 characters and what they merge to, or bytes.
  StringTable ids;
  MergeTable merges;
  bool bytes = false;          // symbols are bytes, not characters
  bool byte_fallback = false;  // a character without id becomes its bytes' tokens
  bool fuse_unknown = false;   // neighbouring unknown characters become one token
  bool ignore_merges = false;  // a word that is a token is that token
  int32_t unknown = -1;        // -1: characters without id vanish
  int32_t byte_ids[256];       // for `bytes` and byte_fallback; -1: none

  Bpe() { std::fill(std::begin(byte_ids), std::end(byte_ids), -1); }

  // Memory that words use one after the other.
  class Scratch {
    friend class Bpe;
    struct Symbol {
      int32_t id, previous, next;
      int32_t rank, result;  // of its merge with the next one; rank -1: there is none
    };
    std::vector<Symbol> symbols;
    std::vector<uint64_t> heap;  // a merge's rank, then its place
  };
  void encode(std::string_view word, Scratch* scratch, std::vector<int32_t>* out) const;

 private:
  void first_symbols(std::string_view word, Scratch* scratch) const;
  void look_up(int32_t at, Scratch* scratch) const;
  void merge(Scratch* scratch) const;
};

// The merges of a vocabulary whose order is its scores (SentencePiece): every way to put a token
// together out of two others, highest score first. `scores` by id.
Status merges_from_scores(const Bpe& bpe, const std::vector<float>& scores,
                          std::vector<Merge>* merges);

}  // namespace fk::model
