// This is the loop that runs a warp. Lanes that are at different places are fragments of it: the
// one that is furthest behind runs, so that they meet again. What has to wait stops, and the others
// go on.
#include "exec/barriers.h"
#include "exec/lanes.h"
#include "exec/tables.h"

namespace fk::softgpu {

namespace {

// Returns the lanes that must be at a converging instruction before it can run.
inline uint32_t lanes_wanted(const Warp& warp, const Instruction& i, uint32_t lanes) {
  if (i.control == Control::kConverge) return warp.live;
  return lanes_at(warp, i.at[i.target])[first_lane(lanes)] & warp.live;
}

// Runs one fragment. Returns whether the warp may go on with another one.
inline bool run_fragment(Warp& warp, size_t which, uint64_t budget, uint64_t* done) {
  const Instruction* code = warp.run->program->code.data();
  Executed* executed = warp.run->executed.data();
  uint32_t pc = warp.fragments[which].pc;
  const uint32_t lanes = warp.fragments[which].lanes;
  const bool alone = warp.fragments.size() == 1;
  const uint32_t meet = alone ? ~0u : next_fragment_pc(warp, pc);
  uint64_t left = budget - *done;
  bool go_on = true;
  for (; left > 0; --left) {
    const Instruction& i = code[pc];
    uint32_t active = lanes;
    if (i.guard >= 0) {
      const uint32_t guard = warp.predicates[i.guard];
      active &= i.guard_negated ? ~guard : guard;
    }
    executed[pc].warps += 1;
    executed[pc].lanes += static_cast<uint32_t>(__builtin_popcount(active));
    warp.pc = pc;
    if (__builtin_expect(i.control == Control::kNone, 1)) {
      if (active != 0) i.execute(warp, i, active);
      ++pc;
    } else if (i.control == Control::kBranch) {
      if (active == lanes) {
        pc = i.target;
        if (alone) continue;
        break;
      }
      ++pc;
      if (active != 0) {
        warp.fragments[which].lanes = lanes & ~active;
        warp.fragments[which].pc = pc;
        warp.fragments.push_back({i.target, active, Wait::kNone, 0});
        --left;
        *done = budget - left;
        return true;
      }
    } else if (i.control == Control::kExit) {
      ++pc;
      if (active != 0) {
        end_lanes(warp, active);
        warp.fragments[which].lanes = lanes & ~active;
        break;
      }
    } else if (active == 0) {
      ++pc;
    } else if (i.control == Control::kConverge || i.control == Control::kConvergeMember) {
      const uint32_t wanted = lanes_wanted(warp, i, active);
      if ((wanted & ~active) != 0) {
        executed[pc].warps -= 1;  // it will be tried again
        executed[pc].lanes -= static_cast<uint32_t>(__builtin_popcount(active));
        warp.fragments[which].wait = Wait::kConverge;
        warp.fragments[which].detail = wanted;
        break;
      }
      i.execute(warp, i, active);
      ++pc;
    } else if (i.control == Control::kMayYield) {
      i.execute(warp, i, active);
      ++pc;
      if (warp.yield) {
        warp.yield = false;
        ++warp.turn;
        go_on = false;
        --left;
        break;
      }
    } else {
      const bool passed = i.control == Control::kBarrier ? arrive_at_barrier(warp, i, which, active)
                                                         : wait_for_cluster(warp, which, active);
      if (passed) ++pc;
      if (!passed || !alone) {  // the fragment may have grown
        --left;
        break;
      }
    }
    if (pc >= meet) {
      --left;
      break;
    }
  }
  warp.fragments[which].pc = pc;
  *done = budget - left;
  return go_on;
}

}  // namespace

uint64_t run_warp(Warp& warp, uint64_t budget) {
  uint64_t done = 0;
  while (done < budget) {
    const int which = choose_fragment(warp);
    if (which < 0) return done;
    if (!run_fragment(warp, static_cast<size_t>(which), budget, &done)) return done;
  }
  ++warp.slices;
  return done;
}

const Operations& operations() {
  static const Operations made = [] {
    Operations table;
    add_integer_operations(table);
    add_float_operations(table);
    add_memory_operations(table);
    add_warp_operations(table);
    add_matrix_operations(table);
    add_wgmma_operations(table);
    add_control_operations(table);
    add_async_operations(table);
    return table;
  }();
  return made;
}

}  // namespace fk::softgpu
