// Which instruction set the CPU kernels use: the best that this machine has, or the one named by
// FK_CPU_TARGET or set_target, so that a test can run each.
#pragma once

#include <atomic>
#include <string>
#include <vector>

namespace fk::cpu {

// Names of the instruction sets that are compiled in and that this machine has, best first:
// "avx3_bf16", "avx3" (AVX-512 F, BW, DQ, VL), "avx2" (with FMA, F16C), "sse4"; or "neon".
std::vector<std::string> supported_targets();
std::string target_list();  // the same for people: "avx3, avx2, sse4"

// Makes every kernel call from now on use `name`; NULL: the best one. False, and nothing changes,
// if the name is unknown or the machine lacks it. Calls already running are not affected.
bool set_target(const char* name);

const char* active_target();

// Whether this machine has AVX2's form of VNNI (Alder Lake), which is no part of "avx2".
bool has_vex_vnni();

namespace detail {
// Place of the active target in the table FK_CPU_EXPORT makes; -1 until it is first asked for.
extern std::atomic<int> active_index;
int choose_index();
}  // namespace detail

inline int active_index() {
  const int index = detail::active_index.load(std::memory_order_relaxed);
  return index >= 0 ? index : detail::choose_index();
}

}  // namespace fk::cpu
