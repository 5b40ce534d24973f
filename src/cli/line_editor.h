// Reads lines from the user. On a terminal the line can be edited, and the arrow keys bring earlier
// lines back; otherwise lines are read from stdin as they are.
#pragma once

#include <string>
#include <vector>

namespace fk::cli {

class LineEditor {
 public:
  // Says how `read` ended: with a line, by Ctrl-C, or at the end of the input.
  enum class Outcome { kLine, kInterrupt, kEnd };

  // `history` is the file that earlier lines are read from and new ones are added to; empty: none.
  explicit LineEditor(std::string history);

  // Shows `prompt` and reads one line, without its newline.
  Outcome read(const std::string& prompt, std::string* line);

 private:
  // Reads one line from a terminal.
  Outcome edit(const std::string& prompt, std::string* line);
  // Adds a line to the history, unless it is empty or the same as the one before.
  void remember(const std::string& line);

  std::string history_file_;
  std::vector<std::string> history_;
};

}  // namespace fk::cli
