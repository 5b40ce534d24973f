// This file executes mbarrier: barriers in shared memory, which threads and copies arrive at.
#include "exec/memory_barrier.h"

#include <algorithm>

#include "check/access.h"
#include "check/race_hooks.h"
#include "exec/bulk_loads.h"
#include "exec/memory_ops.h"
#include "exec/tables.h"

namespace fk::softgpu {

namespace {

// Returns the barrier at an address, with its block. Without one, a report ends the launch.
MemoryBarrier& barrier_at(Warp& warp, int lane, uint32_t address, Block** block) {
  uint32_t offset = address;
  *block = block_of(warp, &offset);
  if (*block != nullptr) {
    for (MemoryBarrier& barrier : (*block)->memory_barriers) {
      if (barrier.offset == offset) return barrier;
    }
  }
  report(warp, Problem::kBarrier, lane, address, "there is no initialised mbarrier");
  throw Abandoned();
}

void complete_if_done(Block& block, MemoryBarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  phase_passed(block, barrier);
  ++barrier.phase;
  barrier.pending = barrier.expected;
  barrier.waits_failed = 0;
  block.changed = true;
}

uint32_t address_in(const Warp& warp, const Instruction& i, int operand, int lane) {
  const bool wide = (i.wide_address >> operand) & 1;
  const uint32_t base = wide ? static_cast<uint32_t>(lanes_at<uint64_t>(warp, i.at[operand])[lane])
                             : lanes_at(warp, i.at[operand])[lane];
  return base + static_cast<uint32_t>(i.immediate);
}

void initialise(Warp& warp, const Instruction& i, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) {
    const uint32_t address = address_in(warp, i, 0, lane);
    const uint32_t count = lanes_at(warp, i.at[1])[lane];
    uint64_t pointers[kLanes];
    uint32_t addresses[kLanes] = {};
    addresses[lane] = address;
    if (check_shared(warp, 1u << lane, addresses, 8, false, pointers) == 0) return;
    if (count == 0 || count >= (1u << 20)) {
      return report(warp, Problem::kBarrier, lane, address,
                    "an mbarrier for " + std::to_string(count) + " arrivals");
    }
    mark_written(warp, lane, address, 8);
    auto& all = warp.block->memory_barriers;
    auto known = std::find_if(all.begin(), all.end(),
                              [&](const MemoryBarrier& b) { return b.offset == address; });
    if (known == all.end()) known = all.insert(all.end(), MemoryBarrier());
    const int agent = known->agent;
    const uint32_t time = known->time;
    *known = MemoryBarrier();
    known->offset = address;
    known->agent = agent;
    known->time = time;
    known->expected = known->pending = count;
    barrier_made(warp, *known);
  });
}

void arrive_one(Warp& warp, int lane, uint32_t address, uint32_t count, uint32_t bytes) {
  Block* block;
  MemoryBarrier& barrier = barrier_at(warp, lane, address, &block);
  if (count > barrier.pending) {
    return report(warp, Problem::kBarrier, lane, address,
                  "more arrivals in a phase than the " + std::to_string(barrier.expected) +
                      " that the mbarrier was initialised for");
  }
  barrier.bytes += bytes;
  barrier.pending -= count;
  phase_arrived(warp, *block, barrier);
  block->changed = warp.block->changed = true;
  complete_if_done(*block, barrier);
}

// Executes mbarrier.arrive state, [address]{, count}
void arrive(Warp& warp, const Instruction& i, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) {
    const uint32_t count = i.at[2] == kNoPlace ? 1 : lanes_at(warp, i.at[2])[lane];
    arrive_one(warp, lane, address_in(warp, i, 1, lane), count, 0);
  });
}
// Executes mbarrier.arrive.expect_tx state, [address], bytes
void arrive_and_expect(Warp& warp, const Instruction& i, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) {
    arrive_one(warp, lane, address_in(warp, i, 1, lane), 1, lanes_at(warp, i.at[2])[lane]);
  });
}
// Executes mbarrier.expect_tx [address], bytes
void expect(Warp& warp, const Instruction& i, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) {
    arrive_one(warp, lane, address_in(warp, i, 0, lane), 0, lanes_at(warp, i.at[1])[lane]);
  });
}

// Executes mbarrier.try_wait.parity p, [address], parity
void try_wait(Warp& warp, const Instruction& i, uint32_t lanes) {
  uint32_t passed = 0;
  for_lanes(lanes, [&](int lane) {
    const uint32_t address = address_in(warp, i, 1, lane);
    const uint32_t parity = lanes_at(warp, i.at[2])[lane];
    Block* block;
    MemoryBarrier& barrier = barrier_at(warp, lane, address, &block);
    const auto done = [&] { return (barrier.phase & 1) != parity; };
    if (parity > 1) report(warp, Problem::kBarrier, lane, address, "a parity other than 0 and 1");
    if (!done()) {
      if (barrier.waits_failed++ == 0) ++warp.run->counts.barrier_waits;
      // Copies are as late as they can be: they come when somebody has waited in vain before.
      const Run& run = *warp.run;
      const bool now =
          barrier.waits_failed > 1 || (run.options.seed != 0 && warp.run->draw() % 2 == 0);
      if (now) finish_loads(*block, barrier.offset);
    }
    if (!done()) return;
    passed |= 1u << lane;
    phase_seen(warp, *block, barrier);
  });
  put_predicate(warp, i.at[0], passed, lanes);
  warp.yield = passed != lanes;
}

void invalidate(Warp& warp, const Instruction& i, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) {
    Block* block;
    const MemoryBarrier& barrier = barrier_at(warp, lane, address_in(warp, i, 0, lane), &block);
    block->memory_barriers.erase(block->memory_barriers.begin() +
                                 (&barrier - block->memory_barriers.data()));
  });
}

}  // namespace

bool has_barrier(const Block& block, uint32_t offset) {
  return std::any_of(block.memory_barriers.begin(), block.memory_barriers.end(),
                     [&](const MemoryBarrier& b) { return b.offset == offset; });
}

void complete_bytes(Warp& warp, Block& block, uint32_t offset, uint32_t bytes) {
  for (MemoryBarrier& barrier : block.memory_barriers) {
    if (barrier.offset != offset) continue;
    barrier.bytes -= bytes;
    complete_if_done(block, barrier);
    return;
  }
  report(warp, Problem::kBarrier, -1, offset,
         "a copy completes on an mbarrier that is no longer there");
}

void add_memory_barriers(Operations& table) {
  for (const char* space : {"", ".shared", ".shared::cta"}) {
    const std::string end = std::string(space) + ".b64";
    table["mbarrier.init" + end] = {"a r", initialise, Class::kBarrier};
    table["mbarrier.inval" + end] = {"a", invalidate, Class::kBarrier};
    for (const char* order : {"", ".release.cta"}) {
      table[std::string("mbarrier.arrive") + order + end] = {"=q a r?", arrive, Class::kBarrier};
      table[std::string("mbarrier.arrive.expect_tx") + order + end] = {"=q a r", arrive_and_expect,
                                                                       Class::kBarrier};
    }
    table["mbarrier.expect_tx.relaxed.cta" + end] = {"a r", expect, Class::kBarrier};
    for (const char* wait : {"try_wait", "test_wait"}) {
      for (const char* order : {"", ".acquire.cta", ".acquire.cluster"}) {
        table[std::string("mbarrier.") + wait + ".parity" + order + end] = {
            "=p a r r?", try_wait, Class::kBarrier, Control::kMayYield};
      }
    }
  }
  table["mbarrier.arrive.release.cluster.shared::cluster.b64"] = {"=q a r?", arrive,
                                                                  Class::kBarrier};
  table["mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64"] = {
      "=q a r", arrive_and_expect, Class::kBarrier};
}

}  // namespace fk::softgpu
