// What one step on a fuzzed file may take. More of it is a finding, as a crash is.
#pragma once

#include <string>

namespace fk::model {

// Processor time and memory that were taken since it was made; objects do not nest.
class Meter {
 public:
  Meter();
  double seconds() const;
  size_t bytes() const;  // the most at one time, of what `new` gave

 private:
  double begin_;
  size_t held_;
};

// The most that any step has taken so far.
struct Extremes {
  double seconds = 0;
  size_t bytes = 0;
};
Extremes& extremes();

// The file under way, which a finding is written to.
void begin_input(const std::string* bytes);
// Writes the file, says `what`, and ends the program.
[[noreturn]] void report_finding(const std::string& what);

// Calls `step` and reports it where it takes more than 2 seconds or 512 MiB.
void check_limits(const char* what, const Meter& meter);
template <class Step>
auto limited(const char* what, const Step& step) {
  const Meter meter;
  auto result = step();
  check_limits(what, meter);
  return result;
}

}  // namespace fk::model
