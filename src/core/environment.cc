#include "core/environment.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace fk {
namespace {

// A switch is on unless its variable is missing, empty or 0.
bool is_on(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

bool log_names_dispatch() {
  const char* value = std::getenv("FK_LOG");
  if (value == nullptr || *value == '\0') return false;
  if (std::strstr(value, "dispatch") != nullptr) return true;
  std::fprintf(stderr, "flashkernel: FK_LOG: expected dispatch, got \"%s\"; ignored\n", value);
  return false;
}

}  // namespace

bool deterministic_by_environment() {
  static const bool value = is_on("FK_DETERMINISTIC");
  return value;
}

bool checks_values_on_gpu() {
  static const bool value = is_on("FK_CHECK");
  return value;
}

bool logs_dispatch() {
  static const bool value = log_names_dispatch();
  return value;
}

}  // namespace fk
