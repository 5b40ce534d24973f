#pragma once

#include <string>

namespace fk {

// Tells what CUDA code is compiled for, such as "75-real 80 90a-real".
const char* cuda_architectures();

// Tells the compiler of this build, by name and version.
const char* compiler();

// Tells what this build is and what it found on this machine, as JSON.
std::string build_info_json();

}  // namespace fk
