// Writes result files (results/<machine>/<suite>.json) of measurements that the program makes
// itself.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/status.h"

namespace fk::cli {

// Sums up measurements as mean, std, min, max, p50, p95 and p99, in milliseconds.
nlohmann::json milliseconds(const std::vector<double>& seconds);
double median(std::vector<double> values);

// Writes `rows` to the file at `path`. Rows of the same op and case that it already has are
// replaced, the others stay; each has the commit and date at which it was measured.
Status write_results(const std::string& path, const nlohmann::json& method,
                     const nlohmann::json& rows);

}  // namespace fk::cli
