#include "launch/scheduler.h"

#include <algorithm>
#include <deque>
#include <numeric>

#include "exec/barriers.h"
#include "exec/finish.h"
#include "launch/blocks.h"

namespace fk::softgpu {

namespace {

// A warp runs so many instructions before the next one's turn.
constexpr uint64_t kSlice = 4096;
// A cluster whose warps only ask again and again for something waits; after so many rounds in which
// all do, nothing will come.
constexpr int kPatience = 200;
// With a seed, so many clusters take turns.
constexpr size_t kMixed = 4;

enum class Outcome { kDone, kWaits, kGoesOn };

class Scheduler {
 public:
  Scheduler(Run* run, uint64_t resident)
      : run_(*run), pool_(run), resident_(std::max<uint64_t>(resident, 1)) {}

  void run() {
    const uint64_t all = pool_.clusters();
    uint64_t count = std::min(all, run_.options.sample);
    if (count < all) {
      choose_clusters(count);
      count = order_.size();
    } else if (run_.options.seed != 0) {
      shuffle_clusters(count);
    }
    run_.blocks_run = count * pool_.blocks_per_cluster();
    uint64_t started = 0;
    const size_t at_once = run_.options.seed == 0 ? 1 : kMixed;
    int idle_rounds = 0;
    while (started < count || !active_.empty()) {
      bool progress = false;
      size_t waiting = 0;
      for (size_t k = 0; k < active_.size();) {
        const Outcome outcome = turn(*active_[k]);
        if (outcome == Outcome::kDone) {
          pool_.recycle(active_[k]);
          active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(k));
          progress = true;
          continue;
        }
        progress |= outcome == Outcome::kGoesOn;
        waiting += outcome == Outcome::kWaits;
        ++k;
      }
      while (started < count && active_.size() < resident_ && active_.size() - waiting < at_once) {
        active_.push_back(pool_.start(order_.empty() ? started : order_[started]));
        ++started;
        progress = true;
      }
      idle_rounds = progress ? 0 : idle_rounds + 1;
      if (idle_rounds > kPatience) deadlock(started < count);
    }
  }

 private:
  // Chooses clusters from the whole grid. Along each dimension one lies in the middle of each part,
  // and the parts of one dimension meet different ones of the others, so that neither the first nor
  // the last tiles of a causal mask, say, are seen more often than others.
  void choose_clusters(uint64_t count) {
    uint64_t sizes[3];
    for (int d = 0; d < 3; ++d) sizes[d] = run_.launch->grid[d] / run_.launch->cluster[d];
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t part[3] = {i, (3 * i + 1) % count, (2 * i + 2) % count};
      uint64_t number = 0;
      for (int d = 2; d >= 0; --d) {
        number = number * sizes[d] + (2 * part[d] + 1) * sizes[d] / (2 * count);
      }
      order_.push_back(number);
    }
    std::sort(order_.begin(), order_.end());
    order_.erase(std::unique(order_.begin(), order_.end()), order_.end());
  }

  void shuffle_clusters(uint64_t count) {
    order_.resize(count);
    std::iota(order_.begin(), order_.end(), uint64_t{0});
    for (uint64_t i = count; i > 1; --i) std::swap(order_[i - 1], order_[run_.draw() % i]);
  }

  // Every warp of the cluster runs once or, without a seed, until the cluster is done or waits.
  Outcome turn(Cluster& cluster) {
    // A warp that asks in vain once may get it the second time: copies come only then.
    constexpr int kTries = 4;
    for (int idle = 0;;) {
      bool progress = false, any = false;
      for (Block* block : cluster.blocks) {
        if (block->warps_left == 0) continue;
        any |= round(*block, &progress);
        if (block->warps_left == 0) finish_block(*block);
      }
      const bool done = std::all_of(cluster.blocks.begin(), cluster.blocks.end(),
                                    [](const Block* block) { return block->warps_left == 0; });
      if (done) return Outcome::kDone;
      if (!any) stuck(cluster);
      idle = progress ? 0 : idle + 1;
      if (idle >= kTries) return Outcome::kWaits;
      if (run_.options.seed != 0) return Outcome::kGoesOn;
    }
  }

  // Returns whether any warp ran, and sets `progress` where one did more than to ask whether it may
  // go on.
  bool round(Block& block, bool* progress) {
    const size_t count = block.warps.size();
    const size_t first = run_.options.seed == 0 ? 0 : run_.draw() % count;
    bool any = false;
    for (size_t k = 0; k < count; ++k) {
      Warp& warp = *block.warps[(first + k) % count];
      if (warp.live == 0) continue;
      const uint64_t budget = run_.options.seed == 0 ? kSlice : slice();
      block.changed = false;
      const uint64_t ran = run_warp(warp, budget);
      any |= ran > 0;
      *progress |= ran == budget || block.changed;
      run_.instructions += ran;
      if (run_.instructions > run_.options.max_warp_instructions) {
        report(warp, Problem::kTimeout, -1, 0,
               "more than " + std::to_string(run_.options.max_warp_instructions) +
                   " warp instructions; " + whereabouts(warp));
        throw Abandoned();
      }
    }
    return any;
  }

  // Draws how long a warp runs: mostly long, and sometimes a few instructions, between which much
  // can happen.
  uint64_t slice() {
    const uint64_t r = run_.draw();
    return r % 4 == 0 ? 1 + (r >> 8) % 16 : 64 + (r >> 8) % 1024;
  }

  // Nothing in the cluster can run, and nobody else can change that.
  [[noreturn]] void stuck(Cluster& cluster) {
    Warp* any = nullptr;
    std::string all;
    for (Block* block : cluster.blocks) {
      for (auto& warp : block->warps) {
        if (warp->live == 0) continue;
        if (report_divergence(*warp)) throw Abandoned();
        if (any == nullptr) any = warp.get();
        all += (all.empty() ? "" : " ") + whereabouts(*warp);
      }
    }
    any->pc = any->fragments[0].pc;
    report(*any, Problem::kDeadlock, -1, 0, "everybody waits: " + all);
    throw Abandoned();
  }

  [[noreturn]] void deadlock(bool more) {
    constexpr size_t kShown = 2000;
    Warp* any = nullptr;
    std::string all;
    for (const auto& cluster : active_) {
      for (Block* block : cluster->blocks) {
        for (auto& warp : block->warps) {
          if (warp->live == 0 || warp->fragments.empty()) continue;
          if (any == nullptr) any = warp.get();
          if (all.size() > kShown) continue;
          all += (all.empty() ? "" : " ") + ("block " + std::to_string(block->number)) + " " +
                 whereabouts(*warp);
        }
      }
    }
    any->pc = any->fragments[0].pc;
    report(*any, Problem::kDeadlock, -1, 0,
           std::string(more ? "the blocks that fit on the chip at once wait, maybe for others: "
                            : "everybody waits: ") +
               all);
    throw Abandoned();
  }

  Run& run_;
  BlockPool pool_;
  uint64_t resident_;
  std::vector<uint64_t> order_;
  std::vector<std::shared_ptr<Cluster>> active_;
};

}  // namespace

uint64_t Run::draw() {
  // This is splitmix64.
  uint64_t z = random += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

void run_blocks(Run* run, uint64_t resident) { Scheduler(run, resident).run(); }

}  // namespace fk::softgpu
