#include "cli/busy.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <utility>

namespace fk::cli {
namespace {

// A measurement counts as disturbed above these.
constexpr double kOthers = 0.05;  // of the CPUs it wants
constexpr double kSteal = 0.02;   // of all CPU time

// Gives the CPU time of this program and of those it started, in seconds.
double own_seconds() {
  double sum = 0;
  for (const int who : {RUSAGE_SELF, RUSAGE_CHILDREN}) {
    rusage usage{};
    getrusage(who, &usage);
    for (const timeval& t : {usage.ru_utime, usage.ru_stime}) {
      sum += static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
    }
  }
  return sum;
}

}  // namespace

BusyWatch::BusyWatch(int threads, std::string stat)
    : threads_(threads), stat_(std::move(stat)), before_(read()) {}

BusyWatch::Counters BusyWatch::read() const {
  Counters c;
  c.at = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  c.own = own_seconds();
  const auto tick = static_cast<double>(sysconf(_SC_CLK_TCK));
  std::ifstream file(stat_);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("cpu", 0) != 0) break;
    if (std::isdigit(static_cast<unsigned char>(line[3])) != 0) {
      ++c.cpus;
      continue;
    }
    // user nice system idle iowait irq softirq steal; what follows is part of user.
    double t[8] = {};
    std::istringstream numbers(line.substr(3));
    for (double& value : t) numbers >> value;
    c.busy = (t[0] + t[1] + t[2] + t[5] + t[6]) / tick;
    c.steal = t[7] / tick;
    for (const double value : t) c.total += value / tick;
  }
  return c;
}

BusyWatch::Seen BusyWatch::seen() const {
  const Counters now = read();
  const double seconds = now.at - before_.at, total = now.total - before_.total;
  Seen seen;
  if (now.cpus == 0 || seconds <= 0 || total <= 0) return seen;
  seen.cpus = now.cpus;
  const double ours = now.own - before_.own;
  seen.others_cpus = std::max(0.0, now.busy - before_.busy - ours) / seconds;
  seen.steal = (now.steal - before_.steal) / total;
  // What others do on CPUs that we leave idle is no matter.
  const double taken = (seen.others_cpus + threads_ - now.cpus) / threads_;
  seen.disturbed = taken > kOthers || seen.steal > kSteal;
  return seen;
}

std::string describe(const BusyWatch::Seen& seen) {
  if (!seen.disturbed) return "";
  char text[256];
  std::snprintf(
      text, sizeof text,
      "This machine was busy: other programs took %.1f of %d CPUs, %.0f%% of the time was "
      "stolen by\nthe host. These figures are too low: measure again on a quiet machine.",
      seen.others_cpus, seen.cpus, 100 * seen.steal);
  return text;
}

void add_to(const BusyWatch::Seen& seen, nlohmann::json* row) {
  (*row)["disturbed"] = nlohmann::json::array();
  if (seen.disturbed) (*row)["disturbed"].push_back(describe(seen));
  if (seen.cpus == 0) return;
  (*row)["busy"] = {{"others_cpus", std::round(seen.others_cpus * 100) / 100},
                    {"steal", std::round(seen.steal * 1000) / 1000}};
}

}  // namespace fk::cli
