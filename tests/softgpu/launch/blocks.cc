#include "launch/blocks.h"

#include <cstring>

#include "check/race_hooks.h"

namespace fk::softgpu {

size_t shared_bytes_of(const Program& program, size_t dynamic_shared_bytes) {
  return dynamic_shared_bytes == 0 ? program.info.static_shared_bytes
                                   : program.dynamic_shared - kSharedBase + dynamic_shared_bytes;
}

uint64_t BlockPool::clusters() const {
  uint64_t count = 1;
  for (int d = 0; d < 3; ++d) count *= run_->launch->grid[d] / run_->launch->cluster[d];
  return count;
}

uint64_t BlockPool::blocks_per_cluster() const {
  const uint32_t(&cluster)[3] = run_->launch->cluster;
  return uint64_t{cluster[0]} * cluster[1] * cluster[2];
}

std::unique_ptr<Block> BlockPool::take() {
  const Launch& launch = *run_->launch;
  const Program& program = *run_->program;
  auto block = std::make_unique<Block>();
  block->run = run_;
  block->threads = static_cast<int>(launch.block[0] * launch.block[1] * launch.block[2]);
  const int warps = (block->threads + kLanes - 1) / kLanes;
  const size_t predicates = (static_cast<size_t>(program.predicates) * 4 + 255) / 256 * 256;
  const size_t each = (program.register_bytes + 255) / 256 * 256 + predicates;
  auto registers = aligned_array<uint8_t>(each * static_cast<size_t>(warps));
  std::memset(registers.get(), kPoison, each * static_cast<size_t>(warps));
  for (int w = 0; w < warps; ++w) {
    block->warps.push_back(std::make_unique<Warp>());
    uint8_t* own = registers.get() + each * static_cast<size_t>(w);
    block->warps.back()->predicates = reinterpret_cast<uint32_t*>(own);
    block->warps.back()->base[0] = own + predicates;
  }
  registers_.push_back(std::move(registers));
  const size_t end = kSharedBase + shared_bytes_of(program, launch.dynamic_shared_bytes);
  block->shared_end = static_cast<uint32_t>(end);
  block->shared = aligned_array<uint8_t>(end + 64);
  return block;
}

void BlockPool::fill_specials(Warp& warp) {
  const Launch& launch = *run_->launch;
  const Block& block = *warp.block;
  for (const auto& [which, place] : run_->program->specials) {
    auto* to = reinterpret_cast<uint32_t*>(warp.base[0] + place);
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const uint32_t thread = static_cast<uint32_t>(warp.index) * kLanes + lane;
      const auto value = [&, special = which]() -> uint32_t {
        switch (special) {
          case Special::kThreadX:
            return thread % launch.block[0];
          case Special::kThreadY:
            return thread / launch.block[0] % launch.block[1];
          case Special::kThreadZ:
            return thread / launch.block[0] / launch.block[1];
          case Special::kThreadsX:
          case Special::kThreadsY:
          case Special::kThreadsZ:
            return launch.block[static_cast<int>(special) - static_cast<int>(Special::kThreadsX)];
          case Special::kBlockX:
          case Special::kBlockY:
          case Special::kBlockZ:
            return block.index[static_cast<int>(special) - static_cast<int>(Special::kBlockX)];
          case Special::kBlocksX:
          case Special::kBlocksY:
          case Special::kBlocksZ:
            return launch.grid[static_cast<int>(special) - static_cast<int>(Special::kBlocksX)];
          case Special::kLane:
            return lane;
          case Special::kWarp:
            return static_cast<uint32_t>(warp.index);
          case Special::kWarps:
            return static_cast<uint32_t>(block.warps.size());
          case Special::kClusterRank:
            return block.rank;
          case Special::kClusterSize:
            return static_cast<uint32_t>(block.cluster->blocks.size());
          case Special::kLaneMaskEqual:
            return 1u << lane;
          case Special::kLaneMaskLess:
            return (1u << lane) - 1;
          case Special::kLaneMaskLessEqual:
            return (2u << lane) - 1;
          case Special::kLaneMaskGreater:
            return ~((2u << lane) - 1);
          case Special::kLaneMaskGreaterEqual:
            return ~((1u << lane) - 1);
          case Special::kMultiprocessor:
            return block.number % static_cast<uint32_t>(run_->chip->multiprocessors);
          case Special::kDynamicSharedBytes:
            return static_cast<uint32_t>(launch.dynamic_shared_bytes);
          case Special::kCount:
            break;
        }
        return 0;
      };
      to[lane] = value();
    }
  }
}

void BlockPool::begin(Warp& warp) {
  const int threads = warp.block->threads - warp.index * kLanes;
  warp.live = warp.begun = threads >= kLanes ? kAllLanes : (1u << threads) - 1;
  warp.fragments.assign(1, {0, warp.live, Wait::kNone, 0});
  warp.predicates[0] = 0;
  warp.predicates[1] = kAllLanes;
  warp.yield = warp.waited_for_grid = warp.multiply_fenced = false;
  warp.turn = warp.slices = 0;
  std::memset(warp.copy_group, 0, sizeof warp.copy_group);
  std::memset(warp.bulk_group, 0, sizeof warp.bulk_group);
  warp.copies.clear();
  warp.bulk_stores.clear();
  warp.multiplications.clear();
  warp.multiply_group = 0;
  warp.cluster_phase = 0;
  warp.registers = 0;
  fill_specials(warp);
}

void BlockPool::begin(Block& block) {
  const uint32_t end = block.shared_end;
  std::memset(block.shared.get(), kPoison, end + 64);
  block.readable.assign(end / 32 + 2, 0);
  block.pending.assign(end / 32 + 2, 0);
  block.unreadable = end - kSharedBase;
  block.pending_bytes = 0;
  for (NamedBarrier& barrier : block.barriers) barrier = {};
  block.memory_barriers.clear();
  block.loads.clear();
  block.exited = 0;
  block.warps_left = static_cast<int>(block.warps.size());
  block.changed = true;
  for (size_t w = 0; w < block.warps.size(); ++w) {
    Warp& warp = *block.warps[w];
    warp.run = run_;
    warp.block = &block;
    warp.index = static_cast<int>(w);
    warp.base[1] = run_->program->constants.get();
    begin(warp);
  }
  if (run_->options.check_races) start_races(block);
}

std::shared_ptr<Cluster> BlockPool::start(uint64_t number) {
  const Launch& launch = *run_->launch;
  auto cluster = std::make_shared<Cluster>();
  uint64_t corner[3], left = number;
  for (int d = 0; d < 3; ++d) {
    const uint64_t count = launch.grid[d] / launch.cluster[d];
    corner[d] = left % count * launch.cluster[d];
    left /= count;
  }
  const uint32_t size = launch.cluster[0] * launch.cluster[1] * launch.cluster[2];
  for (uint32_t rank = 0; rank < size; ++rank) {
    if (free_.empty()) {
      all_.push_back(take());
      free_.push_back(all_.back().get());
    }
    Block& block = *free_.back();
    free_.pop_back();
    block.rank = rank;
    block.cluster = cluster;
    block.index[0] = static_cast<uint32_t>(corner[0]) + rank % launch.cluster[0];
    block.index[1] =
        static_cast<uint32_t>(corner[1]) + rank / launch.cluster[0] % launch.cluster[1];
    block.index[2] =
        static_cast<uint32_t>(corner[2]) + rank / launch.cluster[0] / launch.cluster[1];
    block.number =
        block.index[0] + launch.grid[0] * (block.index[1] + launch.grid[1] * block.index[2]);
    cluster->blocks.push_back(&block);
    cluster->threads += block.threads;
  }
  for (Block* block : cluster->blocks) begin(*block);
  return cluster;
}

void BlockPool::recycle(const std::shared_ptr<Cluster>& cluster) {
  for (Block* block : cluster->blocks) {
    block->cluster.reset();
    free_.push_back(block);
  }
}

}  // namespace fk::softgpu
