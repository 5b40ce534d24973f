#include "core/utf8.h"

#include <algorithm>

namespace fk {
namespace {

unsigned char byte_at(std::string_view text, size_t i) {
  return static_cast<unsigned char>(text[i]);
}

// Counts the bytes at the front that agree with some character's encoding, and gives that
// character's length (0 where not even the first agrees).
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

}  // namespace fk
