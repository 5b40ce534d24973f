// Writes text for people to read. The text comes from models, files and arguments, and must not
// control the terminal: on a terminal, control characters except newline and tab, and bytes that
// are not UTF-8, are shown as \x1B and the like. Into a pipe or a file goes every byte as it is.
#pragma once

#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace fk::cli {

// Returns a text in the form in which it may be written to that stream.
std::string shown(std::FILE* stream, std::string_view text);
// Does the same for a JSON document, in such a way that it stays valid JSON. With an `indent` of -1
// it is one line.
std::string shown_json(std::FILE* stream, const nlohmann::json& json, int indent = -1);

// Writes "fk generate: what went wrong" as a line to stderr, for command "generate"; for "" it is
// "fk: what went wrong".
void complain(const std::string& command, std::string_view message);

// Runs the program's work and returns its exit status. An exception becomes a message; only the one
// for exhausted memory is expected.
int to_the_end(const std::function<int()>& work);

// Writes a text to stdout piece by piece, each at once. A piece may end inside a character; a
// terminal gets that character when it is complete.
class TextOut {
 public:
  // Returns false if writing failed, which main() reports.
  bool write(std::string_view piece);
  // Writes the beginning of a character that never ended.
  bool finish();

 private:
  std::string begun_;  // the first bytes of a character
};

}  // namespace fk::cli
