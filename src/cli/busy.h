// Finds out whether other programs, or the host of a virtual machine, took CPU time away from a
// measurement. It does for a whole run what bindings/python/flashkernel/bench/busy.py does.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace fk::cli {

class BusyWatch {
 public:
  // Starts to count. `threads` is how many CPUs the measurement wants. `stat` is the file with the
  // system's counters; tests pass one of their own.
  explicit BusyWatch(int threads, std::string stat = "/proc/stat");

  struct Seen {
    int cpus = 0;            // how many the machine has; 0: the system does not say
    double others_cpus = 0;  // how many CPUs other programs kept busy, on average
    double steal = 0;        // the share of all CPU time that the host gave to others
    bool disturbed = false;  // the figures are too low to be trusted
  };
  // Returns what has happened since the construction.
  Seen seen() const;

 private:
  struct Counters {
    int cpus = 0;
    double at = 0, busy = 0, steal = 0, total = 0, own = 0;  // seconds
  };
  Counters read() const;

  int threads_;
  std::string stat_;
  Counters before_;
};

// Tells people about it: "This machine was busy: ...", or "" if it was not.
std::string describe(const BusyWatch::Seen& seen);
// Adds "busy" and "disturbed" to a row of a result file.
void add_to(const BusyWatch::Seen& seen, nlohmann::json* row);

}  // namespace fk::cli
