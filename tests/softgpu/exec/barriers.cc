#include "exec/barriers.h"

#include <algorithm>

#include "check/race_hooks.h"
#include "exec/finish.h"

namespace fk::softgpu {

namespace {

uint32_t first(uint32_t lanes) { return static_cast<uint32_t>(__builtin_ctz(lanes)); }
int count(uint32_t lanes) { return __builtin_popcount(lanes); }

uint32_t value_at(const Warp& warp, Place place, uint32_t lane) {
  const uint8_t* at = warp.base[place & kConstantBit] + (place & ~kConstantBit);
  return reinterpret_cast<const uint32_t*>(at)[lane];
}

const InstructionText& text_at(const Warp& warp, uint32_t pc) {
  return warp.run->program->texts[pc];
}

bool is_reduction(const std::string& mnemonic) { return mnemonic.compare(0, 7, "bar.red") == 0; }

// Writes what bar.red gives to the lanes that waited.
void give_result(Warp& warp, const NamedBarrier& barrier, uint32_t pc, uint32_t lanes) {
  const std::string& mnemonic = text_at(warp, pc).mnemonic;
  if (!is_reduction(mnemonic)) return;
  const Place place = warp.run->program->code[pc].at[0];
  if (mnemonic == "bar.red.popc.u32") {
    auto* to = reinterpret_cast<uint32_t*>(warp.base[0] + place);
    for (int l = 0; l < kLanes; ++l) to[l] = (lanes >> l) & 1 ? barrier.count : to[l];
    return;
  }
  const uint32_t result = mnemonic == "bar.red.and.pred" ? barrier.all : barrier.any;
  uint32_t& to = warp.predicates[place];
  to = (to & ~lanes) | (result != 0 ? lanes : 0);
}

void release(Block& block, uint32_t id) {
  NamedBarrier& barrier = block.barriers[id];
  barrier_passed(block, id);
  for (auto& warp : block.warps) {
    for (Fragment& fragment : warp->fragments) {
      if (fragment.wait != Wait::kBarrier || fragment.detail != id) continue;
      if (fragment.lanes != warp->live) {
        warp->pc = fragment.pc;
        report(*warp, Problem::kBarrier, static_cast<int>(first(fragment.lanes)), 0,
               "only some lanes of the warp are at this barrier, which all must reach together");
      }
      give_result(*warp, barrier, fragment.pc, fragment.lanes);
      fragment.wait = Wait::kNone;
      ++fragment.pc;
    }
  }
  barrier = {};
  block.changed = true;
}

int threads_wanted(const Block& block, const NamedBarrier& barrier) {
  return barrier.expected > 0 ? barrier.expected : block.threads - block.exited;
}

void complete_cluster(Cluster& cluster) {
  ++cluster.phase;
  cluster.arrived = 0;
  cluster_passed(cluster);
  for (Block* block : cluster.blocks) {
    block->changed = true;
    for (auto& warp : block->warps) {
      for (Fragment& fragment : warp->fragments) {
        if (fragment.wait != Wait::kCluster) continue;
        fragment.wait = Wait::kNone;
        ++fragment.pc;
        cluster_waited(*warp);
      }
    }
  }
}

}  // namespace

int choose_fragment(Warp& warp) {
  std::vector<Fragment>& all = warp.fragments;
  if (all.size() == 1 && all[0].wait == Wait::kNone && all[0].lanes != 0) return 0;
  all.erase(std::remove_if(all.begin(), all.end(), [](const Fragment& f) { return f.lanes == 0; }),
            all.end());
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].wait > Wait::kConverge) continue;
    for (size_t j = i + 1; j < all.size();) {
      if (all[j].pc == all[i].pc && all[j].wait <= Wait::kConverge) {
        all[i].lanes |= all[j].lanes;
        all[i].wait = Wait::kNone;
        all.erase(all.begin() + static_cast<std::ptrdiff_t>(j));
      } else {
        ++j;
      }
    }
    if (all[i].wait == Wait::kConverge && (all[i].detail & warp.live & ~all[i].lanes) == 0) {
      all[i].wait = Wait::kNone;
    }
  }
  std::vector<int> ready;
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].wait == Wait::kNone) ready.push_back(static_cast<int>(i));
  }
  if (ready.empty()) return -1;
  std::sort(ready.begin(), ready.end(), [&](int a, int b) { return all[a].pc < all[b].pc; });
  // A fragment that waits in a loop must not keep the others from what it waits for.
  constexpr uint32_t kPatience = 16;
  const uint32_t turn = warp.turn + warp.slices / kPatience;
  return ready[turn % ready.size()];
}

uint32_t next_fragment_pc(const Warp& warp, uint32_t pc) {
  uint32_t next = ~0u;
  for (const Fragment& fragment : warp.fragments) {
    if (fragment.pc > pc) next = std::min(next, fragment.pc);
  }
  return next;
}

void end_lanes(Warp& warp, uint32_t lanes) {
  Block& block = *warp.block;
  finish_lanes(warp, lanes);
  warp.live &= ~lanes;
  block.exited += count(lanes);
  block.changed = true;
  if (warp.live == 0) --block.warps_left;
  for (uint32_t id = 0; id < 16; ++id) {
    const NamedBarrier& barrier = block.barriers[id];
    if (barrier.arrived > 0 && barrier.expected == 0 &&
        barrier.arrived >= threads_wanted(block, barrier)) {
      release(block, id);
    }
  }
  Cluster& cluster = *block.cluster;
  cluster.threads -= count(lanes);
  if (cluster.arrived > 0 && cluster.arrived >= cluster.threads) complete_cluster(cluster);
}

bool arrive_at_barrier(Warp& warp, const Instruction& instruction, size_t fragment,
                       uint32_t lanes) {
  Block& block = *warp.block;
  const std::string& mnemonic = text_at(warp, warp.pc).mnemonic;
  const uint32_t lane = first(lanes);
  const uint32_t id = value_at(warp, instruction.at[1], lane);
  const auto fail = [&](const std::string& what) {
    report(warp, Problem::kBarrier, static_cast<int>(lane), 0, what);
    throw Abandoned();
  };
  if (id > 15) fail("there is no barrier " + std::to_string(id));
  const bool all = instruction.at[2] == kNoPlace;
  const int wanted = all ? 0 : static_cast<int>(value_at(warp, instruction.at[2], lane));
  if (!all && (wanted <= 0 || wanted % kLanes != 0)) {
    fail("a barrier for " + std::to_string(wanted) + " threads, which is no multiple of 32");
  }
  NamedBarrier& barrier = block.barriers[id];
  if (barrier.arrived > 0 && barrier.expected != wanted) {
    fail("barrier " + std::to_string(id) + " for " + std::to_string(wanted) +
         " threads, where others are at it for " + std::to_string(barrier.expected));
  }
  barrier.expected = wanted;
  // A warp that is not full counts as one that is, where the kernel gives a number.
  barrier.arrived += all ? count(lanes) : lanes == warp.live ? kLanes : count(lanes);
  ++warp.run->counts.barriers;
  if (is_reduction(mnemonic)) {
    const uint32_t bits = warp.predicates[instruction.at[3]];
    const uint32_t set = ((instruction.negated >> 3) & 1 ? ~bits : bits) & lanes;
    barrier.any |= set != 0;
    barrier.all &= set == lanes;
    barrier.count += static_cast<uint32_t>(count(set));
  }
  barrier_reached(warp, id);
  const bool waits = mnemonic != "bar.arrive";
  const int enough = threads_wanted(block, barrier);
  if (barrier.arrived > enough && !all) {
    fail("more than " + std::to_string(enough) + " threads arrive at barrier " +
         std::to_string(id));
  }
  if (waits) {
    Fragment& own = warp.fragments[fragment];
    own.pc = warp.pc;
    own.wait = Wait::kBarrier;
    own.detail = id;
    for (size_t other = 0; other < warp.fragments.size(); ++other) {  // those that came earlier
      Fragment& earlier = warp.fragments[other];
      if (other == fragment || earlier.wait != Wait::kBarrier || earlier.pc != own.pc) continue;
      own.lanes |= earlier.lanes;
      earlier.lanes = 0;
      earlier.wait = Wait::kNone;
    }
  }
  if (barrier.arrived >= enough) {
    release(block, id);
    if (waits) --warp.fragments[fragment].pc;  // the caller goes on by itself
    return true;
  }
  return !waits;
}

void arrive_at_cluster(Warp& warp, const Instruction&, uint32_t lanes) {
  Cluster& cluster = *warp.block->cluster;
  ++warp.run->counts.barriers;
  warp.cluster_phase = cluster.phase + 1;
  cluster.arrived += count(lanes);
  cluster_reached(warp);
  if (cluster.arrived >= cluster.threads) complete_cluster(cluster);
}

bool wait_for_cluster(Warp& warp, size_t fragment, uint32_t lanes) {
  if (warp.cluster_phase == 0) {
    report(warp, Problem::kBarrier, static_cast<int>(first(lanes)), 0,
           "barrier.cluster.wait without an arrival before it");
    throw Abandoned();
  }
  if (warp.block->cluster->phase >= warp.cluster_phase) {
    cluster_waited(warp);
    return true;
  }
  warp.fragments[fragment].pc = warp.pc;
  warp.fragments[fragment].wait = Wait::kCluster;
  return false;
}

std::string whereabouts(const Warp& warp) {
  std::string text = "warp " + std::to_string(warp.index) + ":";
  for (const Fragment& fragment : warp.fragments) {
    if (fragment.lanes == 0) continue;
    const InstructionText& at = text_at(warp, fragment.pc);
    char lanes[16];
    std::snprintf(lanes, sizeof lanes, "%08x", fragment.lanes);
    text += std::string(" lanes ") + lanes + " at PTX line " + std::to_string(at.line);
    if (at.source_line > 0) text += " (source line " + std::to_string(at.source_line) + ")";
    text += " '" + at.text.substr(0, 60) + "'";
    if (fragment.wait == Wait::kBarrier) {
      const NamedBarrier& barrier = warp.block->barriers[fragment.detail];
      text += " waits at barrier " + std::to_string(fragment.detail) + ", where " +
              std::to_string(barrier.arrived) + " of " +
              std::to_string(threads_wanted(*warp.block, barrier)) + " threads are";
    } else if (fragment.wait == Wait::kConverge) {
      text += " waits for other lanes of its warp";
    } else if (fragment.wait == Wait::kCluster) {
      text += " waits for the cluster";
    } else {
      text += " loops";
    }
    text += ";";
  }
  return text;
}

bool report_divergence(Warp& warp) {
  for (const Fragment& fragment : warp.fragments) {
    if (fragment.wait != Wait::kConverge) continue;
    warp.pc = fragment.pc;
    report(warp, Problem::kBarrier, static_cast<int>(first(fragment.lanes)), 0,
           "an instruction that all lanes of the warp must run together: " + whereabouts(warp));
    return true;
  }
  return false;
}

}  // namespace fk::softgpu
