#include "core/printable.h"

#include <algorithm>
#include <cstdint>

#include "core/utf8.h"

namespace fk {
namespace {

void escape(std::string_view bytes, std::string* out) {
  static constexpr char kDigits[] = "0123456789ABCDEF";
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    out->append({'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]});
  }
}

// Tells whether a terminal does something else than to show the character.
bool obeyed(uint32_t c) {
  return c < 0x20 || (c >= 0x7F && c < 0xA0) ||                           // controls: C0, DEL, C1
         c == 0x61C || c == 0x200E || c == 0x200F ||                      // marks of direction
         (c >= 0x202A && c <= 0x202E) || (c >= 0x2066 && c <= 0x2069) ||  // embeddings, isolates
         c == 0x2028 || c == 0x2029;  // separators of lines, paragraphs
}

}  // namespace

std::string printable(std::string_view text, std::string_view kept) {
  const bool plain =
      std::all_of(text.begin(), text.end(), [](char c) { return c >= 0x20 && c < 0x7F; });
  if (plain) return std::string(text);
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    size_t length = utf8_length(text);
    const bool valid = length > 0;
    if (!valid) length = utf8_invalid_length(text);
    const std::string_view character = text.substr(0, length);
    const bool keeps = length == 1 && kept.find(character[0]) != std::string_view::npos;
    if (keeps || (valid && !obeyed(utf8_decode(character)))) {
      out += character;
    } else {
      escape(character, &out);
    }
    text.remove_prefix(length);
  }
  return out;
}

}  // namespace fk
