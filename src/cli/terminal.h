// What the program writes for people to read. Text comes from models, files and arguments: a
// terminal shows control characters and bytes that are no UTF-8 as \x1B, and obeys none; newline
// and tab stay. Into a pipe or a file goes every byte as it is.
#pragma once

#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace fk::cli {

// A text as that stream should have it.
std::string shown(std::FILE* stream, std::string_view text);
// The same of a JSON document, which stays one.
std::string shown_json(std::FILE* stream, const nlohmann::json& json, int indent = -1);

// "fk generate: what went wrong", a line on stderr.
void complain(const std::string& command, std::string_view message);

// Text on its way to stdout, at once, in pieces that may end inside a character.
class TextOut {
 public:
  // False: that failed, which main() reports.
  bool write(std::string_view piece);
  // What is left of a character that never ended.
  bool finish();

 private:
  std::string begun_;  // the first bytes of a character
};

}  // namespace fk::cli
