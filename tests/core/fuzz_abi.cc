// Hostile calls of the C ABI, with what sanitizers the build has:
//   fk_fuzz_abi [AMOUNT [SEED]]: so many calls, or with an s behind it for so many seconds.
// It prints how many calls there were, how many of them were accepted, and the seed.
#include "fuzz_abi.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace fk::fuzz {

void require_message(fk_status status) {
  const bool known = status >= FK_OK && status <= FK_INTERNAL;
  if (known && (status == FK_OK || fk_last_error()[0] != '\0')) return;
  std::fprintf(stderr, "fk_fuzz_abi: status %d, message '%s'\n", static_cast<int>(status),
               fk_last_error());
  std::abort();
}

namespace {

int main_of(int argc, char** argv) {
  using Clock = std::chrono::steady_clock;
  char* end = nullptr;
  const double amount = argc > 1 ? std::strtod(argv[1], &end) : 2;
  const bool by_time = argc <= 1 || *end == 's';
  if (argc > 3 || !(amount > 0) || (argc > 1 && *end != '\0' && *end != 's')) {
    std::fprintf(stderr, "usage: fk_fuzz_abi [CALLS|SECONDSs [SEED]]\n");
    return 2;
  }
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device()();
  std::printf("fk_fuzz_abi: seed %llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  const auto begin = Clock::now();
  const auto spent = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  OpFuzzer ops(seed);
  EngineFuzzer engine(seed + 1);
  PackedFuzzer packed(seed + 2);
  int64_t calls = 0, accepted = 0;
  while (by_time ? spent() < amount : static_cast<double>(calls) < amount) {
    switch (calls % 10) {
      case 8:
        accepted += packed.call();
        break;
      case 9:
        accepted += engine.call();
        break;
      default:
        accepted += ops.call();
    }
    ++calls;
  }
  std::printf("%lld calls in %.1f s, %lld accepted\n", static_cast<long long>(calls), spent(),
              static_cast<long long>(accepted));
  return 0;
}

}  // namespace
}  // namespace fk::fuzz

int main(int argc, char** argv) { return fk::fuzz::main_of(argc, argv); }
