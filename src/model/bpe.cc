#include "model/bpe.h"

#include <algorithm>
#include <queue>

#include "model/unicode.h"

namespace fk::model {
namespace {

// Longer tokens come only from files made to waste time: every split of each is looked up.
constexpr size_t kMaxScoredToken = 256;

// A candidate for merging. It is stale where the symbols at its place have changed since.
struct Candidate {
  int32_t rank, at, left, right, result;
};
struct Later {
  bool operator()(const Candidate& a, const Candidate& b) const {
    return a.rank != b.rank ? a.rank > b.rank : a.at > b.at;
  }
};

}  // namespace

size_t MergeTable::slot(int32_t left, int32_t right) const {
  const uint64_t key = uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  return static_cast<size_t>((key * 0x9E3779B97F4A7C15u) >> 20) & (slots_.size() - 1);
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

int32_t Bpe::find(std::string_view text) const {
  const auto found = ids.find(std::string(text));
  return found == ids.end() ? -1 : found->second;
}

void Bpe::first_symbols(std::string_view word, std::vector<int32_t>* symbols) const {
  int32_t pending = -1;  // an unknown one that may grow
  while (!word.empty()) {
    const size_t length = bytes ? 1 : std::max<size_t>(1, utf8_length(word));
    const std::string_view character = word.substr(0, length);
    word.remove_prefix(length);
    const int32_t id = bytes ? byte_ids[static_cast<unsigned char>(character[0])] : find(character);
    if (id >= 0) {
      if (pending >= 0) symbols->push_back(pending);
      pending = -1;
      symbols->push_back(id);
      continue;
    }
    const auto known = [&](char c) { return byte_ids[static_cast<unsigned char>(c)] >= 0; };
    if (byte_fallback && std::all_of(character.begin(), character.end(), known)) {
      for (char c : character) symbols->push_back(byte_ids[static_cast<unsigned char>(c)]);
      continue;
    }
    if (pending >= 0 && !fuse_unknown) symbols->push_back(pending);
    pending = unknown;
  }
  if (pending >= 0) symbols->push_back(pending);
}

void Bpe::merge(std::vector<int32_t>* symbols) const {
  const int32_t size = static_cast<int32_t>(symbols->size());
  std::vector<int32_t>& ids_at = *symbols;  // -1 once merged away
  std::vector<int32_t> previous(ids_at.size()), next(ids_at.size());
  std::priority_queue<Candidate, std::vector<Candidate>, Later> queue;
  const auto propose = [&](int32_t at) {
    if (at < 0 || next[at] >= size) return;
    const int32_t left = ids_at[at], right = ids_at[next[at]];
    if (const Merge* merge = merges.find(left, right)) {
      queue.push({merge->rank, at, left, right, merge->result});
    }
  };
  for (int32_t i = 0; i < size; ++i) {
    previous[i] = i - 1;
    next[i] = i + 1;
  }
  for (int32_t i = 0; i + 1 < size; ++i) propose(i);
  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    const int32_t right = next[best.at];
    if (ids_at[best.at] != best.left || right >= size || ids_at[right] != best.right) continue;
    ids_at[best.at] = best.result;
    ids_at[right] = -1;
    next[best.at] = next[right];
    if (next[right] < size) previous[next[right]] = best.at;
    propose(previous[best.at]);
    propose(best.at);
  }
  ids_at.erase(std::remove(ids_at.begin(), ids_at.end(), -1), ids_at.end());
}

void Bpe::encode(std::string_view word, std::vector<int32_t>* out) const {
  if (ignore_merges) {
    if (const int32_t id = find(word); id >= 0) {
      out->push_back(id);
      return;
    }
  }
  std::vector<int32_t> symbols;
  first_symbols(word, &symbols);
  if (symbols.size() > 1) merge(&symbols);
  out->insert(out->end(), symbols.begin(), symbols.end());
}

Status merges_from_scores(const Bpe& bpe, const std::vector<float>& scores,
                          std::vector<Merge>* merges) {
  // Equal scores have one rank: then the leftmost pair goes first, as in SentencePiece.
  std::vector<float> order;
  for (const auto& [text, id] : bpe.ids) order.push_back(scores[static_cast<size_t>(id)]);
  std::sort(order.begin(), order.end(), std::greater<float>());
  order.erase(std::unique(order.begin(), order.end()), order.end());
  for (const auto& [text, id] : bpe.ids) {
    if (text.size() > kMaxScoredToken) {
      return invalid("token " + std::to_string(id) + ": expected at most " +
                     std::to_string(kMaxScoredToken) + " bytes, got " +
                     std::to_string(text.size()));
    }
    const float score = scores[static_cast<size_t>(id)];
    const auto place = std::lower_bound(order.begin(), order.end(), score, std::greater<float>());
    const int32_t rank = static_cast<int32_t>(place - order.begin());
    for (size_t cut = 1; cut < text.size(); ++cut) {
      const int32_t left = bpe.find(std::string_view(text).substr(0, cut));
      if (left < 0) continue;
      const int32_t right = bpe.find(std::string_view(text).substr(cut));
      if (right >= 0) merges->push_back({left, right, id, rank});
    }
  }
  return {};
}

}  // namespace fk::model
