// Byte-pair encoding of one word: its symbols, merged in the order of their ranks.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/status.h"

namespace fk::model {

// What two neighbouring tokens become, and how early.
struct Merge {
  int32_t left, right, result, rank;
};

// Merges by their pair, in one flat array.
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
  std::unordered_map<std::string, int32_t> ids;
  MergeTable merges;
  bool bytes = false;          // symbols are bytes, not characters
  bool byte_fallback = false;  // a character without id becomes its bytes' tokens
  bool fuse_unknown = false;   // neighbouring unknown characters become one token
  bool ignore_merges = false;  // a word that is a token is that token
  int32_t unknown = -1;        // -1: characters without id vanish
  int32_t byte_ids[256];       // for `bytes` and byte_fallback; -1: none

  Bpe() { std::fill(std::begin(byte_ids), std::end(byte_ids), -1); }
  int32_t find(std::string_view text) const;
  void encode(std::string_view word, std::vector<int32_t>* out) const;

 private:
  void first_symbols(std::string_view word, std::vector<int32_t>* symbols) const;
  void merge(std::vector<int32_t>* symbols) const;
};

// The merges of a vocabulary whose order is its scores (SentencePiece): every way to put a token
// together out of two others, highest score first. `scores` by id.
Status merges_from_scores(const Bpe& bpe, const std::vector<float>& scores,
                          std::vector<Merge>* merges);

}  // namespace fk::model
