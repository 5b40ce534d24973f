// This file executes fences, and what else orders asynchronous work, and calls the tables of the
// rest of it.
#include <algorithm>

#include "check/race_hooks.h"
#include "exec/lanes.h"
#include "exec/tables.h"

namespace fk::softgpu {

namespace {

void nothing(Warp&, const Instruction&, uint32_t) {}
void fence_proxy(Warp& warp, const Instruction&, uint32_t) { proxy_fenced(warp); }

// Executes mapa, which gives the address of the same place in another block.
void map_address(Warp& warp, const Instruction& i, uint32_t lanes) {
  const uint32_t* address = lanes_at(warp, i.at[1]);
  const uint32_t* rank = lanes_at(warp, i.at[2]);
  const auto blocks = static_cast<uint32_t>(warp.block->cluster->blocks.size());
  uint32_t result[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    if (has(lanes, l) && rank[l] >= blocks) {
      report(warp, Problem::kOutOfBounds, l, rank[l],
             "mapa to block " + std::to_string(rank[l]) + " of a cluster of " +
                 std::to_string(blocks));
    }
    result[l] = (address[l] & kSharedOffsetMask) | ((rank[l] + 1) << kClusterShift);
  }
  put(lanes_to<uint32_t>(warp, i.at[0]), result, lanes);
}

// Returns how many registers a thread has before setmaxnreg: as many as the block's place on the
// multiprocessor holds, which is what a kernel that uses setmaxnreg is compiled to.
int registers_at_start(const Block& block) {
  constexpr int kMost = 256, kStep = 8;
  const int blocks = std::max(block.run->program->info.min_blocks, 1);
  const int threads = static_cast<int>(block.warps.size()) * kLanes;
  const int fit = block.run->chip->registers_per_multiprocessor / (blocks * threads);
  return std::min(fit / kStep * kStep, kMost);
}

void set_registers(Warp& warp, const Instruction& i, uint32_t) {
  const auto wanted = static_cast<int>(i.number);
  if (wanted % 8 != 0 || wanted < 24 || wanted > 256) {
    report(warp, Problem::kOther, -1, 0,
           "setmaxnreg to " + std::to_string(wanted) +
               " registers: a multiple of 8 from 24 to 256 is expected");
  }
  const Block& block = *warp.block;
  const int start = registers_at_start(block);
  warp.registers = wanted;
  int sum = 0;
  for (const auto& other : block.warps) {
    if (other->registers == 0) return;  // it may give some back
    sum += other->registers - start;
  }
  if (sum <= 0) return;
  report(warp, Problem::kDeadlock, -1, 0,
         "setmaxnreg waits for ever: the warps of the block ask for " +
             std::to_string(sum * kLanes) + " registers more than the " + std::to_string(start) +
             " a thread that they had");
}

}  // namespace

void add_async_operations(Operations& table) {
  add_lane_copies(table);
  add_memory_barriers(table);
  add_bulk_loads(table);
  add_bulk_stores(table);
  for (const char* name : {"fence.proxy.async", "fence.proxy.async.shared::cta",
                           "fence.proxy.async.shared::cluster", "fence.proxy.async.global"}) {
    table[name] = {"", fence_proxy, Class::kFence};
  }
  for (const char* name :
       {"membar.gl", "membar.sys", "membar.cta", "fence.acq_rel.gpu", "fence.acq_rel.cta",
        "fence.acq_rel.sys", "fence.acq_rel.cluster", "fence.sc.gpu", "fence.sc.cta"}) {
    table[name] = {"", nothing, Class::kFence};
  }
  table["fence.mbarrier_init.release.cluster"] = {"", nothing, Class::kFence};
  table["griddepcontrol.launch_dependents"] = {"", nothing, Class::kOther};
  table["griddepcontrol.wait"] = {
      "", [](Warp& warp, const Instruction&, uint32_t) { warp.waited_for_grid = true; },
      Class::kOther};
  table["mapa.shared::cluster.u32"] = {"=r r r", map_address, Class::kInteger};
  for (const char* way : {"inc", "dec"}) {
    table[std::string("setmaxnreg.") + way + ".sync.aligned.u32"] = {
        "i", set_registers, Class::kOther, Control::kConverge};
  }
}

}  // namespace fk::softgpu
