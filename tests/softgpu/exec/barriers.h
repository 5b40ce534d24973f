// This file declares how lanes wait: for each other, at barriers of the block, at those of the
// cluster.
#pragma once

#include "exec/machine.h"

namespace fk::softgpu {

// Returns the fragment to run next, after those that met were joined; -1 where all wait or have
// ended.
int choose_fragment(Warp& warp);
// Returns the nearest place behind `pc` where another fragment of the warp is.
uint32_t next_fragment_pc(const Warp& warp, uint32_t pc);
// The lanes have ended.
void end_lanes(Warp& warp, uint32_t lanes);

// Executes bar.sync, bar.arrive and bar.red. Returns whether the lanes go on at once; else they
// wait.
bool arrive_at_barrier(Warp& warp, const Instruction& instruction, size_t fragment, uint32_t lanes);
// Execute barrier.cluster.arrive and .wait.
void arrive_at_cluster(Warp& warp, const Instruction& instruction, uint32_t lanes);
bool wait_for_cluster(Warp& warp, size_t fragment, uint32_t lanes);

// Tells where the lanes of a warp are and what they wait for, in a line.
std::string whereabouts(const Warp& warp);

// Reports the lanes of a warp that wait for lanes which can no longer come. Returns whether there
// are any.
bool report_divergence(Warp& warp);

}  // namespace fk::softgpu
