// Calls of every op, drawn from its declaration, most of them with one thing wrong.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "check/drawn_call.h"
#include "core/access.h"
#include "core/op.h"
#include "cpu/targets.h"
#include "fuzz_abi.h"

// What bindings call, and no header has: fk_op_call with workspace from the heap.
extern "C" int fk_cpu_call(const fk_op* op, const fk_slot* slots);

namespace fk::fuzz {
namespace {

constexpr size_t kSamplesKept = 24;  // of each op; drawing one takes as long as many calls
constexpr size_t kMostWorkspace = size_t{64} << 20;

bool is_tensor(const Field& f) { return f.kind == Kind::kInput || f.kind == Kind::kOutput; }

// The values of a tensor that is present, as they lie in memory.
std::string bytes_of(const DrawnTensor& t) {
  if (!t.present) return "";
  std::string bytes(t.values.size() * static_cast<size_t>(size_of(t.dtype)), '\0');
  Tensor view;
  view.dtype = t.dtype;
  view.data = bytes.data();
  for (size_t k = 0; k < t.values.size(); ++k) {
    const auto at = static_cast<int64_t>(k);
    if (t.dtype == DType::kInt64) {
      view.ptr<int64_t>()[at] = static_cast<int64_t>(t.values[k]);
    } else if (t.dtype == DType::kInt32) {
      view.ptr<int32_t>()[at] = static_cast<int32_t>(t.values[k]);
    } else {
      store(view, at, t.values[k]);
    }
  }
  return bytes;
}

class OpCall {
 public:
  OpCall(const Sample& sample, Random* random)
      : sample_(sample),
        drawn_(sample.drawn_call),
        random_(*random),
        arguments_(sample.drawn_call.op->declaration.fields.size()) {
    const auto& fields = drawn_.op->declaration.fields;
    slots_ = drawn_.attributes;
    for (size_t i = 0; i < fields.size(); ++i) {
      if (!is_tensor(fields[i])) continue;
      const DrawnTensor& t = drawn_.tensors[i];
      arguments_[i].set(t.dtype, t.shape, t.strides);
      arguments_[i].is_present = t.present;
    }
  }

  void spoil() {
    if (random_.one_in(4)) {
      spoil_attribute();
    } else {
      spoil_tensor();
    }
  }

  // The status of a call, or of a question where the arguments have no memory.
  fk_status run() {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (is_tensor(field(i))) provide(i);
    }
    share_memory();
    const fk_op* op = drawn_.op;
    size_t bytes = 0;
    const char* name = nullptr;
    fk_status status = fk_op_workspace(op, slots_.data(), &bytes);
    require_message(status);
    require_message(fk_op_implementation(op, slots_.data(), &name));
    bool callable = true;
    for (const Argument& a : arguments_) callable = callable && (!a.is_present || a.is_right);
    if (!callable) return status;
    return call(status == FK_OK ? bytes : 0);
  }

 private:
  const Field& field(size_t i) const { return drawn_.op->declaration.fields[i]; }

  size_t some_tensor() {
    for (;;) {
      const size_t i = random_.below(arguments_.size());
      if (is_tensor(field(i))) return i;
    }
  }

  void spoil_tensor() {
    const size_t i = some_tensor();
    switch (random_.below(17)) {
      case 0:
        another_form(i);
        break;
      case 1:
        spoiled_values_ = static_cast<int>(i);
        break;
      case 2:  // two arguments are one, or lie in the same memory
        same_ = {i, some_tensor()};
        same_descriptor_ = random_.one_in(2);
        break;
      default:
        arguments_[i].spoil(&random_);
        break;
    }
  }

  void another_form(size_t i) {
    const Field& f = field(i);
    if (f.shapes.size() < 2) return;
    const Dims& dims = f.shapes[random_.below(f.shapes.size())];
    Argument& a = arguments_[i];
    if (dims.size() > a.shape.size()) return;
    a.tensor.ndim = static_cast<int32_t>(dims.size());
    a.tensor.strides = nullptr;
    if (random_.one_in(2)) a.shape.fill(1);
  }

  void spoil_attribute() {
    static constexpr double kNumbers[] = {std::numeric_limits<double>::quiet_NaN(),
                                          std::numeric_limits<double>::infinity(),
                                          -std::numeric_limits<double>::infinity(),
                                          1e300,
                                          -1e300,
                                          3e38,
                                          -3e38,
                                          1e-300,
                                          -1,
                                          0,
                                          1,
                                          2};
    for (int attempt = 0; attempt < 20; ++attempt) {
      const size_t i = random_.below(slots_.size());
      if (is_tensor(field(i))) continue;
      if (field(i).kind == Kind::kNumber) {
        slots_[i].number = random_.pick(kNumbers);
      } else {
        slots_[i].integer = random_.one_in(2) ? random_.pick(kHuge) : random_.between(-3, 40);
      }
      return;
    }
  }

  // Memory with the drawn call's values, in order and over again, for argument `i`.
  void provide(size_t i) {
    Argument& a = arguments_[i];
    slots_[i].tensor = a.is_present ? &a.tensor : nullptr;
    if (!a.is_present) return;
    const uint64_t offset = a.tensor.byte_offset;
    const size_t bytes = a.provide();
    if (bytes > 0) fill(i, bytes, offset);
  }

  void fill(size_t i, size_t bytes, uint64_t offset) {
    const std::string& values = sample_.bytes[i];
    char* to = arguments_[i].memory.get();
    if (values.empty() || offset != 0) {
      std::memset(to, random_.one_in(2) ? 0 : 0xff, bytes);
      return;
    }
    for (size_t at = 0; at < bytes; at += values.size()) {
      std::memcpy(to + at, values.data(), std::min(values.size(), bytes - at));
    }
    if (static_cast<int>(i) == spoiled_values_) spoil_values(i, bytes);
  }

  void spoil_values(size_t i, size_t bytes) {
    static constexpr double kWild[] = {1e38, -1e38, 1e-40, HUGE_VAL, -HUGE_VAL, NAN};
    Tensor view;
    view.dtype = drawn_.tensors[i].dtype;
    view.data = arguments_[i].memory.get();
    const int64_t count = static_cast<int64_t>(bytes) / size_of(view.dtype);
    for (int64_t k = 0; k < count; ++k) {
      if (!random_.one_in(3)) continue;
      if (view.dtype == DType::kInt64) {
        view.ptr<int64_t>()[k] = random_.size();
      } else if (view.dtype == DType::kInt32) {
        view.ptr<int32_t>()[k] = static_cast<int32_t>(random_.size());
      } else {
        store(view, k, random_.pick(kWild));
      }
    }
  }

  // Two arguments with the same descriptor; or one whose memory serves for both where it is large
  // enough.
  void share_memory() {
    const auto [from, to] = same_;
    if (from == to) return;
    Argument &a = arguments_[from], &b = arguments_[to];
    if (!a.is_present || !b.is_present || a.memory == nullptr || b.memory == nullptr) return;
    if (same_descriptor_) {
      slots_[to].tensor = &a.tensor;
    } else {
      a.share_with(&b);
    }
  }

  fk_status call(size_t bytes) {
    fk_exec exec = FK_EXEC_DEFAULTS;
    void* workspace = nullptr;
    // posix_memalign, since a block of its is watched to the last byte.
    if (bytes > 0 && bytes < kMostWorkspace && posix_memalign(&workspace, 64, bytes) != 0) {
      std::abort();
    }
    exec.workspace = workspace;
    exec.workspace_bytes = workspace == nullptr ? 0 : bytes;
    exec.deterministic = static_cast<int32_t>(random_.below(2));
    if (random_.one_in(3)) exec.parallel_for = run_backwards;
    if (random_.one_in(16) && bytes > 0) {
      switch (random_.below(4)) {
        case 0:
          exec.workspace = nullptr;
          break;
        case 1:
          exec.workspace_bytes = random_.below(bytes);
          break;
        case 2:
          exec.workspace = static_cast<char*>(workspace) + 1 + random_.below(63);
          exec.workspace_bytes = bytes;
          break;
        default:
          exec.workspace = nullptr;
          exec.allocate = [](void*, size_t) -> void* { return nullptr; };
      }
    }
    const fk_op* op = drawn_.op;
    if (random_.one_in(3)) fk_force_implementation(op, "reference");
    const int status = bytes < kMostWorkspace && random_.one_in(4)
                           ? fk_cpu_call(op, slots_.data())
                           : fk_op_call(op, slots_.data(), random_.one_in(16) ? nullptr : &exec);
    fk_force_implementation(op, nullptr);
    std::free(workspace);
    require_message(static_cast<fk_status>(status));
    return static_cast<fk_status>(status);
  }

  const Sample& sample_;
  const DrawnCall& drawn_;
  Random& random_;
  std::vector<Argument> arguments_;
  std::vector<fk_slot> slots_;
  int spoiled_values_ = -1;
  std::pair<size_t, size_t> same_{0, 0};
  bool same_descriptor_ = false;
};

}  // namespace

const Sample& OpFuzzer::sample_of(const fk_op* op) {
  std::vector<Sample>& kept = samples_[op];
  if (!kept.empty() && !random_.one_in(kept.size() < kSamplesKept ? 8 : 400)) {
    return kept[random_.below(kept.size())];
  }
  DrawOptions options;
  static constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  options.dtype = random_.pick(kDTypes);
  if (op->declaration.float8 && random_.one_in(4)) options.dtype = DType::kFloat8E4M3;
  options.seed = random_.below(1 << 30);
  options.max_elements = 1 << 14;
  options.strided = random_.one_in(2);
  options.empty = random_.one_in(8);
  options.skip_outputs = random_.one_in(2);
  Sample sample;
  const Status drawn = draw_call(*op, options, &sample.drawn_call);
  if (!drawn.ok()) {
    if (kept.empty()) return sample_of(op);
    return kept[0];
  }
  for (const DrawnTensor& t : sample.drawn_call.tensors) sample.bytes.push_back(bytes_of(t));
  if (kept.size() < kSamplesKept) {
    kept.push_back(std::move(sample));
    return kept.back();
  }
  return kept[random_.below(kept.size())] = std::move(sample);
}

bool OpFuzzer::call() {
  const auto& ops = Registry::get().ops();
  const fk_op* op = ops[random_.below(ops.size())].get();
  if (random_.one_in(64)) {
    static const std::vector<std::string> targets = cpu::supported_targets();
    fk_set_cpu_target(targets[random_.below(targets.size())].c_str());
  }
  OpCall call(sample_of(op), &random_);
  for (size_t n = random_.below(8), wrongs = n == 0 ? 0 : n == 7 ? 2 : 1; wrongs > 0; --wrongs) {
    call.spoil();
  }
  return call.run() == FK_OK;
}

}  // namespace fk::fuzz
