#include <algorithm>
#include <cstring>

#include "check/access.h"
#include "check/global_races.h"
#include "exec/machine.h"
#include "launch/blocks.h"
#include "launch/module.h"
#include "launch/scheduler.h"
#include "memory/memory_map.h"

namespace fk::softgpu {

namespace {

class SoftwareGpu : public Gpu {
 public:
  explicit SoftwareGpu(const Chip& chip) : chip_(chip), memory_(chip.memory_bytes) {}
  const Chip& chip() const override { return chip_; }
  Memory& memory() override { return memory_; }
  LaunchResult launch(const Launch& launch, const LaunchOptions& options) override;
  int blocks_per_multiprocessor(const KernelInfo& kernel, int threads,
                                size_t dynamic_shared_bytes) const override;

 private:
  std::string refusal(const Launch& launch, const KernelInfo& info) const;

  Chip chip_;
  MemoryMap memory_;
};

// Holds the ranges that belong to a launch: its parameters, and the variables of its module.
class Lent {
 public:
  Lent(MemoryMap* memory, const Program& program, const ParsedModule& module) : memory_(memory) {
    add(program.parameters.get(), program.info.parameter_bytes, "the kernel's parameters", false);
    for (const auto& [name, variable] : module.variables()) {
      add(variable.bytes.get(), variable.size, name, !variable.constant);
    }
  }
  ~Lent() {
    for (const auto& [pointer, bytes] : ranges_) memory_->remove_external(pointer, bytes);
  }
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;

 private:
  void add(const void* pointer, size_t bytes, const std::string& what, bool writable) {
    memory_->add_external(pointer, bytes, what, writable);
    ranges_.push_back({pointer, bytes});
  }
  MemoryMap* memory_;
  std::vector<std::pair<const void*, size_t>> ranges_;
};

// Returns what was touched of each range of memory.
std::vector<Counters::Touched> touched_ranges(const Run& run) {
  std::map<uint64_t, Counters::Touched> by_begin;
  const KnownRange* last = nullptr;
  run.touched->for_each([&](uint64_t address) {
    if (last == nullptr || address < last->begin || address >= last->end) {
      // A range may begin or end within the sector.
      for (uint64_t at = address; at < address + 32; ++at) {
        if ((last = run.memory->find(at, 1)) != nullptr) break;
      }
      if (last == nullptr) return;
    }
    Counters::Touched& range = by_begin[last->begin];
    range.of = last->end - last->begin;
    range.bytes = std::min(range.bytes + 32, range.of);
  });
  std::vector<Counters::Touched> list;
  for (const auto& [begin, range] : by_begin) list.push_back(range);
  // The list is sorted by size, since where memory lies differs from run to run.
  std::sort(list.begin(), list.end(), [](const Counters::Touched& a, const Counters::Touched& b) {
    return std::pair(a.of, a.bytes) < std::pair(b.of, b.bytes);
  });
  return list;
}

void fill_counters(const Run& run, uint64_t blocks, uint64_t warps_per_block, Counters* to) {
  for (size_t i = 0; i < run.executed.size(); ++i) {
    const Executed& executed = run.executed[i];
    if (executed.warps == 0) continue;
    const InstructionText& text = run.program->texts[i];
    to->warp_instructions += executed.warps;
    to->lane_instructions += executed.lanes;
    to->by_class[name_of(text.kind)] += executed.warps;
    to->by_opcode[text.mnemonic] += executed.warps;
  }
  const MemoryCounts& c = run.counts;
  to->tensor_flops = c.tensor_flops;
  to->global_load_bytes = c.load_bytes;
  to->global_store_bytes = c.store_bytes;
  to->global_atomic_bytes = c.atomic_bytes;
  to->global_load_requests = c.load_requests;
  to->global_load_sectors = c.load_sectors;
  to->global_store_requests = c.store_requests;
  to->global_store_sectors = c.store_sectors;
  to->copied_load_requests = c.copied_load_requests;
  to->copied_load_sectors = c.copied_load_sectors;
  to->copied_store_requests = c.copied_store_requests;
  to->copied_store_sectors = c.copied_store_sectors;
  to->global_unique_bytes = run.touched->bytes();
  to->shared_load_bytes = c.shared_load_bytes;
  to->shared_store_bytes = c.shared_store_bytes;
  to->shared_load_wavefronts = c.shared_load_wavefronts;
  to->shared_store_wavefronts = c.shared_store_wavefronts;
  to->shared_load_conflicts = c.shared_load_conflicts;
  to->shared_store_conflicts = c.shared_store_conflicts;
  to->barriers = c.barriers;
  to->barrier_waits = c.barrier_waits;
  to->async_copies = c.async_copies;
  to->blocks = blocks;
  to->warps = blocks * warps_per_block;
  to->blocks_run = run.blocks_run;
  to->touched = touched_ranges(run);
}

uint64_t product(const uint32_t (&v)[3]) { return uint64_t{v[0]} * v[1] * v[2]; }

}  // namespace

std::unique_ptr<Gpu> Gpu::create(const Chip& chip) { return std::make_unique<SoftwareGpu>(chip); }

int SoftwareGpu::blocks_per_multiprocessor(const KernelInfo& kernel, int threads,
                                           size_t dynamic_shared_bytes) const {
  const int warps = (threads + kLanes - 1) / kLanes;
  if (threads <= 0 || threads > std::min(chip_.threads_per_block, kernel.threads_limit())) return 0;
  int blocks = std::min(chip_.blocks_per_multiprocessor,
                        chip_.threads_per_multiprocessor / (warps * kLanes));
  const size_t shared = kernel.static_shared_bytes + dynamic_shared_bytes;
  if (shared > static_cast<size_t>(chip_.shared_bytes_per_block)) return 0;
  if (shared > 0) {
    const size_t each = shared + static_cast<size_t>(chip_.reserved_shared_bytes_per_block);
    blocks = std::min(
        blocks,
        static_cast<int>(static_cast<size_t>(chip_.shared_bytes_per_multiprocessor) / each));
  }
  return blocks;
}

// Returns why the chip would not take the launch, or an empty text where it would.
std::string SoftwareGpu::refusal(const Launch& launch, const KernelInfo& info) const {
  const auto text = [](uint64_t n) { return std::to_string(n); };
  static constexpr uint32_t kGrid[3] = {0x7fffffff, 65535, 65535}, kBlock[3] = {1024, 1024, 64};
  for (int d = 0; d < 3; ++d) {
    if (launch.grid[d] < 1 || launch.grid[d] > kGrid[d]) {
      return "a grid of " + text(launch.grid[d]) + " blocks along dimension " + text(d);
    }
    if (launch.block[d] < 1 || launch.block[d] > kBlock[d]) {
      return "a block of " + text(launch.block[d]) + " threads along dimension " + text(d);
    }
    if (launch.cluster[d] < 1 || launch.grid[d] % launch.cluster[d] != 0) {
      return "clusters of " + text(launch.cluster[d]) + " blocks in a grid of " +
             text(launch.grid[d]) + " along dimension " + text(d);
    }
    if (info.required_threads[d] > 0 &&
        launch.block[d] != static_cast<uint32_t>(info.required_threads[d])) {
      return "a block of " + text(launch.block[d]) + " threads along dimension " + text(d) +
             ", of which the kernel requires " +
             text(static_cast<uint64_t>(info.required_threads[d]));
    }
  }
  const uint64_t threads = product(launch.block);
  const auto limit = static_cast<uint64_t>(std::min(chip_.threads_per_block, info.threads_limit()));
  if (threads > limit) {
    return "a block of " + text(threads) + " threads, where at most " + text(limit) +
           " are allowed";
  }
  const uint64_t cluster = product(launch.cluster);
  if (cluster > 1 && chip_.architecture < 90) return "clusters, which this chip does not have";
  if (cluster > 8) return "a cluster of " + text(cluster) + " blocks, where at most 8 are portable";
  const size_t shared = info.static_shared_bytes + launch.dynamic_shared_bytes;
  const auto allowed = std::max(static_cast<size_t>(chip_.shared_bytes_per_block_default),
                                info.static_shared_bytes + launch.max_dynamic_shared_bytes);
  if (shared > allowed) {
    return text(shared) + " bytes of shared memory, where " + text(allowed) +
           " were asked for by cudaFuncSetAttribute or are the default";
  }
  if (shared > static_cast<size_t>(chip_.shared_bytes_per_block)) {
    return text(shared) + " bytes of shared memory, of which the chip has " +
           text(static_cast<uint64_t>(chip_.shared_bytes_per_block)) + " for a block";
  }
  return "";
}

LaunchResult SoftwareGpu::launch(const Launch& launch, const LaunchOptions& options) {
  LaunchResult result;
  auto& module = static_cast<ParsedModule&>(*launch.module);
  Program* program = module.program(launch.kernel);
  const auto refuse = [&](const std::string& why) {
    Report report;
    report.problem = Problem::kLaunch;
    report.kernel = launch.kernel;
    report.text = why;
    result.reports.push_back(report);
    return result;
  };
  if (program == nullptr) return refuse("there is no such kernel");
  if (const std::string why = refusal(launch, program->info); !why.empty()) return refuse(why);

  if (program->info.parameter_bytes > 0) {
    std::memcpy(program->parameters.get(), launch.parameters, program->info.parameter_bytes);
  }
  const Lent lent(&memory_, *program, module);
  Run run;
  run.program = program;
  run.launch = &launch;
  run.options = options;
  run.chip = &chip_;
  run.memory = &memory_;
  run.files = &module.files();
  run.result = &result;
  run.executed.resize(program->code.size());
  run.known.resize(program->code.size());
  run.count_memory = options.count_memory;
  run.random = options.seed;
  run.touched = std::make_unique<TouchedSectors>();
  if (options.check_races) run.global_races = std::make_unique<GlobalRaces>();
  const uint64_t threads = product(launch.block);
  const int fit = blocks_per_multiprocessor(program->info, static_cast<int>(threads),
                                            launch.dynamic_shared_bytes);
  const uint64_t resident = static_cast<uint64_t>(std::max(fit, 1)) *
                            static_cast<uint64_t>(chip_.multiprocessors) / product(launch.cluster);
  try {
    run_blocks(&run, resident);
  } catch (const Abandoned&) {
    // The reports say why.
  }
  fill_counters(run, product(launch.grid), (threads + kLanes - 1) / kLanes, &result.counters);
  return result;
}

}  // namespace fk::softgpu
