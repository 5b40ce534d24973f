// Numbers by strings, for tokens: strings lie one after the other in one block, and are looked up
// without a copy. The hash has a secret of the process, so that no file can choose strings that all
// meet in one place.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fk::model {

// A number that nobody outside the process knows.
uint64_t hash_secret();

inline uint64_t mix(uint64_t a, uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

class StringTable {
 public:
  void reserve(size_t strings);
  void set(std::string_view text, int32_t value);  // over an earlier one
  int32_t find(std::string_view text) const;       // -1 where it is not there
  bool empty() const { return entries_.empty(); }

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
  std::vector<uint32_t> slots_;  // a power of two; an entry's index and 1, or 0
};

}  // namespace fk::model
