// This is a GPU in software: it runs the PTX of CUDA kernels on the host, one warp of 32 lanes at a
// time, and checks each access harder than a chip can. This is the whole interface between the
// interpreter and whoever launches kernels (the stand-in for the CUDA runtime, tests, tools).
//
// Device addresses are host addresses, so that a host tensor can be presented as a device tensor.
// Nothing here is safe to call from two threads at once: the caller holds a lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace fk::softgpu {

// Holds what a kernel can see of the machine, and what limits its launches.
struct Chip {
  std::string name;
  int architecture = 0;  // 75, 80 or 90: the highest PTX that the chip takes
  int multiprocessors = 0;
  int shared_bytes_per_block = 0;           // with the attribute that allows more than 48 KB
  int shared_bytes_per_block_default = 0;   // without it
  int shared_bytes_per_multiprocessor = 0;  // a block takes reserved_shared_bytes more of it
  int reserved_shared_bytes_per_block = 0;
  int registers_per_multiprocessor = 65536;
  int threads_per_block = 1024;
  int threads_per_multiprocessor = 0;
  int blocks_per_multiprocessor = 0;
  size_t memory_bytes = 0;
  size_t l2_bytes = 0;
};
const Chip& t4();
const Chip& a100();
const Chip& h200();
// Returns the chip of an architecture: 75 is the T4, 80 the A100, 90 the H200.
const Chip& chip_of(int architecture);

// Is thrown for PTX that the interpreter does not understand: the message names the instruction and
// the line.
class ParseError : public std::runtime_error {
 public:
  ParseError(const std::string& message, int line) : std::runtime_error(message), line(line) {}
  int line;  // of the PTX text, counted from 1
};

struct Parameter {
  size_t offset = 0;  // from the start of the parameter bytes
  size_t size = 0;
  size_t align = 0;
};

struct KernelInfo {
  std::string name;  // mangled, as in the PTX
  std::vector<Parameter> parameters;
  size_t parameter_bytes = 0;
  size_t static_shared_bytes = 0;
  size_t constant_bytes = 0;
  int max_threads[3] = {0, 0, 0};       // .maxntid; 0 where it is not given
  int required_threads[3] = {0, 0, 0};  // .reqntid; 0 where it is not given
  int min_blocks = 0;                   // .minnctapersm; 0 where it is not given
  int required_cluster[3] = {0, 0, 0};  // .reqnctapercluster; 0 where it is not given
  // Returns the product of max_threads or required_threads, or 1024.
  int threads_limit() const;
};

// Holds the PTX of one translation unit. Its variables in global and constant memory belong to it.
class Module {
 public:
  // `name` is for reports. The kernels' bodies are decoded when they are first launched, unless
  // decode_all is called. Throws ParseError.
  static std::unique_ptr<Module> parse(const std::string& ptx, const std::string& name);
  virtual ~Module() = default;

  virtual int architecture() const = 0;  // of its .target line: 75, 80, 90
  virtual const std::vector<KernelInfo>& kernels() const = 0;
  // Returns nullptr where there is no such kernel.
  virtual const KernelInfo* find(const std::string& kernel) const = 0;
  // Decodes every kernel, so that an instruction that is not known is found. Throws ParseError.
  virtual void decode_all() = 0;
  // Returns all different mnemonics of the module, with how often each stands in the text.
  virtual std::map<std::string, int> mnemonics() const = 0;
  // Finds a variable of global or constant memory. Returns nullptr where there is none. `bytes` may
  // be null.
  virtual void* variable(const std::string& name, size_t* bytes) = 0;
};

// Says what a launch did wrong.
enum class Problem {
  kOutOfBounds,  // no allocation, or no shared memory, at the address
  kFreed,        // the allocation at the address was freed
  kMisaligned,
  kReadOnly,       // a store to parameters or constants
  kUninitialised,  // a load of shared memory that nobody wrote
  kPending,        // an access to what an asynchronous copy still reads or writes
  kRace,           // two accesses that nothing orders, at least one of them a write
  kMissingFence,   // a proxy fence is missing between accesses by threads and by the copy engine
  kBarrier,        // bar.sync, mbarrier, .aligned used against their rules
  kDeadlock,       // everybody waits; the text says where
  kLaunch,         // the shape, the shared memory, the cluster are not possible
  kUnfinished,     // the kernel ended with asynchronous work under way
  kTimeout,        // more warp instructions than LaunchOptions::max_warp_instructions
  kOther
};
const char* name_of(Problem problem);

struct Report {
  Problem problem = Problem::kOther;
  std::string kernel;
  std::string file;  // the CUDA source, where the PTX has .loc lines; else empty
  int source_line = 0;
  int ptx_line = 0;
  std::string instruction;  // the PTX statement
  int block[3] = {0, 0, 0};
  int thread[3] = {-1, -1, -1};
  uint64_t address = 0;
  std::string text;  // what happened, in a sentence
  // Returns all of it in one line, for people.
  std::string to_string() const;
};

// Counts what a launch did, exactly and the same on every run. One warp instruction is one
// instruction issued for a warp, whatever the number of its active lanes.
struct Counters {
  uint64_t warp_instructions = 0;
  uint64_t lane_instructions = 0;  // active lanes, summed
  // Counts by class: "tensor", "fma", "float", "integer", "special", "convert", "load_global", ...
  std::map<std::string, uint64_t> by_class;
  std::map<std::string, uint64_t> by_opcode;  // the full mnemonic
  uint64_t tensor_flops = 0;                  // 2 m n k of each matrix multiply
  uint64_t global_load_bytes = 0;             // asked for by active lanes, copies included
  uint64_t global_store_bytes = 0;
  uint64_t global_atomic_bytes = 0;
  uint64_t global_load_requests = 0, global_load_sectors = 0;  // sectors are 32 bytes
  uint64_t global_store_requests = 0, global_store_sectors = 0;
  // Of the loads and stores above, these count the bulk and tensor copies, which do not go the way
  // of threads' loads and stores.
  uint64_t copied_load_requests = 0, copied_load_sectors = 0;
  uint64_t copied_store_requests = 0, copied_store_sectors = 0;
  uint64_t global_unique_bytes = 0;  // 32-byte sectors touched at least once in the launch
  uint64_t shared_load_bytes = 0, shared_store_bytes = 0;
  uint64_t shared_load_wavefronts = 0, shared_store_wavefronts = 0;
  uint64_t shared_load_conflicts = 0;  // wavefronts past the least that the access needs
  uint64_t shared_store_conflicts = 0;
  uint64_t barriers = 0;       // bar.sync and the like, per warp
  uint64_t barrier_waits = 0;  // mbarrier waits that had to wait
  uint64_t async_copies = 0;   // bulk and tensor copies
  uint64_t blocks = 0, warps = 0;
  uint64_t blocks_run = 0;  // fewer than `blocks` where LaunchOptions::sample chose some of them
  // Holds for each range of memory that was touched the bytes of its sectors that were, and its
  // size. The memory that all blocks touch can be told from that of a sample.
  struct Touched {
    uint64_t bytes = 0, of = 0;
  };
  std::vector<Touched> touched;
  void add(const Counters& other);
  std::string to_json() const;  // one object, keys as above
};

struct LaunchOptions {
  // 0 runs warps and blocks in order, and asynchronous work as late as is allowed. Any other seed
  // draws the order, the length of each turn and when asynchronous work completes.
  uint64_t seed = 0;
  bool check_races = false;  // shared and global memory; slower
  // Reports loads of shared memory that nobody wrote; where false they give NaN and no report.
  bool report_uninitialised = true;
  // Reports a copy over what a wgmma read, of which nothing says that it was done. Where false only
  // those that come after the copy began tell: their results are NaN.
  bool report_overwritten_products = true;
  // Reports stores to shared memory of what is there already. Where false they do not race with
  // each other; who loads it must have seen one of them, who stores something else all of them.
  bool report_equal_stores = true;
  bool count_memory = true;    // sectors, wavefronts, unique bytes; slower
  uint64_t max_reports = 20;   // the launch stops at the first report past these
  bool stop_at_first = false;  // the launch ends with the first report
  // Runs about so many clusters (blocks, where there are no clusters), spread over the grid, for
  // counters of launches too large to run whole; 0 runs none of them. Counters are those of the
  // blocks that ran. This is only for kernels whose blocks neither wait for each other nor share
  // out work.
  uint64_t sample = ~uint64_t{0};
  uint64_t max_warp_instructions = uint64_t{1} << 34;
};

struct Launch {
  Module* module = nullptr;
  std::string kernel;
  uint32_t grid[3] = {1, 1, 1};
  uint32_t block[3] = {1, 1, 1};
  uint32_t cluster[3] = {1, 1, 1};
  size_t dynamic_shared_bytes = 0;
  // This is cudaFuncAttributeMaxDynamicSharedMemorySize of the kernel; without it the default
  // applies.
  size_t max_dynamic_shared_bytes = 0;
  // Points to KernelInfo::parameter_bytes bytes, laid out by KernelInfo::parameters.
  const void* parameters = nullptr;
  // If true, the kernel is launched to start before the kernels ahead of it are done: it must call
  // griddepcontrol.wait before it touches global memory.
  bool early = false;
};

struct LaunchResult {
  std::vector<Report> reports;  // empty where all went well
  Counters counters;
  bool ok() const { return reports.empty(); }
};

// Says who may touch which addresses. Ranges never overlap.
class Memory {
 public:
  virtual ~Memory() = default;
  // Allocates memory of the GPU, aligned to 256 bytes, and fills it with a pattern that is NaN in
  // every float type. `what` names it in reports. Returns nullptr where the chip's memory is used
  // up.
  virtual void* allocate(size_t bytes, const std::string& what = "") = 0;
  // Returns false where nothing begins there, or where it was freed before. The addresses stay
  // known as freed, for as long as memory allows.
  virtual bool free(void* pointer) = 0;
  // Presents host memory as device memory until the matching removal. The same bytes may be added
  // more than once, also in part (views of one tensor); each addition is removed by itself.
  virtual void add_external(const void* pointer, size_t bytes, const std::string& what,
                            bool writable = true) = 0;
  virtual void remove_external(const void* pointer, size_t bytes) = 0;
  // Returns whether all of [pointer, pointer + bytes) may be accessed.
  virtual bool contains(const void* pointer, size_t bytes) const = 0;
  // Tells people what is at an address: "byte 48 of 'x' (4096 bytes)" or "no allocation; ...".
  virtual std::string describe(const void* pointer) const = 0;
  // Returns whether the memory was allocated here (true) or is external or unknown (false).
  virtual bool is_allocated(const void* pointer) const = 0;
  virtual size_t allocated_bytes() const = 0;
  // Returns the allocations never freed, one line each.
  virtual std::vector<std::string> leaks() const = 0;
};

class Gpu {
 public:
  static std::unique_ptr<Gpu> create(const Chip& chip);
  virtual ~Gpu() = default;
  virtual const Chip& chip() const = 0;
  virtual Memory& memory() = 0;
  // Runs a kernel to its end. What it did wrong is in the result; throws ParseError where the
  // kernel holds an instruction that is not known.
  virtual LaunchResult launch(const Launch& launch, const LaunchOptions& options) = 0;
  // Returns how many blocks of this shape fit on one multiprocessor at once: 0 where none does.
  virtual int blocks_per_multiprocessor(const KernelInfo& kernel, int threads,
                                        size_t dynamic_shared_bytes) const = 0;
};

// These describe tensor maps: the stand-in for cuTensorMapEncodeTiled writes our own layout into
// the 128 bytes.
enum class Swizzle : uint32_t { kNone = 0, k32 = 1, k64 = 2, k128 = 3 };  // as the driver's enum
struct TensorMap {
  uint32_t rank = 0;           // 1 to 5
  uint32_t element_bytes = 0;  // 1, 2, 4 or 8
  // Says what cp.reduce adds: 0 uint8, 1 uint16, 2 uint32, 3 int32, 4 uint64, 5 int64, 6 float16, 7
  // float32, 8 float64, 9 bfloat16: the driver's CUtensorMapDataType.
  uint32_t type = 0;
  uint64_t address = 0;
  uint64_t sizes[5] = {};    // in elements, the fastest dimension first
  uint64_t strides[5] = {};  // in bytes; strides[0] is element_bytes
  uint32_t box[5] = {};
  Swizzle swizzle = Swizzle::kNone;
};
// Writes 128 bytes to `to`. Returns an empty string, or what the driver would refuse.
std::string encode_tensor_map(void* to, const TensorMap& map);
// Does the opposite. Returns false where the bytes are no tensor map of ours.
bool decode_tensor_map(const void* from, TensorMap* map);

}  // namespace fk::softgpu
