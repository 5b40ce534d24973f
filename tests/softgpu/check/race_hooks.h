// This file declares what the interpreter tells the race checks; see races.h and global_races.h.
// Without them (Block::races, Run::global_races) all of these do nothing.
#pragma once

#include "check/races.h"
#include "exec/machine.h"

namespace fk::softgpu {

// The block begins; from now on its shared memory is watched.
void start_races(Block& block);

// Lanes access shared memory, by addresses as the kernel has them.
void note_shared(Warp& warp, uint32_t lanes, const uint32_t* addresses, uint32_t bytes, Kind kind);
// Copies and multiplications, asynchronous to the threads, read shared memory of a block. Returns
// whether they may; with `reports` the reason is reported where they may not.
bool note_async_read(Warp& warp, Block& block, uint32_t address, uint32_t bytes, bool reports);
// A copy will write shared memory from now on: one of the copy engine, or with `by_threads` one of
// threads (st.async), which needs no proxy fence.
void load_begins(Warp& warp, Block& block, uint32_t address, uint32_t bytes, bool by_threads);
// It has.
void load_written(Block& block, const BulkLoad& load);

// A warp is at a barrier of its block; all that wait there go on; and the same happens in clusters.
void barrier_reached(Warp& warp, uint32_t id);
void barrier_passed(Block& block, uint32_t id);
void cluster_reached(Warp& warp);
void cluster_passed(Cluster& cluster);
void cluster_waited(Warp& warp);
// The lanes of a warp have met at bar.warp.sync.
void warp_synced(Warp& warp, uint32_t lanes);
// An mbarrier is initialised; a warp arrives; the phase is complete; a warp has seen that.
void barrier_made(Warp& warp, MemoryBarrier& barrier);
void phase_arrived(Warp& warp, Block& block, MemoryBarrier& barrier);
void phase_passed(Block& block, MemoryBarrier& barrier);
void phase_seen(Warp& warp, Block& block, MemoryBarrier& barrier);
// Is called for fence.proxy.async.
void proxy_fenced(Warp& warp);

// Lanes access global memory, or a copy does that a lane started.
void note_global(Warp& warp, uint32_t lanes, const uint64_t* addresses, uint32_t bytes, Kind kind);
void note_global_range(Warp& warp, int lane, uint64_t begin, uint64_t bytes, Kind kind);
// Global memory is touched before griddepcontrol.wait, by a kernel launched early.
void report_early(Warp& warp, uint32_t lanes, const uint64_t* addresses);

}  // namespace fk::softgpu
