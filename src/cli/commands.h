// The commands of the `fk` program stand here, and in one file each. Each returns the exit code.
#pragma once

#include <string>

#include "check/drawn_call.h"

namespace fk::cli {

int info(bool json);

struct CheckOptions {
  std::string op;      // as users or the registry call it; empty: every op
  std::string device;  // "cpu", "cuda"; empty: each that the machine has
  int samples = 24;    // per dtype
  uint64_t seed = 0;
};
int check(const CheckOptions& options);

// `arguments` are what stands after "bench" on the command line, ended by NULL.
int bench(char** arguments);

}  // namespace fk::cli
