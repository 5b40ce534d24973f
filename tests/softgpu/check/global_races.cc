#include "check/global_races.h"

#include <algorithm>

#include "check/race_hooks.h"
#include "memory/memory_map.h"

namespace fk::softgpu {

namespace {

bool is_atomic(Kind kind) { return kind == Kind::kAtomic || kind == Kind::kSynchronise; }

}  // namespace

bool GlobalRaces::is_seen(BlockTimes& own, uint32_t block, const Access& earlier,
                          uint8_t bytes) const {
  if (earlier.block == 0 || earlier.block == block || (earlier.bytes & bytes) == 0) return true;
  const auto known = own.seen.find(earlier.block);
  return known != own.seen.end() && earlier.time <= known->second;
}

void GlobalRaces::synchronise(BlockTimes& own, uint32_t block, uint64_t address) {
  Times& here = released_[address];
  for (const auto& [other, time] : here) {
    uint32_t& seen = own.seen[other];
    seen = std::max(seen, time);
  }
  for (const auto& [other, time] : own.seen) {
    uint32_t& passed = here[other];
    passed = std::max(passed, time);
  }
  here[block] = own.now++;
}

void GlobalRaces::note(Warp& warp, int lane, uint64_t address, uint32_t bytes, Kind kind) {
  const uint32_t block = warp.block->number + 1;
  BlockTimes& own = blocks_[block];
  for (uint64_t at = address; at < address + bytes;) {
    const uint64_t end = std::min((at | 3) + 1, address + bytes);
    GlobalWord& word = words_[at / 4];
    Access now;
    now.block = block;
    now.time = own.now;
    now.pc = warp.pc;
    now.bytes = static_cast<uint8_t>(((1u << (end - at)) - 1) << (at & 3));
    now.kind = kind;
    const auto check = [&](const Access& earlier, const char* what) {
      if (is_atomic(kind) && is_atomic(earlier.kind)) return;
      if (is_seen(own, block, earlier, now.bytes)) return;
      const InstructionText& text = warp.run->program->texts[earlier.pc];
      report(warp, Problem::kRace, lane, at,
             std::string(kind == Kind::kRead ? "a load" : "a store") +
                 " of global memory that nothing orders with the " + what + " by block " +
                 std::to_string(earlier.block - 1) + " at PTX line " + std::to_string(text.line) +
                 (text.source_line > 0 ? " (source line " + std::to_string(text.source_line) + ")"
                                       : "") +
                 "; " + warp.run->memory->describe(reinterpret_cast<const void*>(at)));
    };
    check(word.write, "store");
    if (kind == Kind::kRead) {
      Access& read =
          word.read[0].block == 0 || word.read[0].block == block ? word.read[0] : word.read[1];
      read = now;
    } else {
      for (const Access& read : word.read) check(read, "load");
      word.write = now;
      word.read[0] = word.read[1] = Access();
    }
    at = end;
  }
  if (kind == Kind::kSynchronise) synchronise(own, block, address);
}

void note_global(Warp& warp, uint32_t lanes, const uint64_t* addresses, uint32_t bytes, Kind kind) {
  for (; lanes != 0; lanes &= lanes - 1) {
    const int lane = __builtin_ctz(lanes);
    warp.run->global_races->note(warp, lane, addresses[lane], bytes, kind);
  }
}

void note_global_range(Warp& warp, int lane, uint64_t begin, uint64_t bytes, Kind kind) {
  for (uint64_t at = begin; at < begin + bytes; at += 4) {
    warp.run->global_races->note(
        warp, lane, at, static_cast<uint32_t>(std::min<uint64_t>(4, begin + bytes - at)), kind);
  }
}

void report_early(Warp& warp, uint32_t lanes, const uint64_t* addresses) {
  const Program& program = *warp.run->program;
  const auto parameters = reinterpret_cast<uint64_t>(program.parameters.get());
  for (; lanes != 0; lanes &= lanes - 1) {
    const int lane = __builtin_ctz(lanes);
    if (addresses[lane] - parameters < program.info.parameter_bytes) continue;
    report(warp, Problem::kRace, lane, addresses[lane],
           "global memory is touched before griddepcontrol.wait: kernels ahead may still use it");
    return;
  }
}

}  // namespace fk::softgpu
