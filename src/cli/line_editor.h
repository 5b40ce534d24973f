// Reads one line from the user: with arrow keys and earlier lines on a terminal, plainly otherwise.
#pragma once

#include <string>
#include <vector>

namespace fk::cli {

class LineEditor {
 public:
  enum class Outcome { kLine, kInterrupt, kEnd };

  // Reads earlier lines from the file `history` and adds new ones to it; an empty name means no
  // file.
  explicit LineEditor(std::string history);

  Outcome read(const std::string& prompt, std::string* line);

 private:
  Outcome edit(const std::string& prompt, std::string* line);
  void remember(const std::string& line);

  std::string history_file_;
  std::vector<std::string> history_;
};

}  // namespace fk::cli
