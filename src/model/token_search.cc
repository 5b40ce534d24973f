// Builds the automaton breadth first from the sorted tokens, and runs it over texts.
#include "model/token_search.h"

#include <algorithm>
#include <deque>

namespace fk::model {
namespace {

// Returns whether a comes before b when both are read from their ends.
bool reads_before(std::string_view a, std::string_view b) {
  return std::lexicographical_compare(
      a.rbegin(), a.rend(), b.rbegin(), b.rend(),
      [](char x, char y) { return static_cast<uint8_t>(x) < static_cast<uint8_t>(y); });
}

}  // namespace

void TokenSearch::build(const std::vector<std::string>& tokens) {
  nodes_.clear();
  at_root_.fill(0);
  std::vector<uint32_t> order;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (!tokens[i].empty()) order.push_back(static_cast<uint32_t>(i));
  }
  if (order.empty()) return;
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return reads_before(tokens[a], tokens[b]); });

  // A node stands for a range of tokens in that order, whose last `depth` bytes are the same.
  // `open` has the nodes whose children are not yet made.
  struct Range {
    uint32_t node, begin, end, depth;
  };
  std::deque<Range> open = {{0, 0, static_cast<uint32_t>(order.size()), 0}};
  std::vector<int32_t> own(1, -1);  // the token that ends at a node
  std::vector<uint32_t> parent(1, 0);
  nodes_.emplace_back();
  for (; !open.empty(); open.pop_front()) {
    Range range = open.front();
    while (range.begin < range.end && tokens[order[range.begin]].size() == range.depth) {
      int32_t& token = own[range.node];
      if (token < 0) token = static_cast<int32_t>(order[range.begin]);
      ++range.begin;
    }
    nodes_[range.node].first_child = static_cast<uint32_t>(nodes_.size());
    for (uint32_t begin = range.begin; begin < range.end;) {
      const auto byte_at = [&](uint32_t i) {
        const std::string& token = tokens[order[i]];
        return static_cast<uint8_t>(token[token.size() - 1 - range.depth]);
      };
      uint32_t end = begin + 1;
      while (end < range.end && byte_at(end) == byte_at(begin)) ++end;
      const auto node = static_cast<uint32_t>(nodes_.size());
      nodes_.emplace_back();
      nodes_.back().byte = byte_at(begin);
      own.push_back(-1);
      parent.push_back(range.node);
      ++nodes_[range.node].children;
      if (range.node == 0) at_root_[byte_at(begin)] = node;
      open.push_back({node, begin, end, range.depth + 1});
      begin = end;
    }
  }
  nodes_.shrink_to_fit();
  // Nodes are ordered by level, and a fallback is on an earlier level, so it is complete already.
  for (uint32_t node = 1; node < nodes_.size(); ++node) {
    Node& n = nodes_[node];
    if (parent[node] != 0) n.fallback = next(nodes_[parent[node]].fallback, n.byte);
    n.token = own[node] >= 0 ? own[node] : nodes_[n.fallback].token;
  }
}

uint32_t TokenSearch::child(uint32_t node, uint8_t byte) const {
  if (node == 0) return at_root_[byte];
  const Node& n = nodes_[node];
  const auto begin = nodes_.begin() + n.first_child, end = begin + n.children;
  if (n.children == 1) return begin->byte == byte ? n.first_child : 0;
  const auto found =
      std::lower_bound(begin, end, byte, [](const Node& c, uint8_t b) { return c.byte < b; });
  return found != end && found->byte == byte ? static_cast<uint32_t>(found - nodes_.begin()) : 0;
}

uint32_t TokenSearch::next(uint32_t node, uint8_t byte) const {
  for (;; node = nodes_[node].fallback) {
    if (const uint32_t found = child(node, byte); found != 0 || node == 0) return found;
  }
}

void TokenSearch::find(std::string_view text, std::vector<Found>* found) const {
  found->clear();
  if (nodes_.empty()) return;
  uint32_t node = 0;
  for (size_t at = text.size(); at-- > 0;) {
    node = next(node, static_cast<uint8_t>(text[at]));
    if (nodes_[node].token >= 0) {
      found->push_back({static_cast<uint32_t>(at), static_cast<uint32_t>(nodes_[node].token)});
    }
  }
}

}  // namespace fk::model
