// Calls of every op, drawn from its declaration, most of them with one thing wrong.
#include <algorithm>
#include <array>
#include <cstdio>
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

namespace fk::fuzz {
namespace {

constexpr int64_t kHuge[] = {std::numeric_limits<int64_t>::min(),
                             std::numeric_limits<int64_t>::max(),
                             int64_t{1} << 62,
                             -(int64_t{1} << 62),
                             int64_t{1} << 57,
                             int64_t{1} << 40,
                             int64_t{1} << 31,
                             -1,
                             0};
constexpr size_t kSamplesKept = 24;  // of each op; drawing one takes as long as many calls

bool is_tensor(const Field& f) { return f.kind == Kind::kInput || f.kind == Kind::kOutput; }

// A tensor argument as it will be sent, with memory of exactly its own size.
struct Argument {
  static constexpr int kMaxRank = 10;
  // Memory of more elements is not provided: such arguments are only asked about.
  static constexpr int64_t kMostElements = 1 << 16;

  DLTensor tensor{};
  std::array<int64_t, kMaxRank> shape{}, strides{};
  std::unique_ptr<char[]> memory;
  bool is_present = false;
  bool is_right = true;  // false: it has no memory that a call could use

  int64_t item() const { return std::max<int64_t>(1, (tensor.dtype.bits + 7) / 8); }

  // How far below and above the first element the others reach; false where that is too far.
  bool reach(int64_t* below, int64_t* above) const {
    int64_t count = 1;
    *below = *above = 0;
    if (tensor.ndim < 0 || tensor.ndim > kMaxRank) return false;
    int64_t without_gaps = 1;
    for (int i = tensor.ndim - 1; i >= 0; --i) {
      const int64_t size = shape[static_cast<size_t>(i)];
      if (size <= 0) {
        *below = *above = -1;  // no element
        return size == 0;
      }
      const int64_t stride =
          tensor.strides == nullptr ? without_gaps : strides[static_cast<size_t>(i)];
      int64_t span;
      if (__builtin_mul_overflow(count, size, &count) || count > kMostElements) return false;
      if (__builtin_mul_overflow(size - 1, stride, &span)) return false;
      if (span < -kMostElements || span > kMostElements) return false;
      (span < 0 ? *below : *above) += span < 0 ? -span : span;
      without_gaps *= size;
    }
    return *below + *above < kMostElements;
  }
};

class OpCall {
 public:
  OpCall(const DrawnCall& drawn_call, Random* random) : drawn_(drawn_call), random_(*random) {
    const auto& fields = drawn_call.op->declaration.fields;
    arguments_.resize(fields.size());
    slots_ = drawn_call.attributes;
    for (size_t i = 0; i < fields.size(); ++i) {
      if (!is_tensor(fields[i])) continue;
      Argument& a = arguments_[i];
      const DrawnTensor& t = drawn_call.tensors[i];
      a.is_present = t.present;
      a.tensor.device = {kDLCPU, 0};
      a.tensor.ndim = static_cast<int32_t>(t.shape.size());
      a.tensor.dtype = dlpack_dtype(t.dtype);
      std::copy(t.shape.begin(), t.shape.end(), a.shape.begin());
      std::copy(t.strides.begin(), t.strides.end(), a.strides.begin());
      a.tensor.shape = a.shape.data();
      a.tensor.strides = a.strides.data();
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

  static DLDataType dlpack_dtype(DType dtype) {
    const auto bits = static_cast<uint8_t>(8 * size_of(dtype));
    switch (dtype) {
      case DType::kFloat8E4M3:
        return {FLASHKERNEL_DL_FLOAT8_E4M3FN, bits, 1};
      case DType::kBFloat16:
        return {kDLBfloat, bits, 1};
      case DType::kInt32:
      case DType::kInt64:
        return {kDLInt, bits, 1};
      default:
        return {kDLFloat, bits, 1};
    }
  }

  size_t some_tensor() {
    for (;;) {
      const size_t i = random_.below(arguments_.size());
      if (is_tensor(field(i))) return i;
    }
  }

  int64_t some_size() { return random_.one_in(2) ? random_.pick(kHuge) : random_.between(0, 9); }

  void spoil_tensor() {
    const size_t i = some_tensor();
    Argument& a = arguments_[i];
    DLTensor& t = a.tensor;
    const auto ndim = static_cast<size_t>(std::clamp(t.ndim, 0, Argument::kMaxRank - 1));
    const size_t d = ndim > 0 ? random_.below(ndim) : 0;
    switch (random_.below(18)) {
      case 0:
        __builtin_add_overflow(a.shape[d], random_.one_in(2) ? 1 : -1, &a.shape[d]);
        break;
      case 1:
        a.shape[d] = some_size();
        break;
      case 2:
        a.shape[d] = random_.between(0, 2);
        break;
      case 3:  // a dimension less
        if (ndim == 0) break;
        for (size_t k = d; k + 1 < ndim; ++k) a.shape[k] = a.shape[k + 1];
        t.ndim = static_cast<int32_t>(ndim) - 1;
        t.strides = nullptr;
        break;
      case 4:  // a dimension more
        for (size_t k = ndim; k > d; --k) a.shape[k] = a.shape[k - 1];
        a.shape[d] = random_.between(1, 2);
        t.ndim = static_cast<int32_t>(ndim) + 1;
        t.strides = nullptr;
        break;
      case 5:
        another_form(i);
        break;
      case 6: {
        static constexpr int32_t kRanks[] = {-1, 0, 8, 9, 10, 1 << 20, INT32_MAX, INT32_MIN};
        t.ndim = random_.pick(kRanks);
        break;
      }
      case 7:
        a.strides[d] = some_size();
        break;
      case 8:
        a.strides[d] =
            random_.one_in(2) ? 0 : static_cast<int64_t>(-static_cast<uint64_t>(a.strides[d]));
        break;
      case 9:
        t.strides = nullptr;
        break;
      case 10:
        t.dtype = {static_cast<uint8_t>(random_.below(20)),
                   static_cast<uint8_t>(8 << random_.below(5)),
                   static_cast<uint16_t>(random_.below(3))};
        break;
      case 11: {
        const auto type = static_cast<int32_t>(random_.between(-1, 20));
        std::memcpy(&t.device.device_type, &type, sizeof type);
        t.device.device_id = static_cast<int32_t>(random_.between(-2, 2));
        break;
      }
      case 12: {
        static constexpr uint64_t kOffsets[] = {
            1, 2, 3, 4, 8, uint64_t{1} << 40, uint64_t{1} << 56, uint64_t{1} << 58, UINT64_MAX};
        t.byte_offset = random_.pick(kOffsets);
        break;
      }
      case 13:
        lose_data_ = static_cast<int>(i);
        break;
      case 14:
        t.shape = nullptr;
        break;
      case 15:
        a.is_present = !a.is_present;
        break;
      case 16:
        spoiled_values_ = static_cast<int>(i);
        break;
      default:  // two arguments are one, or lie in the same memory
        same_ = {i, some_tensor()};
        same_descriptor_ = random_.one_in(2);
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
    int64_t below, above;
    const uint64_t offset = a.tensor.byte_offset;
    a.is_right = a.reach(&below, &above) && offset <= 8 && a.tensor.shape != nullptr;
    a.tensor.data = nullptr;
    if (!a.is_right) return;
    const int64_t elements = below < 0 ? 0 : below + above + 1;
    const auto bytes = static_cast<size_t>(elements * a.item()) + (elements > 0 ? offset : 0);
    a.memory.reset(new char[bytes]);
    if (elements > 0) fill(i, bytes, offset);
    a.tensor.data = a.memory.get();
    if (below > 0) a.tensor.byte_offset += static_cast<uint64_t>(below * a.item());
    if (static_cast<int>(i) == lose_data_) a.tensor.data = nullptr;
  }

  void fill(size_t i, size_t bytes, uint64_t offset) {
    const DrawnTensor& t = drawn_.tensors[i];
    char* to = arguments_[i].memory.get();
    if (!t.present || t.values.empty() || offset != 0) {
      std::memset(to, random_.one_in(2) ? 0 : 0xff, bytes);
      return;
    }
    Tensor view;
    view.dtype = t.dtype;
    view.data = to;
    const int64_t count = static_cast<int64_t>(bytes) / size_of(t.dtype);
    const bool spoiled = static_cast<int>(i) == spoiled_values_;
    for (int64_t k = 0; k < count; ++k) {
      const double value = t.values[static_cast<size_t>(k) % t.values.size()];
      if (t.dtype == DType::kInt64) {
        view.ptr<int64_t>()[k] =
            spoiled && random_.one_in(3) ? some_size() : static_cast<int64_t>(value);
      } else if (t.dtype == DType::kInt32) {
        view.ptr<int32_t>()[k] = static_cast<int32_t>(
            spoiled && random_.one_in(3) ? some_size() : static_cast<int64_t>(value));
      } else {
        static constexpr double kWild[] = {1e38, -1e38, 1e-40, HUGE_VAL, -HUGE_VAL, NAN};
        store(view, k, spoiled && random_.one_in(3) ? random_.pick(kWild) : value);
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
      return;
    }
    int64_t a_below, a_above, b_below, b_above;
    if (!a.reach(&a_below, &a_above) || !b.reach(&b_below, &b_above)) return;
    if (a.tensor.byte_offset != 0 || b.tensor.byte_offset != 0 || b_below != 0) return;
    if ((b_above + 1) * b.item() <= (a_above + 1) * a.item()) b.tensor.data = a.tensor.data;
  }

  fk_status call(size_t bytes) {
    fk_exec exec = FK_EXEC_DEFAULTS;
    void* workspace = nullptr;
    // posix_memalign, since a block of its is watched to the last byte.
    if (bytes > 0 && bytes < (size_t{64} << 20) && posix_memalign(&workspace, 64, bytes) != 0) {
      std::abort();
    }
    exec.workspace = workspace;
    exec.workspace_bytes = workspace == nullptr ? 0 : bytes;
    exec.deterministic = static_cast<int32_t>(random_.below(2));
    if (random_.one_in(3)) exec.parallel_for = backwards;
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
    const fk_status status = fk_op_call(op, slots_.data(), random_.one_in(16) ? nullptr : &exec);
    fk_force_implementation(op, nullptr);
    std::free(workspace);
    require_message(status);
    return status;
  }

  // A caller's own threads: one, which takes ranges from the end.
  static void backwards(void*, int64_t count, int64_t grain, fk_range_body body, void* context) {
    grain = std::max<int64_t>(grain, 1);
    for (int64_t begin = (count - 1) / grain * grain; begin >= 0; begin -= grain) {
      body(begin, std::min(count, begin + grain), context);
    }
  }

  const DrawnCall& drawn_;
  Random& random_;
  std::vector<Argument> arguments_;
  std::vector<fk_slot> slots_;
  int lose_data_ = -1, spoiled_values_ = -1;
  std::pair<size_t, size_t> same_{0, 0};
  bool same_descriptor_ = false;
};

}  // namespace

const DrawnCall& OpFuzzer::sample_of(const fk_op* op) {
  std::vector<DrawnCall>& kept = samples_[op];
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
  DrawnCall drawn_call;
  const Status drawn = draw_call(*op, options, &drawn_call);
  if (!drawn.ok()) {
    if (kept.empty()) return sample_of(op);
    return kept[0];
  }
  if (kept.size() < kSamplesKept) {
    kept.push_back(std::move(drawn_call));
    return kept.back();
  }
  return kept[random_.below(kept.size())] = std::move(drawn_call);
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
