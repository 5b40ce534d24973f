// Writes what people read. Text comes from models, files and arguments: a
// terminal shows control characters and bytes that are no UTF-8 as \x1B, and obeys none; newline
// and tab stay. Into a pipe or a file goes every byte as it is.
#pragma once

#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace fk::cli {

// Makes a text what that stream should have.
std::string shown(std::FILE* stream, std::string_view text);
// Does the same to a JSON document, which stays one.
std::string shown_json(std::FILE* stream, const nlohmann::json& json, int indent = -1);

// Writes a line to stderr: "fk generate: what went wrong".
void complain(const std::string& command, std::string_view message);

// Writes text to stdout at once, in pieces that may end inside a character.
class TextOut {
 public:
  // Returns false where writing failed, which main() reports.
  bool write(std::string_view piece);
  // Writes what is left of a character that never ended.
  bool finish();

 private:
  std::string begun_;  // the first bytes of a character
};

}  // namespace fk::cli
