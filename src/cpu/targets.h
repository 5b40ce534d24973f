// Chooses the instruction set ("target") that the CPU kernels use: the best that this machine has,
// or the one that FK_CPU_TARGET or set_target names, so that a test can run each.
#pragma once

#include <atomic>
#include <string>
#include <vector>

namespace fk::cpu {

// Returns the names of the instruction sets that are compiled in and that this machine has, best
// first: "avx3_bf16", "avx3" (AVX-512 F, BW, DQ, VL), "avx2" (with FMA, F16C), "sse4"; or "neon".
std::vector<std::string> supported_targets();
// Returns the same as a text for people: "avx3, avx2, sse4".
std::string target_list();

// Makes every kernel call from now on use the target `name`, or the best one if `name` is null.
// Returns false and changes nothing if the name is unknown or the machine lacks that target. Calls
// already running are not affected.
bool set_target(const char* name);

// Returns the name of the target in use.
const char* active_target();

// Returns whether products of bytes use VNNI where the CPU has it. FK_CPU_VNNI=0 and
// set_vnni(false) switch it off, so that tests can run both ways.
bool vnni_wanted();
void set_vnni(bool wanted);

// Returns whether this machine has AVX2's form of VNNI (Alder Lake), which the target "avx2" does
// not include.
bool has_vex_vnni();

namespace detail {
// Holds the active target's column in the tables of FK_CPU_EXPORT; -1 until it is first asked for.
extern std::atomic<int> active_index;
// Chooses the target at the first call, from FK_CPU_TARGET or what the machine has.
int choose_index();
}  // namespace detail

// Returns the active target's column in the tables of FK_CPU_EXPORT.
inline int active_index() {
  const int index = detail::active_index.load(std::memory_order_relaxed);
  return index >= 0 ? index : detail::choose_index();
}

}  // namespace fk::cpu
