// This file reads what the environment says of the GPU to stand in for. docs/softgpu.md has the
// list.
#pragma once

#include <string>

#include "softgpu/softgpu.h"

namespace fk::softgpu {

struct Settings {
  Chip chip;
  LaunchOptions launch;
  bool log_launches = false;
  std::string counters_file;  // a line of JSON for each launch is appended; empty: none
};

// Ends the process with a message where a variable makes no sense: a test that ran with another
// GPU than the one asked for would prove nothing.
Settings settings_from_environment();

}  // namespace fk::softgpu
