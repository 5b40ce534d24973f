#include "core/json_text.h"

#include <charconv>
#include <cmath>
#include <cstdio>

#include "core/utf8.h"

namespace fk {

void append_json(std::string& json, std::string_view text) {
  json += '"';
  while (!text.empty()) {
    const size_t length = utf8_length(text);
    const auto first = static_cast<unsigned char>(text[0]);
    if (length == 0) {
      json += kReplacement;
      text.remove_prefix(utf8_invalid_length(text));
      continue;
    }
    if (first == '"' || first == '\\') {
      json += '\\';
      json += text[0];
    } else if (first < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", first);
      json += escaped;
    } else {
      json += text.substr(0, length);
    }
    text.remove_prefix(length);
  }
  json += '"';
}

// Writes a number, whatever the locale. With neither point nor exponent it would be read as an
// integer.
void append_json(std::string& json, double number) {
  if (!std::isfinite(number)) {
    json += std::isnan(number) ? "null" : number > 0 ? "1e999" : "-1e999";
    return;
  }
  char text[40];
  const std::string_view digits(
      text, static_cast<size_t>(std::to_chars(text, text + sizeof text, number).ptr - text));
  json += digits;
  if (digits.find_first_of(".e") == std::string_view::npos) json += ".0";
}

}  // namespace fk
