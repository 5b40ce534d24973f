// Writes the result files (results/<machine>/<suite>.json) of measurements that the program makes
// itself.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/status.h"

namespace fk::cli {

// Returns the mean, std, min, max, p50, p95 and p99 of times given in seconds, in milliseconds.
// There is at least one.
nlohmann::json milliseconds(const std::vector<double>& seconds);
// Returns the median of at least one value.
double median(std::vector<double> values);

// Writes `rows` to the result file at `path`. Of rows that the file already has, those of the same
// op and case are replaced and the others stay. Each row gets the commit and the date at which it
// was measured. `method` says how it was measured.
Status write_results(const std::string& path, const nlohmann::json& method,
                     const nlohmann::json& rows);

}  // namespace fk::cli
