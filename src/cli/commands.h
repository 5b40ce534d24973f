// This file declares the commands of the `fk` program, each in a file of its own, and each
// returning the exit code. text_options.h declares those that run a model.
#pragma once

#include <string>

#include "check/drawn_call.h"

namespace fk::cli {

// `fk info` prints what this build and this machine have.
int info(bool json);

struct CheckOptions {
  std::string op;      // a name as users or the registry know it; empty: every op
  std::string device;  // "cpu" or "cuda"; empty: each that the machine has
  int samples = 24;    // per op and dtype
  uint64_t seed = 0;
};
// `fk check` compares ops with their references.
int check(const CheckOptions& options);

// `fk bench` measures ops. `arguments` are those after "bench"; a null ends them.
int bench(char** arguments);

}  // namespace fk::cli
