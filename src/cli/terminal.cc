// Writes text so that a terminal cannot be controlled by it.
#include "cli/terminal.h"

#include <unistd.h>

#include <exception>
#include <new>

#include "core/printable.h"
#include "core/utf8.h"
#include "model/json.h"

namespace fk::cli {
namespace {

bool is_terminal(std::FILE* stream) { return isatty(fileno(stream)) != 0; }

// Writes to stdout and flushes; returns whether that worked.
bool write_now(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  return std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
}

// Returns how many bytes at the end of `text` begin a character that the next piece may complete.
size_t unfinished(std::string_view text) {
  for (size_t n = 1; n < 4 && n <= text.size(); ++n) {
    if (utf8_incomplete(text.substr(text.size() - n))) return n;
  }
  return 0;
}

}  // namespace

std::string shown(std::FILE* stream, std::string_view text) {
  return is_terminal(stream) ? printable(text, "\n\t") : std::string(text);
}

std::string shown_json(std::FILE* stream, const nlohmann::json& json, int indent) {
  if (!is_terminal(stream)) return model::dump(json, indent);
  return json.dump(indent, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
}

void complain(const std::string& command, std::string_view message) {
  const std::string name = command.empty() ? "fk: " : "fk " + command + ": ";
  const std::string line = shown(stderr, name + std::string(message));
  std::fprintf(stderr, "%s\n", line.c_str());
}

int to_the_end(const std::function<int()>& work) {
  try {
    try {
      return work();
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::exception& e) {
      complain("", e.what());
    }
  } catch (const std::bad_alloc&) {
    std::fputs("fk: out of memory\n", stderr);
  }
  return 1;
}

bool TextOut::write(std::string_view piece) {
  if (!is_terminal(stdout)) return write_now(std::string(piece));
  begun_ += piece;
  const size_t whole = begun_.size() - unfinished(begun_);
  const bool written = write_now(shown(stdout, std::string_view(begun_).substr(0, whole)));
  begun_.erase(0, whole);
  return written;
}

bool TextOut::finish() {
  const std::string rest = shown(stdout, begun_);
  begun_.clear();
  return write_now(rest);
}

}  // namespace fk::cli
