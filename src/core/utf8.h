// Reads UTF-8: tells characters from what is none, and from what may yet become one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace fk {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// Gives the length of the character at the front of `text` (not empty), 0 where it is not valid
// UTF-8.
size_t utf8_length(std::string_view text);
// Tells for how many bytes at the front of `text`, where it is not valid, U+FFFD stands: the
// longest beginning of a character, or one byte (Unicode's "maximal subpart").
size_t utf8_invalid_length(std::string_view text);
// Tells whether all of `text` is the beginning of a character that more bytes could complete.
bool utf8_incomplete(std::string_view text);
uint32_t utf8_decode(std::string_view character);  // one valid character
void utf8_append(uint32_t code_point, std::string* text);

bool is_utf8(std::string_view text);
// Returns `text` with U+FFFD for what is not UTF-8.
std::string to_utf8(std::string_view text);

}  // namespace fk
