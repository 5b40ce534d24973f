// Finds tokens in a text: Aho and Corasick's automaton. Memory and the time to build it grow with
// the tokens' bytes, the time to search with the text's, whatever the tokens are.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fk::model {

class TokenSearch {
 public:
  // Empty tokens are never found; of equal ones the first is.
  void build(const std::vector<std::string>& tokens);
  bool empty() const { return nodes_.empty(); }

  struct Found {
    uint32_t begin;
    uint32_t token;  // its index
  };
  // For each place of `text` where tokens begin, the longest of them; the last place first. The
  // text is shorter than 4 GiB.
  void find(std::string_view text, std::vector<Found>* found) const;

 private:
  // The automaton reads the text from its end, and so do its paths the tokens: then a node is what
  // follows a place, and all tokens that begin there are on its chain of fallbacks.
  struct Node {
    uint32_t first_child = 0;  // children stand together, by their bytes
    uint32_t fallback = 0;     // the longest beginning of a path that this node's path ends with
    int32_t token = -1;        // the longest one that is read here
    uint16_t children = 0;
    uint8_t byte = 0;  // that leads here
  };

  uint32_t child(uint32_t node, uint8_t byte) const;  // 0 where there is none
  uint32_t next(uint32_t node, uint8_t byte) const;

  std::vector<Node> nodes_;            // level by level; 0 is the root
  std::array<uint32_t, 256> at_root_;  // children of the root by byte
};

}  // namespace fk::model
