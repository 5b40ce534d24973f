#include "check/global_races.h"

#include <algorithm>

#include "check/race_hooks.h"
#include "memory/memory_map.h"

namespace fk::softgpu {

namespace {

bool is_atomic(Kind kind) { return kind >= Kind::kAtomic; }
bool is_read(Kind kind) { return kind == Kind::kRead || kind == Kind::kAcquire; }

}  // namespace

// Returns whether the earlier access is over, as far as the lane can know.
bool GlobalRaces::is_seen(const ClusterRaces& races, const Access& now, const Access& earlier) {
  if (earlier.time == 0 || (earlier.bytes & now.bytes) == 0) return true;
  const Seen& seen = races.warps[now.agent];
  if (earlier.cluster != now.cluster) {
    return earlier.time <= seen.others.at(ClustersClocks::key(earlier.cluster, earlier.agent));
  }
  if (earlier.agent != now.agent) return earlier.time <= seen.all.at(earlier.agent);
  return earlier.lane == now.lane || earlier.pc == now.pc || earlier.epoch != now.epoch;
}

// The later of two reads that are not ordered replaces the one that it knows of, if any.
void GlobalRaces::remember_read(const ClusterRaces& races, GlobalWord& word, const Access& now) {
  for (Access& read : word.read) {
    const bool same_lane = read.agent == now.agent && read.lane == now.lane;
    if ((read.cluster == now.cluster && same_lane) || is_seen(races, now, read)) {
      read = now;
      return;
    }
  }
  word.read[1] = word.read[0];
  word.read[0] = now;
}

void GlobalRaces::acquire(ClusterRaces& races, size_t agent, uint64_t address) {
  const auto found = released_.find(address);
  if (found == released_.end()) return;
  const Released& released = found->second;
  Acquired& last = acquired_[ClustersClocks::key(races.number, agent)];
  if (last.address == address && last.version == released.version) return;  // asks again
  last = {address, released.version};
  Seen& own = races.warps[agent];
  for (const auto& [key, time] : released.clocks.times()) {
    if (key >> 32 != races.number) {
      own.others.advance_to(key, time);
    } else if (const auto other = static_cast<uint32_t>(key); own.all.at(other) < time) {
      own.all.set(other, time);
    }
  }
}

void GlobalRaces::release(ClusterRaces& races, size_t agent, uint64_t address) {
  Released& released = released_[address];
  const Seen& own = races.warps[agent];
  for (size_t other = 0; other < own.all.size(); ++other) {
    if (own.all.at(other) == 0) continue;
    released.clocks.advance_to(ClustersClocks::key(races.number, other), own.all.at(other));
  }
  released.clocks.join(own.others);
  ++released.version;
  advance(races, agent);
}

void GlobalRaces::note(Warp& warp, int lane, uint64_t address, uint32_t bytes, Kind kind) {
  ClusterRaces& races = *warp.block->cluster->races;
  const size_t agent = agent_of(warp);
  if (kind == Kind::kAcquire || kind == Kind::kSynchronise) acquire(races, agent, address);
  Access now;
  now.cluster = races.number;
  now.agent = static_cast<uint32_t>(agent);
  now.time = races.warps[agent].all.at(agent);
  now.epoch = races.epochs[agent];
  now.pc = warp.pc;
  now.block = warp.block->number;
  now.lane = static_cast<uint8_t>(lane);
  now.kind = kind;
  for (uint64_t at = address; at < address + bytes;) {
    const uint64_t end = std::min((at | 3) + 1, address + bytes);
    GlobalWord& word = words_[at / 4];
    now.bytes = static_cast<uint8_t>(((1u << (end - at)) - 1) << (at & 3));
    const auto check = [&](const Access& earlier, const char* what) {
      if (is_atomic(kind) && is_atomic(earlier.kind)) return;
      if (is_seen(races, now, earlier)) return;
      const InstructionText& text = warp.run->program->texts[earlier.pc];
      report(warp, Problem::kRace, lane, at,
             std::string(is_read(kind) ? "a load" : "a store") +
                 " of global memory that nothing orders with the " + what + " by block " +
                 std::to_string(earlier.block) + " warp " +
                 std::to_string(earlier.agent % warp.block->warps.size()) + " lane " +
                 std::to_string(earlier.lane) + " at PTX line " + std::to_string(text.line) +
                 (text.source_line > 0 ? " (source line " + std::to_string(text.source_line) + ")"
                                       : "") +
                 "; " + warp.run->memory->describe(reinterpret_cast<const void*>(at)));
    };
    check(word.write, "store");
    if (is_read(kind)) {
      remember_read(races, word, now);
    } else {
      for (const Access& read : word.read) check(read, "load");
      if (word.write.time == now.time && word.write.agent == now.agent &&
          word.write.cluster == now.cluster && word.write.lane != now.lane) {
        now.bytes |= word.write.bytes;  // neighbours that share a word
      }
      word.write = now;
      for (Access& read : word.read) {
        if (read.bytes & now.bytes) read = Access();
      }
    }
    at = end;
  }
  if (kind == Kind::kRelease || kind == Kind::kSynchronise) release(races, agent, address);
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
