// Maps strings to numbers, for tokens. The strings lie one after the other in one block, and a
// lookup copies nothing. The hash uses a secret of the process, so that no file can choose strings
// whose hashes collide.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fk::model {

// Returns a random number that nobody outside the process knows, the same at every call.
uint64_t hash_secret();

// Mixes two numbers into one: the two halves of their product.
inline uint64_t mix(uint64_t a, uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

class StringTable {
 public:
  // Makes room for that many strings.
  void reserve(size_t strings);
  // Sets the string's number, in place of an earlier one if it has one.
  void set(std::string_view text, int32_t value);
  // Returns the string's number, or -1 if it has none.
  int32_t find(std::string_view text) const;
  bool empty() const { return entries_.empty(); }

  // Calls function(text, value) for each string, in the order in which they were first set.
  template <class Function>
  void each(const Function& function) const {
    for (const Entry& e : entries_) function(text_of(e), e.value);
  }

 private:
  struct Entry {
    size_t begin;
    uint32_t bytes;
    uint32_t hash;
    int32_t value;
  };

  std::string_view text_of(const Entry& e) const {
    return std::string_view(block_).substr(e.begin, e.bytes);
  }
  size_t slot_of(std::string_view text, uint32_t hash) const;
  void grow(size_t slots);

  std::string block_;
  std::vector<Entry> entries_;
  std::vector<uint32_t> slots_;  // a power of two of them: an entry's index plus 1, or 0 if empty
};

}  // namespace fk::model
