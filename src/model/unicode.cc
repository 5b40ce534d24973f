#include "model/unicode.h"

#include <algorithm>
#include <cstddef>
#include <unordered_map>
#include <vector>

namespace fk::model {
namespace {

struct CombiningRun {
  uint32_t first, last;
  uint8_t combining_class;
};
struct Decomposition {
  uint32_t composed, first, second;
  bool composes;  // false: a composition exclusion
};

#include "model/unicode_tables.inc"

unsigned char byte_at(std::string_view text, size_t i) {
  return static_cast<unsigned char>(text[i]);
}

// How many bytes at the front agree with some character's encoding, and that character's length
// (0 where not even the first agrees).
size_t matching_bytes(std::string_view text, size_t* length) {
  const unsigned char lead = byte_at(text, 0);
  unsigned char low = 0x80, high = 0xBF;  // of the second byte
  *length = 0;
  if (lead < 0x80) {
    *length = 1;
    return 1;
  }
  if (lead >= 0xC2 && lead <= 0xDF) {
    *length = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    *length = 3;
    if (lead == 0xE0) low = 0xA0;   // no shorter encoding
    if (lead == 0xED) high = 0x9F;  // no surrogate
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    *length = 4;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;  // not past U+10FFFF
  } else {
    return 0;
  }
  size_t i = 1;
  for (; i < *length && i < text.size(); ++i) {
    const unsigned char c = byte_at(text, i);
    if (c < low || c > high) break;
    low = 0x80;
    high = 0xBF;
  }
  return i;
}

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

// The character that two compose to, 0 where there is none.
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

size_t utf8_length(std::string_view text) {
  size_t length;
  const size_t matching = matching_bytes(text, &length);
  return matching == length ? length : 0;
}

size_t utf8_invalid_length(std::string_view text) {
  size_t length;
  return std::max<size_t>(1, matching_bytes(text, &length));
}

bool utf8_incomplete(std::string_view text) {
  if (text.empty()) return false;
  size_t length;
  const size_t matching = matching_bytes(text, &length);
  return matching == text.size() && matching < length;
}

uint32_t utf8_decode(std::string_view character) {
  const uint32_t lead = byte_at(character, 0);
  if (character.size() == 1) return lead;
  uint32_t c = lead & (0x7Fu >> character.size());
  for (size_t i = 1; i < character.size(); ++i) c = c << 6 | (byte_at(character, i) & 0x3F);
  return c;
}

void utf8_append(uint32_t c, std::string* text) {
  const auto tail = [&](int shift) { *text += static_cast<char>(0x80 | (c >> shift & 0x3F)); };
  if (c < 0x80) {
    *text += static_cast<char>(c);
  } else if (c < 0x800) {
    *text += static_cast<char>(0xC0 | c >> 6);
    tail(0);
  } else if (c < 0x10000) {
    *text += static_cast<char>(0xE0 | c >> 12);
    tail(6);
    tail(0);
  } else {
    *text += static_cast<char>(0xF0 | c >> 18);
    tail(12);
    tail(6);
    tail(0);
  }
}

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const size_t length = utf8_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

std::string to_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const size_t length = utf8_length(text);
    if (length > 0) {
      out += text.substr(0, length);
      text.remove_prefix(length);
    } else {
      out += kReplacement;
      text.remove_prefix(utf8_invalid_length(text));
    }
  }
  return out;
}

bool is_white_space(uint32_t c) {
  return (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

std::string nfc(std::string_view text) {
  // Nothing below U+0300 combines with or changes into anything.
  const bool plain = std::all_of(text.begin(), text.end(),
                                 [](char c) { return static_cast<unsigned char>(c) < 0xCC; });
  if (plain) return std::string(text);
  std::vector<uint32_t> all;
  while (!text.empty()) {
    const size_t length = utf8_length(text);
    decompose(utf8_decode(text.substr(0, length)), &all);
    text.remove_prefix(length);
  }
  // Marks between two starters in the order of their classes.
  for (size_t i = 0; i < all.size();) {
    if (combining_class(all[i]) == 0) {
      ++i;
      continue;
    }
    size_t end = i + 1;
    while (end < all.size() && combining_class(all[end]) != 0) ++end;
    std::stable_sort(all.begin() + static_cast<std::ptrdiff_t>(i),
                     all.begin() + static_cast<std::ptrdiff_t>(end), [](uint32_t a, uint32_t b) {
                       return combining_class(a) < combining_class(b);
                     });
    i = end;
  }
  // A mark joins the last starter unless one of its class or higher stands between them.
  std::vector<uint32_t> joined;
  size_t starter = SIZE_MAX;
  int last_class = -1;  // of what stands after the starter; -1: nothing
  for (uint32_t c : all) {
    const int k = combining_class(c);
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
