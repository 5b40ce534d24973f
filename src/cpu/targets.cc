// Asks the machine which instruction sets it has, and keeps which one is in use.
#include "cpu/targets.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cpu/gemm/bfloat16.h"
#include "hwy/detect_targets.h"

namespace fk::cpu {
namespace {

struct Target {
  const char* name;
  int index;  // its column in the tables of FK_CPU_EXPORT
  bool multiplies_bfloat16;
  bool (*supported)();
};

// Returns whether this build has code for a target: HWY_DISABLED_TARGETS may leave some out.
[[maybe_unused]] constexpr bool is_compiled(int64_t target) {
  return (static_cast<int64_t>(HWY_DISABLED_TARGETS) & target) == 0;
}

#if defined(__x86_64__)
// Asks CPUID directly, because Clang's __builtin_cpu_supports does not know "f16c".
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
bool has_avx2() {
  return is_compiled(HWY_AVX2) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && has_f16c();
}
bool has_avx3() {
  return is_compiled(HWY_AVX3) && has_avx2() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bw");
}
#endif

// Lists the targets, each of which is better than those before it. A target needs all the features
// that Highway's headers let the compiler use for it, and the last one also those of
// cpu/gemm/tiles_bfloat16.h.
const Target kTargets[] = {
#if defined(__x86_64__)
    {"sse4", 0, false, [] { return true; }},  // the least that the library runs on
    {"avx2", 1, false, has_avx2},
    {"avx3", 2, false, has_avx3},
    {"avx3_bf16", 2, true, [] { return has_avx3() && __builtin_cpu_supports("avx512bf16"); }},
#else
    {"neon", 0, false, [] { return true; }},
#endif
};
constexpr int kCount = sizeof(kTargets) / sizeof(kTargets[0]);

// Holds the index in kTargets of the target in use; -1 until it is first asked for.
std::atomic<int> chosen{-1};

// Returns the index in kTargets of the best target that this machine supports.
int best_index() {
  int i = kCount - 1;
  while (i > 0 && !kTargets[i].supported()) --i;
  return i;
}

// Returns the index in kTargets of the target of that name, or -1 if there is none on this machine.
int index_of(const char* name) {
  for (int i = 0; i < kCount; ++i) {
    if (std::strcmp(name, kTargets[i].name) == 0) return kTargets[i].supported() ? i : -1;
  }
  return -1;
}

}  // namespace

namespace detail {

std::atomic<int> active_index{-1};

int choose_index() {
  static const int initial = [] {
    const char* name = std::getenv("FK_CPU_TARGET");
    if (name == nullptr || *name == '\0') return best_index();
    const int index = index_of(name);
    if (index >= 0) return index;
    std::fprintf(stderr,
                 "flashkernel: FK_CPU_TARGET=%s is not an instruction set of this machine; "
                 "using %s\n",
                 name, kTargets[best_index()].name);
    return best_index();
  }();
  int unset = -1;  // if another thread has called set_target meanwhile, its choice stays
  chosen.compare_exchange_strong(unset, initial);
  unset = -1;
  active_index.compare_exchange_strong(unset, kTargets[chosen.load()].index);
  return active_index.load();
}

}  // namespace detail

std::vector<std::string> supported_targets() {
  std::vector<std::string> names;
  for (int i = kCount - 1; i >= 0; --i) {
    if (kTargets[i].supported()) names.push_back(kTargets[i].name);
  }
  return names;
}

std::string target_list() {
  std::string list;
  for (const std::string& name : supported_targets()) list += (list.empty() ? "" : ", ") + name;
  return list;
}

bool set_target(const char* name) {
  const int index = name == nullptr ? best_index() : index_of(name);
  if (index < 0) return false;
  chosen.store(index);
  detail::active_index.store(kTargets[index].index);
  return true;
}

const char* active_target() {
  active_index();
  return kTargets[chosen.load()].name;
}

namespace {

// Holds what FK_CPU_VNNI said at the first call, until set_vnni changes it.
std::atomic<bool>& vnni_flag() {
  static std::atomic<bool> wanted = [] {
    const char* text = std::getenv("FK_CPU_VNNI");
    return text == nullptr || text[0] != '0';
  }();
  return wanted;
}

}  // namespace

bool vnni_wanted() { return vnni_flag().load(std::memory_order_relaxed); }
void set_vnni(bool wanted) { vnni_flag().store(wanted); }

bool has_vex_vnni() {
#if defined(__x86_64__)
  constexpr unsigned kAvxVnni = 1u << 4;
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & kAvxVnni) != 0;
#else
  return false;
#endif
}

bool multiplies_bfloat16() {
  active_index();
  return kTargets[chosen.load(std::memory_order_relaxed)].multiplies_bfloat16;
}

}  // namespace fk::cpu
