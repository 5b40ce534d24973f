// Tells whether other programs, or a virtual machine's host, took time from a measurement's CPUs,
// as bindings/python/flashkernel/bench/busy.py does, but for a whole run.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace fk::cli {

class BusyWatch {
 public:
  // Counts from now on. The measurement wants `threads` CPUs; `stat` is the file of the system's
  // counters, which tests write themselves.
  explicit BusyWatch(int threads, std::string stat = "/proc/stat");

  struct Seen {
    int cpus = 0;            // 0: the system does not say
    double others_cpus = 0;  // CPUs' worth of work that was not ours
    double steal = 0;        // the share of all CPU time that the host gave to others
    bool disturbed = false;
  };
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

// Says "This machine was busy: ...", or "" where it was not.
std::string describe(const BusyWatch::Seen& seen);
// Adds "busy" and "disturbed" to a row of a result file.
void add_to(const BusyWatch::Seen& seen, nlohmann::json* row);

}  // namespace fk::cli
