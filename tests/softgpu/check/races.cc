#include "check/access.h"
#include "check/race_hooks.h"

namespace fk::softgpu {

Block::Block() = default;
Block::~Block() = default;
Cluster::Cluster() = default;
Cluster::~Cluster() = default;

namespace {

ClusterRaces* races_of(const Block& block) { return block.cluster->races.get(); }

std::string place_of(const Warp& warp, const Trace& trace) {
  const InstructionText& at = warp.run->program->texts[trace.pc];
  std::string text = trace.copied ? "a copy" : "warp " + std::to_string(trace.agent);
  if (trace.lane != kWholeWarp) text += " lane " + std::to_string(trace.lane);
  text += " at PTX line " + std::to_string(at.line);
  if (at.source_line > 0) text += " (source line " + std::to_string(at.source_line) + ")";
  return text;
}

// Returns whether the earlier access is over, as far as this lane of the warp can know.
bool is_seen(const ClusterRaces& races, size_t agent, uint8_t lane, const Trace& earlier,
             uint8_t bytes) {
  if (earlier.time == 0 || (earlier.bytes & bytes) == 0) return true;
  if (earlier.agent == agent) {
    return lane == kWholeWarp || earlier.lane == kWholeWarp || earlier.lane == lane ||
           earlier.epoch != races.epochs[agent];
  }
  return earlier.time <= races.warps[agent].all.at(earlier.agent);
}

// Returns one of the last store and those of the same bytes that is seen; if none is, the last one.
const Trace& seen_write(const ClusterRaces& races, const Races& block, size_t agent, uint8_t lane,
                        const Word& word, uint8_t bytes) {
  if (block.equal.empty() || is_seen(races, agent, lane, word.write, bytes)) return word.write;
  const auto found = block.equal.find(&word);
  if (found == block.equal.end()) return word.write;
  for (const Trace& write : found->second) {
    if (is_seen(races, agent, lane, write, bytes)) return write;
  }
  return word.write;
}

void report_race(Warp& warp, int lane, uint32_t address, const char* now, const char* before,
                 const Trace& earlier) {
  report(warp, Problem::kRace, lane, address,
         std::string(now) + " of shared memory (byte " +
             std::to_string((address & kSharedOffsetMask) - kSharedBase) +
             ") that nothing orders with the " + before + " by " + place_of(warp, earlier));
}

// Returns whether threads stored these bytes and no proxy fence has come since, as far as is seen.
bool lacks_fence(const Seen& seen, const Trace& write, uint8_t bytes) {
  return write.time != 0 && (write.bytes & bytes) != 0 && !write.copied &&
         write.time > seen.fenced.at(write.agent);
}

void report_fence(Warp& warp, uint32_t address, const char* does, const Trace& write) {
  report(warp, Problem::kMissingFence, -1, address,
         std::string("a copy ") + does + " shared memory (byte " +
             std::to_string(address - kSharedBase) +
             ") without fence.proxy.async since the store by " + place_of(warp, write));
}

// The later of two reads that are not ordered replaces the one that it knows of, if any.
void remember_read(const ClusterRaces& races, Word& word, const Trace& now) {
  for (Trace& read : word.read) {
    if (read.time == 0 || (read.agent == now.agent && read.lane == now.lane) ||
        (read.agent != now.agent && read.time <= races.warps[now.agent].all.at(read.agent))) {
      read = now;
      return;
    }
  }
  word.read[1] = word.read[0];
  word.read[0] = now;
}

// Calls visit(word, bits) for each word of a range, with the bytes of it that are meant.
template <class Visit>
void for_words(Races& races, uint32_t address, uint32_t bytes, Visit visit) {
  for (uint32_t at = address; at < address + bytes;) {
    const uint32_t end = std::min((at | 3) + 1, address + bytes);
    visit(races.words[at / 4], static_cast<uint8_t>(((1u << (end - at)) - 1) << (at & 3)));
    at = end;
  }
}

// Something else comes over a word: all stores of the same bytes must be over.
void forget_equal(Warp& warp, Races& block, const Word& word, int lane, uint32_t address) {
  if (block.equal.empty()) return;
  const auto found = block.equal.find(&word);
  if (found == block.equal.end()) return;
  for (const Trace& write : found->second) {
    if (!is_seen(*races_of(*warp.block), agent_of(warp), kWholeWarp, write, 0xf)) {
      report_race(warp, lane, address, "a store", "store", write);
    }
  }
  block.equal.erase(found);
}

void note_lane(Warp& warp, ClusterRaces& races, size_t agent, int lane, uint32_t given,
               uint32_t bytes, Kind kind) {
  uint32_t address = given;
  Block* block = block_of(warp, &address);
  if (block == nullptr || !block->races) return;
  const auto own = static_cast<uint8_t>(lane);
  const bool reads_strongly = kind == Kind::kAcquire;
  const bool writes = kind != Kind::kRead && !reads_strongly;
  const bool atomic = kind == Kind::kAtomic || reads_strongly;
  Trace now;
  now.time = races.warps[agent].all.at(agent);
  now.epoch = races.epochs[agent];
  now.pc = warp.pc;
  now.agent = static_cast<uint16_t>(agent);
  now.lane = own;
  now.atomic = atomic;
  for_words(*block->races, address, bytes, [&](Word& word, uint8_t bits) {
    now.bytes = bits;
    const bool harmless =
        (atomic && word.write.atomic) || (word.write.pc == warp.pc && word.write.agent == agent);
    if (kind == Kind::kWriteEqual && bits == 0xf) {
      if (!is_seen(races, agent, own, word.write, bits)) {
        block->races->equal[&word].push_back(word.write);
      }
      word.write = now;
      return;
    }
    const Trace& write =
        writes ? word.write : seen_write(races, *block->races, agent, own, word, bits);
    if (!harmless && !is_seen(races, agent, own, write, bits)) {
      report_race(warp, lane, given, writes ? "a store" : "a load", "store", write);
    }
    if (!writes) return remember_read(races, word, now);
    forget_equal(warp, *block->races, word, lane, given);
    for (Trace& read : word.read) {
      if ((read.pc == warp.pc && read.agent == agent) || (atomic && read.atomic)) continue;
      if (!is_seen(races, agent, own, read, bits)) {
        report_race(warp, lane, given, "a store", "load", read);
      }
    }
    if (word.write.agent == now.agent && word.write.time == now.time &&
        word.write.lane != now.lane) {
      now.bytes |= word.write.bytes;  // neighbours that share a word
    }
    word.write = now;
    for (Trace& read : word.read) {
      if (read.bytes & bits) read = Trace();
    }
  });
}

}  // namespace

void start_races(Block& block) {
  Cluster& cluster = *block.cluster;
  if (!cluster.races) {
    cluster.races = std::make_unique<ClusterRaces>();
    ClusterRaces& all = *cluster.races;
    all.number = block.number;
    all.agents = cluster.blocks.size() * block.warps.size();
    all.warps.resize(all.agents);
    all.epochs.assign(all.agents, 1);
    for (size_t agent = 0; agent < all.agents; ++agent) all.warps[agent].all.set(agent, 1);
  }
  block.races = std::make_unique<Races>(block.shared_end);
}

void note_shared(Warp& warp, uint32_t lanes, const uint32_t* addresses, uint32_t bytes, Kind kind) {
  ClusterRaces& races = *races_of(*warp.block);
  const size_t agent = agent_of(warp);
  for (; lanes != 0; lanes &= lanes - 1) {
    const int lane = __builtin_ctz(lanes);
    note_lane(warp, races, agent, lane, addresses[lane], bytes, kind);
  }
}

bool note_async_read(Warp& warp, Block& block, uint32_t address, uint32_t bytes, bool reports) {
  bool good = true;
  ClusterRaces& races = *races_of(block);
  const size_t agent = agent_of(warp);
  const Seen& seen = races.warps[agent];
  Trace now;
  now.time = seen.all.at(agent);
  now.epoch = races.epochs[agent];
  now.pc = warp.pc;
  now.agent = static_cast<uint16_t>(agent);
  now.lane = kWholeWarp;
  now.multiplied = !reports;
  for_words(*block.races, address, bytes, [&](Word& word, uint8_t bits) {
    now.bytes = bits;
    const Trace& write = seen_write(races, *block.races, agent, kWholeWarp, word, bits);
    if (!is_seen(races, agent, kWholeWarp, write, bits)) {
      good = false;
      if (reports) report_race(warp, -1, address, "a copy", "store", write);
    } else if (lacks_fence(seen, write, bits)) {
      good = false;
      if (!reports) return;
      report_fence(warp, address, "reads", write);
    }
    remember_read(races, word, now);
  });
  return good;
}

void load_begins(Warp& warp, Block& block, uint32_t address, uint32_t bytes, bool by_threads) {
  if (!block.races) return;
  ClusterRaces& races = *races_of(block);
  const size_t agent = agent_of(warp);
  for_words(*block.races, address, bytes, [&](Word& word, uint8_t bits) {
    forget_equal(warp, *block.races, word, -1, address);
    if (!is_seen(races, agent, kWholeWarp, word.write, bits)) {
      report_race(warp, -1, address, "a copy to a place", "store", word.write);
    } else if (!by_threads && lacks_fence(races.warps[agent], word.write, bits)) {
      report_fence(warp, address, "writes", word.write);
    }
    for (const Trace& read : word.read) {
      if (read.multiplied && !warp.run->options.report_overwritten_products) continue;
      if (!is_seen(races, agent, kWholeWarp, read, bits)) {
        report_race(warp, -1, address, "a copy to a place", "load", read);
      }
    }
  });
}

void load_written(Block& block, const BulkLoad& load) {
  for (MemoryBarrier& barrier : block.memory_barriers) {
    if (barrier.offset != load.barrier) continue;
    Trace now;
    now.time = barrier.time + 1;  // complete with this phase
    now.pc = load.pc;
    now.agent = static_cast<uint16_t>(barrier.agent);
    now.lane = kWholeWarp;
    now.copied = true;
    for (const BulkLoad::Piece& piece : load.pieces) {
      for_words(*block.races, piece.to, piece.bytes, [&](Word& word, uint8_t bits) {
        now.bytes = bits;
        word.write = now;
        word.read[0] = word.read[1] = Trace();
      });
    }
    return;
  }
}

void barrier_reached(Warp& warp, uint32_t id) {
  if (!warp.block->races) return;
  ClusterRaces& races = *races_of(*warp.block);
  const size_t agent = agent_of(warp);
  warp.block->races->barriers[id].join(races.warps[agent]);
  advance(races, agent);
}

void barrier_passed(Block& block, uint32_t id) {
  if (!block.races) return;
  ClusterRaces& races = *races_of(block);
  for (const auto& warp : block.warps) {
    for (const Fragment& fragment : warp->fragments) {
      if (fragment.wait != Wait::kBarrier || fragment.detail != id) continue;
      races.warps[agent_of(*warp)].join(block.races->barriers[id]);
      ++races.epochs[agent_of(*warp)];
    }
  }
  block.races->barriers[id] = Seen();
}

void cluster_reached(Warp& warp) {
  if (!warp.block->races) return;
  ClusterRaces& races = *races_of(*warp.block);
  races.cluster.join(races.warps[agent_of(warp)]);
  advance(races, agent_of(warp));
}

void cluster_passed(Cluster& cluster) {
  if (cluster.races) cluster.races->cluster_complete = cluster.races->cluster;
}

void cluster_waited(Warp& warp) {
  if (!warp.block->races) return;
  ClusterRaces& races = *races_of(*warp.block);
  races.warps[agent_of(warp)].join(races.cluster_complete);
  ++races.epochs[agent_of(warp)];
}

void warp_synced(Warp& warp, uint32_t) {
  if (warp.block->races) ++races_of(*warp.block)->epochs[agent_of(warp)];
}

void barrier_made(Warp& warp, MemoryBarrier& barrier) {
  if (!warp.block->races || barrier.agent >= 0) return;
  barrier.agent = static_cast<int>(races_of(*warp.block)->agents++);
}

void phase_arrived(Warp& warp, Block& block, MemoryBarrier& barrier) {
  if (!block.races) return;
  ClusterRaces& races = *races_of(block);
  races.memory_barriers[barrier.agent].arriving.join(races.warps[agent_of(warp)]);
  advance(races, agent_of(warp));
}

void phase_passed(Block& block, MemoryBarrier& barrier) {
  if (!block.races) return;
  ClusterRaces::Phases& phases = races_of(block)->memory_barriers[barrier.agent];
  ++barrier.time;
  const auto agent = static_cast<size_t>(barrier.agent);
  phases.complete.join(phases.arriving);
  phases.complete.all.set(agent, barrier.time);
  phases.complete.fenced.set(agent, barrier.time);
}

void phase_seen(Warp& warp, Block& block, MemoryBarrier& barrier) {
  if (!block.races) return;
  ClusterRaces& races = *races_of(block);
  races.warps[agent_of(warp)].join(races.memory_barriers[barrier.agent].complete);
}

void proxy_fenced(Warp& warp) {
  if (!warp.block->races) return;
  ClusterRaces& races = *races_of(*warp.block);
  Seen& seen = races.warps[agent_of(warp)];
  seen.fenced.join(seen.all);
  advance(races, agent_of(warp));
}

}  // namespace fk::softgpu
