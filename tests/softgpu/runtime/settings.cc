#include "softgpu/runtime/settings.h"

#include <cstdio>
#include <cstdlib>

namespace fk::softgpu {
namespace {

[[noreturn]] void refuse(const char* name, const char* expected, const char* got) {
  std::fprintf(stderr, "softgpu: %s: expected %s, got '%s'\n", name, expected, got);
  std::exit(2);
}

// Reads a number from `least` on, or `otherwise` where the variable is not set.
uint64_t number(const char* name, uint64_t otherwise, uint64_t least = 0) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return otherwise;
  char* end = nullptr;
  const unsigned long long value = std::strtoull(text, &end, 10);
  if (*end != '\0' || *text == '-' || value < least) {
    refuse(name, ("a number from " + std::to_string(least) + " on").c_str(), text);
  }
  return value;
}

int count(const char* name, int otherwise) {
  return static_cast<int>(number(name, static_cast<uint64_t>(otherwise), 1));
}

}  // namespace

Settings settings_from_environment() {
  Settings settings;
  const uint64_t architecture = number("FK_SOFTGPU_ARCH", 90);
  if (architecture != 75 && architecture != 80 && architecture != 90) {
    refuse("FK_SOFTGPU_ARCH", "75, 80 or 90", std::getenv("FK_SOFTGPU_ARCH"));
  }
  Chip& chip = settings.chip;
  chip = chip_of(static_cast<int>(architecture));
  chip.multiprocessors = count("FK_SOFTGPU_MULTIPROCESSORS", chip.multiprocessors);
  constexpr size_t kMega = size_t{1} << 20;
  chip.memory_bytes = kMega * number("FK_SOFTGPU_MEMORY_MB", chip.memory_bytes / kMega, 1);

  LaunchOptions& launch = settings.launch;
  launch.seed = number("FK_SOFTGPU_SEED", launch.seed);
  launch.check_races = number("FK_SOFTGPU_RACES", 0) != 0;
  launch.max_reports = number("FK_SOFTGPU_REPORTS", launch.max_reports, 1);
  launch.max_warp_instructions = number("FK_SOFTGPU_INSTRUCTIONS", launch.max_warp_instructions, 1);

  settings.log_launches = number("FK_SOFTGPU_LOG", 0) != 0;
  if (const char* file = std::getenv("FK_SOFTGPU_COUNTERS")) settings.counters_file = file;
  // Sectors, wavefronts and unique bytes are counted only for somebody who reads them.
  launch.count_memory = !settings.counters_file.empty();
  return settings;
}

}  // namespace fk::softgpu
