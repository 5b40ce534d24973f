// `fk check` runs every op on random arguments (check/drawn_call.h) and compares the results with
// those of its reference in double precision.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <set>

#include "cli/commands.h"
#include "cli/terminal.h"
#if FK_HAVE_CUDA
#include "cuda/runtime.h"
#endif

namespace fk::cli {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                             DType::kFloat8E4M3};

#if FK_HAVE_CUDA
// Gives the calls memory on GPU 0.
class CudaMemory : public CheckMemory {
 public:
  DLDevice device() const override { return {kDLCUDA, 0}; }
  Status allocate(size_t bytes, void** data) override {
    return cuda::device_malloc(0, std::max<size_t>(bytes, 1), data);
  }
  void release(void* data) override {
    // If this fails, an earlier call has failed, and was reported.
    static_cast<void>(cuda::device_free(0, data));
  }
  Status copy_in(void* to, const void* from, size_t bytes) override {
    return cuda::copy_to_device(0, to, from, bytes);
  }
  Status copy_out(void* to, const void* from, size_t bytes) override {
    FK_RETURN_IF_ERROR(cuda::synchronize(0, nullptr));
    return cuda::copy_to_host(0, to, from, bytes);
  }
};
#endif

// Says what the calls drawn for one dtype of an op showed.
struct Outcome {
  double error = 0;                       // the largest error, where 1 is what is allowed
  int run = 0;                            // calls that the device has an implementation for
  std::set<std::string> implementations;  // those that ran
  std::string wrong;                      // tells people about the first failure; empty: none
};

// Draws calls of an op and checks them on one device.
class Checker {
 public:
  Checker(const CheckOptions& options, CheckMemory& memory) : options_(options), memory_(memory) {}

  Outcome check(const fk_op& op, DType dtype) {
    Outcome outcome;
    for (int i = 0; i < options_.samples; ++i) {
      DrawOptions draw;
      draw.dtype = dtype;
      draw.seed = options_.seed + i;
      // The first call has nothing unusual; the others are unusual in one way or in several.
      draw.strided = i % 2 == 1;
      draw.alias = i % 4 == 2;
      draw.skip_outputs = i % 8 == 5;
      draw.empty = i % 12 == 11;
      check_drawn(op, draw, &outcome);
      if (!outcome.wrong.empty()) break;
    }
    return outcome;
  }

 private:
  // Runs one drawn call by the reference and by the device's implementation, and adds to *outcome.
  void check_drawn(const fk_op& op, const DrawOptions& draw, Outcome* outcome) {
    DrawnCall drawn_call;
    const Status drawn = draw_call(op, draw, &drawn_call);
    if (!drawn.ok()) {
      outcome->wrong = drawn.message();
      return;
    }
    const std::string name = implementation_of(drawn_call, memory_.device().device_type);
    if (name.empty()) return;
    ++outcome->run;
    outcome->implementations.insert(name);

    std::vector<DrawnTensor> expected, got;
    Status status = run_call(drawn_call, "reference", host_memory(), &expected);
    if (status.ok()) status = run_call(drawn_call, name.c_str(), memory_, &got);
    if (!status.ok()) {
      outcome->wrong = status.message() + "\n    in " + drawn_call.describe();
      return;
    }
    std::string worst;
    const double error = largest_error(drawn_call, expected, got, &worst);
    outcome->error = std::max(outcome->error, error);
    if (!(error <= 1)) outcome->wrong = worst + "\n    in " + drawn_call.describe();
  }

  const CheckOptions& options_;
  CheckMemory& memory_;
};

// Checks one op in all dtypes and prints a line, with the failures under it. Returns whether the op
// is right.
bool check_op(const fk_op& op, const CheckOptions& options, CheckMemory& memory) {
  const bool terminal = isatty(STDOUT_FILENO) != 0;
  Checker checker(options, memory);
  std::string cells, failures;
  std::set<std::string> implementations;
  for (DType dtype : kDTypes) {
    const bool taken = dtype != DType::kFloat8E4M3 || op.declaration.float8;
    const Outcome outcome = taken ? checker.check(op, dtype) : Outcome();
    char cell[64];
    if (outcome.run == 0 && outcome.wrong.empty()) {
      std::snprintf(cell, sizeof cell, "%10s", "-");
    } else {
      std::snprintf(cell, sizeof cell, "%10.3f", outcome.error);
    }
    cells += cell;
    implementations.insert(outcome.implementations.begin(), outcome.implementations.end());
    if (!outcome.wrong.empty()) {
      failures += std::string("  ") + name_of(dtype) + ": " + outcome.wrong + "\n";
    }
  }
  std::string names;
  for (const std::string& name : implementations) names += (names.empty() ? "" : "+") + name;
  const bool right = failures.empty();
  const char* verdict = names.empty() && right ? "none" : right ? "ok" : "WRONG";
  const char* colour = !terminal ? "" : right ? "\033[32m" : "\033[1;31m";
  std::printf("%-27s %-16s%s  %s%s%s\n%s", op.declaration.name.c_str(), names.c_str(),
              cells.c_str(), colour, verdict, terminal ? "\033[0m" : "", failures.c_str());
  std::fflush(stdout);
  return right;
}

// Complains about the arguments and returns the exit code.
int fail(const std::string& message) {
  complain("check", message);
  return 2;
}

}  // namespace

int check(const CheckOptions& options) {
  std::vector<const fk_op*> ops;
  std::string known;
  for (const auto& op : Registry::get().ops()) {
    const std::string& name = op->declaration.name;
    known += (known.empty() ? "" : ", ") + name;
    // The name "softmax" stands for the op and for its backward, softmax_bwd.
    if (options.op.empty() || name == options.op || op->public_name() == options.op ||
        name == options.op + "_bwd") {
      ops.push_back(op.get());
    }
  }
  if (ops.empty()) return fail("OP: expected one of " + known + ", got " + options.op);

  std::vector<CheckMemory*> memories;
  if (options.device != "cuda") memories.push_back(&host_memory());
#if FK_HAVE_CUDA
  CudaMemory cuda_memory;
  if (options.device != "cpu" && cuda::device_count() > 0) memories.push_back(&cuda_memory);
  if (memories.empty()) {
    return fail("--device cuda: no GPU is visible (driver: " + cuda::driver_version() + ")");
  }
#else
  if (memories.empty()) return fail("--device cuda: this build has no CUDA code (FK_CUDA=OFF)");
#endif

  int wrong = 0;
  for (CheckMemory* memory : memories) {
    const bool is_cuda = memory->device().device_type == kDLCUDA;
    std::printf("%-27s %-16s%10s%10s%10s%10s  (largest error; 1 is allowed)\n",
                is_cuda ? "op on cuda" : "op on cpu", "implementation", "float32", "float16",
                "bfloat16", "float8");
    for (const fk_op* op : ops) wrong += check_op(*op, options, *memory) ? 0 : 1;
  }
  if (wrong > 0) std::printf("%d of %zu checks WRONG\n", wrong, ops.size() * memories.size());
  return wrong > 0 ? 1 : 0;
}

}  // namespace fk::cli
