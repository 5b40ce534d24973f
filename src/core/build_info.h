#pragma once

#include <string>

namespace fk {

// What this build is and what it found on this machine, as JSON.
std::string build_info_json();

}  // namespace fk
