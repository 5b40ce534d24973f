// Makes and recycles the blocks of a launch.
#pragma once

#include <memory>
#include <vector>

#include "exec/machine.h"

namespace fk::softgpu {

class BlockPool {
 public:
  explicit BlockPool(Run* run) : run_(run) {}
  // Returns the cluster with this number, ready to run; without clusters each block is one by
  // itself.
  std::shared_ptr<Cluster> start(uint64_t number);
  // Takes the cluster back, whose blocks have ended.
  void recycle(const std::shared_ptr<Cluster>& cluster);
  uint64_t clusters() const;
  uint64_t blocks_per_cluster() const;

 private:
  std::unique_ptr<Block> take();
  void begin(Block& block);
  void begin(Warp& warp);
  void fill_specials(Warp& warp);

  Run* run_;
  std::vector<std::unique_ptr<Block>> all_;
  std::vector<Block*> free_;
  std::vector<AlignedArray<uint8_t>> registers_;
};

// Returns what a launch asks of each block, in bytes.
size_t shared_bytes_of(const Program& program, size_t dynamic_shared_bytes);

}  // namespace fk::softgpu
