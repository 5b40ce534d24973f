// Finds all tokens of a set in a text, with Aho and Corasick's automaton. The memory and the time
// to build it grow with the tokens' bytes, and the time to search with the text's, whatever the
// tokens are.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fk::model {

class TokenSearch {
 public:
  // Builds the automaton. Empty tokens are never found, and of equal ones the first is.
  void build(const std::vector<std::string>& tokens);
  bool empty() const { return nodes_.empty(); }

  struct Found {
    uint32_t begin;  // where it begins in the text
    uint32_t token;  // its index in the vector given to `build`
  };
  // Sets *found to the longest token at each place of `text` where tokens begin, the last place
  // first. The text is shorter than 4 GiB.
  void find(std::string_view text, std::vector<Found>* found) const;

 private:
  // The automaton reads texts and tokens from their ends. So the node it is in at some place of the
  // text stands for the bytes that follow that place, and all tokens that begin there are on the
  // node's chain of fallbacks.
  struct Node {
    uint32_t first_child = 0;  // the children follow one another, ordered by their bytes
    uint32_t fallback = 0;     // the node of the longest path that this node's path ends with
    int32_t token = -1;        // the longest token that is complete here; -1: none
    uint16_t children = 0;     // how many there are
    uint8_t byte = 0;          // the byte that leads here from the parent
  };

  // Returns a node's child for a byte, or 0 if there is none.
  uint32_t child(uint32_t node, uint8_t byte) const;
  // Returns the node that the automaton is in after reading a byte.
  uint32_t next(uint32_t node, uint8_t byte) const;

  std::vector<Node> nodes_;            // ordered by level; number 0 is the root
  std::array<uint32_t, 256> at_root_;  // children of the root by byte
};

}  // namespace fk::model
