// This file computes canonical decompositions and compositions, with tables from the Unicode
// database.
#include "model/unicode.h"

#include <algorithm>
#include <cstddef>
#include <unordered_map>
#include <vector>

namespace fk::model {
namespace {

// Describes a run of characters that have the same combining class.
struct CombiningRun {
  uint32_t first, last;
  uint8_t combining_class;
};
// Holds a character and the one or two that it decomposes to; `second` is 0 if there is one.
struct Decomposition {
  uint32_t composed, first, second;
  bool composes;  // false if the two do not compose again (a composition exclusion)
};

#include "model/unicode_tables.inc"

// Hangul syllables are computed, not looked up: these are the first syllable and its parts' codes.
constexpr uint32_t kHangul = 0xAC00, kLead = 0x1100, kVowel = 0x1161, kTrail = 0x11A7;
constexpr uint32_t kLeads = 19, kVowels = 21, kTrails = 28;
constexpr uint32_t kHanguls = kLeads * kVowels * kTrails;

const Decomposition* find_decomposition(uint32_t c) {
  const auto found =
      std::lower_bound(std::begin(kDecompositions), std::end(kDecompositions), c,
                       [](const Decomposition& d, uint32_t value) { return d.composed < value; });
  return found != std::end(kDecompositions) && found->composed == c ? found : nullptr;
}

uint8_t combining_class(uint32_t c) {
  if (c < kCombining[0].first) return 0;
  const auto found =
      std::lower_bound(std::begin(kCombining), std::end(kCombining), c,
                       [](const CombiningRun& run, uint32_t value) { return run.last < value; });
  return found != std::end(kCombining) && found->first <= c ? found->combining_class : 0;
}

// Appends a character's full decomposition.
void decompose(uint32_t c, std::vector<uint32_t>* out) {
  if (c - kHangul < kHanguls) {
    const uint32_t index = c - kHangul;
    out->push_back(kLead + index / (kVowels * kTrails));
    out->push_back(kVowel + index / kTrails % kVowels);
    if (index % kTrails != 0) out->push_back(kTrail + index % kTrails);
    return;
  }
  const Decomposition* found = c < 0xC0 ? nullptr : find_decomposition(c);
  if (found == nullptr) {
    out->push_back(c);
    return;
  }
  decompose(found->first, out);
  if (found->second != 0) decompose(found->second, out);
}

// Returns the character that two compose to, or 0 if there is none.
uint32_t compose(uint32_t a, uint32_t b) {
  if (a - kLead < kLeads && b - kVowel < kVowels) {
    return kHangul + ((a - kLead) * kVowels + (b - kVowel)) * kTrails;
  }
  if (a - kHangul < kHanguls && (a - kHangul) % kTrails == 0 && b - kTrail - 1 < kTrails - 1) {
    return a + (b - kTrail);
  }
  static const auto* pairs = [] {
    auto* table = new std::unordered_map<uint64_t, uint32_t>;
    for (const Decomposition& d : kDecompositions) {
      if (d.composes) table->emplace(uint64_t{d.first} << 32 | d.second, d.composed);
    }
    return table;
  }();
  const auto found = pairs->find(uint64_t{a} << 32 | b);
  return found == pairs->end() ? 0 : found->second;
}

}  // namespace

bool is_white_space(uint32_t c) {
  return (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

std::string nfc(std::string_view text) {
  // No character below U+0300 combines with another one or changes, and 0xCC is the first byte of
  // U+0300.
  const bool unchanged = std::all_of(text.begin(), text.end(),
                                     [](char c) { return static_cast<unsigned char>(c) < 0xCC; });
  if (unchanged) return std::string(text);
  std::vector<uint32_t> all;
  while (!text.empty()) {
    const size_t length = utf8_length(text);
    decompose(utf8_decode(text.substr(0, length)), &all);
    text.remove_prefix(length);
  }
  // The combining class is kept in the bits above the character, so that it is looked up once.
  constexpr uint32_t kClassShift = 24, kCharacter = (1u << kClassShift) - 1;
  const auto class_of = [](uint32_t c) { return static_cast<int>(c >> kClassShift); };
  for (uint32_t& c : all) c |= uint32_t{combining_class(c)} << kClassShift;
  // Sorts the marks between two starters (characters of class 0) by their classes.
  const auto before = [&](uint32_t a, uint32_t b) { return class_of(a) < class_of(b); };
  for (auto begin = all.begin(); begin != all.end();) {
    const auto is_starter = [&](uint32_t c) { return class_of(c) == 0; };
    begin = std::find_if_not(begin, all.end(), is_starter);
    const auto end = std::find_if(begin, all.end(), is_starter);
    if (!std::is_sorted(begin, end, before)) std::stable_sort(begin, end, before);
    begin = end;
  }
  // A mark joins the last starter unless one of its class or higher stands between them.
  std::vector<uint32_t> joined;
  size_t starter = SIZE_MAX;
  int last_class = -1;  // the class of the last mark after the starter; -1: there is none
  for (const uint32_t mark : all) {
    const int k = class_of(mark);
    const uint32_t c = mark & kCharacter;
    if (starter != SIZE_MAX && last_class < k) {
      if (const uint32_t pair = compose(joined[starter], c); pair != 0) {
        joined[starter] = pair;
        continue;
      }
    }
    if (k == 0) {
      starter = joined.size();
      last_class = -1;
    } else {
      last_class = k;
    }
    joined.push_back(c);
  }
  std::string out;
  for (uint32_t c : joined) utf8_append(c, &out);
  return out;
}

}  // namespace fk::model
