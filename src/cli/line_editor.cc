// Reads keys, edits the line, and redraws it.
#include "cli/line_editor.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <iostream>

#include "core/printable.h"
#include "core/utf8.h"

namespace fk::cli {
namespace {

// So many lines of the history file are used.
constexpr size_t kMostLines = 1000;

// While an object of this class lives, the terminal passes on keys as they come, without echo.
class RawTerminal {
 public:
  RawTerminal() {
    tcgetattr(STDIN_FILENO, &before_);
    termios raw = before_;
    raw.c_lflag &= ~static_cast<tcflag_t>(ECHO | ICANON | ISIG | IEXTEN);
    raw.c_iflag &= ~static_cast<tcflag_t>(IXON | ICRNL);
    raw.c_cc[VMIN] = 1;
    raw.c_cc[VTIME] = 0;
    tcsetattr(STDIN_FILENO, TCSADRAIN, &raw);
  }
  ~RawTerminal() { tcsetattr(STDIN_FILENO, TCSADRAIN, &before_); }

 private:
  termios before_;
};

// Returns whether a byte is inside a UTF-8 character, after its first byte.
bool is_continuation(char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; }

// These return the position one character to the left or to the right of `at`, never inside a
// character.
size_t left_of(const std::string& s, size_t at) {
  if (at > 0) --at;
  while (at > 0 && is_continuation(s[at])) --at;
  return at;
}
size_t right_of(const std::string& s, size_t at) {
  if (at < s.size()) ++at;
  while (at < s.size() && is_continuation(s[at])) ++at;
  return at;
}

// Returns the bytes of the character that ends at `at`.
std::string_view character_before(const std::string& s, size_t at) {
  const size_t from = left_of(s, at);
  return std::string_view(s).substr(from, at - from);
}

// Writes the prompt and the line over the terminal's present line and puts the cursor in place.
// Control characters in the line are shown and never obeyed.
void redraw(const std::string& prompt, const std::string& line, size_t cursor) {
  const std::string left = printable(std::string_view(line).substr(0, cursor));
  const std::string right = printable(std::string_view(line).substr(cursor));
  size_t after = 0;  // characters to step back over
  for (const char c : right) after += is_continuation(c) ? 0 : 1;
  std::string out = "\r" + prompt + left + right + "\x1b[K";
  if (after > 0) out += "\x1b[" + std::to_string(after) + "D";
  std::fwrite(out.data(), 1, out.size(), stdout);
  std::fflush(stdout);
}

// Appends to a file that only its owner can read, whatever the umask is and the file's mode was.
// Where that cannot be had, it writes nothing.
void append_privately(const std::string& path, const std::string& text) {
  const int file = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) return;
  const char* rest = text.data();
  size_t left = fchmod(file, 0600) == 0 ? text.size() : 0;  // fails if the file is not ours
  while (left > 0) {
    const ssize_t written = ::write(file, rest, left);
    if (written <= 0) break;
    rest += written;
    left -= static_cast<size_t>(written);
  }
  ::close(file);
}

// Waits for a byte from the terminal; -1 at its end.
int read_key() {
  unsigned char c;
  return ::read(STDIN_FILENO, &c, 1) == 1 ? c : -1;
}

// Returns the byte that Ctrl and a letter send.
constexpr int control(char letter) { return letter - 'a' + 1; }

}  // namespace

LineEditor::LineEditor(std::string history) : history_file_(std::move(history)) {
  std::ifstream file(history_file_);
  for (std::string line; std::getline(file, line);) history_.push_back(line);
  if (history_.size() > kMostLines) {
    history_.erase(history_.begin(), history_.end() - kMostLines);
  }
}

void LineEditor::remember(const std::string& line) {
  if (line.empty() || (!history_.empty() && history_.back() == line)) return;
  history_.push_back(line);
  if (history_file_.empty()) return;
  mkdir(history_file_.substr(0, history_file_.rfind('/')).c_str(), 0700);
  append_privately(history_file_, line + "\n");
}

LineEditor::Outcome LineEditor::read(const std::string& prompt, std::string* line) {
  line->clear();
  if (!isatty(STDIN_FILENO) || !isatty(STDOUT_FILENO)) {
    return std::getline(std::cin, *line) ? Outcome::kLine : Outcome::kEnd;
  }
  const Outcome outcome = edit(prompt, line);
  std::fputs("\n", stdout);
  std::fflush(stdout);
  if (outcome == Outcome::kLine) remember(*line);
  return outcome;
}

LineEditor::Outcome LineEditor::edit(const std::string& prompt, std::string* line) {
  const RawTerminal raw;
  size_t cursor = 0;
  size_t place = history_.size();  // which line of the history is shown; its size: the new line
  std::string draft;               // the new line, while a line of the history is shown
  const auto recall = [&](size_t to) {
    if (place == history_.size()) draft = *line;
    place = to;
    *line = place == history_.size() ? draft : history_[place];
    cursor = line->size();
  };
  const auto erase = [&](size_t from, size_t to) {
    line->erase(from, to - from);
    cursor = from;
  };
  for (;;) {
    // A character is drawn once all its bytes have come.
    if (!utf8_incomplete(character_before(*line, cursor))) {
      redraw(prompt, *line, cursor);
    }
    int key = read_key();
    if (key < 0) return Outcome::kEnd;
    if (key == '\r' || key == '\n') return Outcome::kLine;
    if (key == control('c')) return Outcome::kInterrupt;
    if (key == control('d')) {
      if (line->empty()) return Outcome::kEnd;
      erase(cursor, right_of(*line, cursor));
    } else if (key == 127 || key == control('h')) {
      erase(left_of(*line, cursor), cursor);
    } else if (key == control('u')) {
      erase(0, cursor);
    } else if (key == control('k')) {
      erase(cursor, line->size());
    } else if (key == control('w')) {
      size_t from = cursor;
      while (from > 0 && (*line)[from - 1] == ' ') --from;
      while (from > 0 && (*line)[from - 1] != ' ') --from;
      erase(from, cursor);
    } else if (key == control('a')) {
      cursor = 0;
    } else if (key == control('e')) {
      cursor = line->size();
    } else if (key == '\x1b') {
      if (read_key() != '[') continue;
      key = read_key();
      if (key == 'A' && place > 0) recall(place - 1);
      if (key == 'B' && place < history_.size()) recall(place + 1);
      if (key == 'C') cursor = right_of(*line, cursor);
      if (key == 'D') cursor = left_of(*line, cursor);
      if (key == 'H') cursor = 0;
      if (key == 'F') cursor = line->size();
      if (key == '3' && read_key() == '~') erase(cursor, right_of(*line, cursor));
    } else if (key >= 32) {
      line->insert(cursor++, 1, static_cast<char>(key));
    }
  }
}

}  // namespace fk::cli
