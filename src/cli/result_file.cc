// Writes result files and computes the statistics in them.
#include "cli/result_file.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>

#include "core/thread_pool.h"
#include "cpu/targets.h"
#include "flashkernel/abi.h"

namespace fk::cli {
namespace {

using Json = nlohmann::json;

// Runs a shell command and returns what it writes, without the newline at the end.
std::string output_of(const char* command) {
  FILE* pipe = popen(command, "r");
  if (pipe == nullptr) return "";
  std::string text;
  char buffer[256];
  while (const size_t n = std::fread(buffer, 1, sizeof buffer, pipe)) text.append(buffer, n);
  pclose(pipe);
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

// Returns what $FK_COMMIT says, or the commit of the checkout in the current folder, with a "+" if
// it has changes, or "unknown".
std::string commit() {
  if (const char* told = std::getenv("FK_COMMIT"); told != nullptr && *told != '\0') return told;
  const std::string head = output_of("git rev-parse HEAD 2>/dev/null");
  if (head.empty()) return "unknown";
  return head + (output_of("git status --porcelain 2>/dev/null").empty() ? "" : "+");
}

// Returns the date and time in UTC.
std::string now() {
  const std::time_t time = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&time, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &utc);
  return text;
}

// Returns the CPU's name for people.
std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

// Returns the value below which `share` of the sorted values lie, by linear interpolation as numpy
// does it. `sorted` must not be empty.
double percentile(const std::vector<double>& sorted, double share) {
  const double at = share * static_cast<double>(sorted.size() - 1);
  const auto low = static_cast<size_t>(at);
  const size_t high = std::min(low + 1, sorted.size() - 1);
  return sorted[low] + (at - static_cast<double>(low)) * (sorted[high] - sorted[low]);
}

}  // namespace

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return percentile(values, 0.5);
}

Json milliseconds(const std::vector<double>& seconds) {
  std::vector<double> ms;
  for (const double s : seconds) ms.push_back(s * 1e3);
  std::sort(ms.begin(), ms.end());
  const auto n = static_cast<double>(ms.size());
  double mean = 0, squares = 0;
  for (const double v : ms) mean += v / n;
  for (const double v : ms) squares += (v - mean) * (v - mean) / n;
  const auto rounded = [](double v) { return std::round(v * 1e6) * 1e-6; };
  return {{"mean", rounded(mean)},
          {"std", rounded(std::sqrt(squares))},
          {"min", rounded(ms.front())},
          {"max", rounded(ms.back())},
          {"p50", rounded(percentile(ms, 0.5))},
          {"p95", rounded(percentile(ms, 0.95))},
          {"p99", rounded(percentile(ms, 0.99))}};
}

Status write_results(const std::string& path, const Json& method, const Json& rows) {
  Json out = {{"machine",
               {{"cpu", cpu_name()},
                {"cpu_target", cpu::active_target()},
                {"threads", num_threads()},
                {"flashkernel", fk_version()}}},
              {"commit", commit()},
              {"date", now()},
              {"method", method},
              {"rows", Json::array()}};
  if (std::ifstream before(path); before) {
    const Json old = Json::parse(before, nullptr, false);
    if (!old.is_object() || !old.contains("rows") || !old["rows"].is_array()) {
      return invalid(path + ": expected a result file, which has rows");
    }
    for (const Json& row : old["rows"]) {
      const bool replaced = std::any_of(rows.begin(), rows.end(), [&](const Json& fresh) {
        return row.value("op", "") == fresh["op"] && row.value("case", Json()) == fresh["case"];
      });
      if (!replaced) out["rows"].push_back(row);
    }
  }
  for (Json row : rows) {
    row["commit"] = out["commit"];
    row["date"] = out["date"];
    out["rows"].push_back(row);
  }
  std::ofstream file(path);
  file << out.dump(1) << '\n';
  if (!file.flush()) return invalid(path + ": cannot be written");
  return {};
}

}  // namespace fk::cli
