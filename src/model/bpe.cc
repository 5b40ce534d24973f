// This file does byte-pair encoding: it splits a word into symbols and merges neighbours, lowest
// rank first.
#include "model/bpe.h"

#include <algorithm>
#include <functional>

#include "model/unicode.h"

namespace fk::model {
namespace {

// This is the longest token that merges_from_scores accepts, in bytes. Only files made to waste
// time have longer ones: every way to cut a token in two is looked up.
constexpr size_t kMaxScoredToken = 256;

}  // namespace

size_t MergeTable::slot(int32_t left, int32_t right) const {
  const uint64_t key = uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  return static_cast<size_t>(mix(key ^ hash_secret(), 0x9E3779B97F4A7C15u)) & (slots_.size() - 1);
}

void MergeTable::build(const std::vector<Merge>& merges) {
  size_t size = 16;
  while (size < merges.size() * 2) size *= 2;
  slots_.assign(size, Merge{-1, -1, -1, 0});
  for (const Merge& merge : merges) {
    size_t i = slot(merge.left, merge.right);
    while (slots_[i].left != -1 &&
           (slots_[i].left != merge.left || slots_[i].right != merge.right)) {
      i = (i + 1) & (size - 1);
    }
    slots_[i] = merge;
  }
}

const Merge* MergeTable::find(int32_t left, int32_t right) const {
  if (slots_.empty()) return nullptr;
  for (size_t i = slot(left, right); slots_[i].left != -1; i = (i + 1) & (slots_.size() - 1)) {
    if (slots_[i].left == left && slots_[i].right == right) return &slots_[i];
  }
  return nullptr;
}

void Bpe::first_symbols(std::string_view word, Scratch* scratch) const {
  std::vector<Scratch::Symbol>& symbols = scratch->symbols;
  symbols.clear();
  const auto push = [&](int32_t id) {
    const auto at = static_cast<int32_t>(symbols.size());
    symbols.push_back({id, at - 1, at + 1, -1, -1});
  };
  int32_t pending = -1;  // an unknown symbol, not yet pushed since the next may be fused with it
  while (!word.empty()) {
    const size_t length = bytes ? 1 : std::max<size_t>(1, utf8_length(word));
    const std::string_view character = word.substr(0, length);
    word.remove_prefix(length);
    const int32_t id =
        bytes ? byte_ids[static_cast<unsigned char>(character[0])] : ids.find(character);
    if (id >= 0) {
      if (pending >= 0) push(pending);
      pending = -1;
      push(id);
      continue;
    }
    const auto known = [&](char c) { return byte_ids[static_cast<unsigned char>(c)] >= 0; };
    if (byte_fallback && std::all_of(character.begin(), character.end(), known)) {
      for (char c : character) push(byte_ids[static_cast<unsigned char>(c)]);
      continue;
    }
    if (pending >= 0 && !fuse_unknown) push(pending);
    pending = unknown;
  }
  if (pending >= 0) push(pending);
}

// Looks up the merge of the symbol at `at` with the next one, and puts it on the heap if there is
// one.
void Bpe::look_up(int32_t at, Scratch* scratch) const {
  Scratch::Symbol& symbol = scratch->symbols[static_cast<size_t>(at)];
  const auto next = static_cast<size_t>(symbol.next);
  const Merge* found =
      next < scratch->symbols.size() ? merges.find(symbol.id, scratch->symbols[next].id) : nullptr;
  symbol.rank = found == nullptr ? -1 : found->rank;
  if (found == nullptr) return;
  symbol.result = found->result;
  scratch->heap.push_back(uint64_t{static_cast<uint32_t>(found->rank)} << 32 |
                          static_cast<uint32_t>(at));
}

// Does all merges, those of the lowest rank first and of equal ranks the leftmost. A heap has 8
// bytes for each possible merge: its rank and the place of its left symbol. An entry is stale, and
// is skipped, if the symbol at its place has another rank by now.
void Bpe::merge(Scratch* scratch) const {
  std::vector<Scratch::Symbol>& symbols = scratch->symbols;
  std::vector<uint64_t>& heap = scratch->heap;
  heap.clear();
  const auto size = static_cast<int32_t>(symbols.size());
  for (int32_t i = 0; i + 1 < size; ++i) look_up(i, scratch);
  std::make_heap(heap.begin(), heap.end(), std::greater<>());
  const auto renew = [&](int32_t at) {
    const size_t before = heap.size();
    look_up(at, scratch);
    if (heap.size() > before) std::push_heap(heap.begin(), heap.end(), std::greater<>());
  };
  while (!heap.empty()) {
    const auto at = static_cast<int32_t>(heap.front() & UINT32_MAX);
    const auto rank = static_cast<int32_t>(heap.front() >> 32);
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    heap.pop_back();
    Scratch::Symbol& left = symbols[static_cast<size_t>(at)];
    if (left.rank != rank) continue;
    Scratch::Symbol& right = symbols[static_cast<size_t>(left.next)];
    left.id = left.result;
    left.next = right.next;
    right.rank = -1;
    if (left.next < size) symbols[static_cast<size_t>(left.next)].previous = at;
    if (left.previous >= 0) renew(left.previous);
    renew(at);
  }
}

void Bpe::encode(std::string_view word, Scratch* scratch, std::vector<int32_t>* out) const {
  if (ignore_merges) {
    if (const int32_t id = ids.find(word); id >= 0) {
      out->push_back(id);
      return;
    }
  }
  first_symbols(word, scratch);
  const auto& symbols = scratch->symbols;
  if (symbols.size() > 1) merge(scratch);
  for (size_t i = 0; i < symbols.size(); i = static_cast<size_t>(symbols[i].next)) {
    out->push_back(symbols[i].id);
  }
}

Status merges_from_scores(const Bpe& bpe, const std::vector<float>& scores,
                          std::vector<Merge>* merges) {
  // Equal scores get the same rank, so that the leftmost pair goes first, as in SentencePiece.
  std::vector<float> order;
  bpe.ids.each(
      [&](std::string_view, int32_t id) { order.push_back(scores[static_cast<size_t>(id)]); });
  std::sort(order.begin(), order.end(), std::greater<float>());
  order.erase(std::unique(order.begin(), order.end()), order.end());
  Status status;
  bpe.ids.each([&](std::string_view text, int32_t id) {
    if (text.size() > kMaxScoredToken) {
      status =
          invalid("token " + std::to_string(id) + ": expected at most " +
                  std::to_string(kMaxScoredToken) + " bytes, got " + std::to_string(text.size()));
    }
    if (!status.ok()) return;
    const float score = scores[static_cast<size_t>(id)];
    const auto place = std::lower_bound(order.begin(), order.end(), score, std::greater<float>());
    const int32_t rank = static_cast<int32_t>(place - order.begin());
    for (size_t cut = 1; cut < text.size(); ++cut) {
      const int32_t left = bpe.ids.find(text.substr(0, cut));
      const int32_t right = left < 0 ? -1 : bpe.ids.find(text.substr(cut));
      if (right >= 0) merges->push_back({left, right, id, rank});
    }
  });
  return status;
}

}  // namespace fk::model
