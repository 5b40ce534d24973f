// Runs a drawn call: its tensors are laid out in memory full of NaN, and what surrounds them is
// checked afterwards.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "check/drawn_call.h"
#include "core/access.h"
#include "core/kept_memory.h"

namespace fk {
namespace {

// Every byte of memory has this value before it gets another. As a float of any size it is NaN.
constexpr int kPoison = 0xff;
constexpr size_t kWorkspaceGuard = 256;

class HostMemory : public CheckMemory {
 public:
  DLDevice device() const override { return {kDLCPU, 0}; }
  Status allocate(size_t bytes, void** data) override {
    *data = KeptMemory::allocate(bytes);
    if (*data == nullptr) return {FK_INTERNAL, "out of memory"};
    return {};
  }
  void release(void* data) override { std::free(data); }
  Status copy_in(void* to, const void* from, size_t bytes) override {
    std::memcpy(to, from, bytes);
    return {};
  }
  Status copy_out(void* to, const void* from, size_t bytes) override {
    std::memcpy(to, from, bytes);
    return {};
  }
};

DLDataType dlpack_dtype(DType dtype) {
  const auto bits = static_cast<uint8_t>(8 * size_of(dtype));
  switch (dtype) {
    case DType::kFloat8E4M3:
      return {FLASHKERNEL_DL_FLOAT8_E4M3FN, bits, 1};
    case DType::kBFloat16:
      return {kDLBfloat, bits, 1};
    case DType::kInt8:
    case DType::kInt32:
    case DType::kInt64:
      return {kDLInt, bits, 1};
    case DType::kUInt8:
      return {kDLUInt, bits, 1};
    default:
      return {kDLFloat, bits, 1};
  }
}

// Holds the arguments of a drawn call on a device, without data.
struct DrawnArguments {
  DrawnArguments(const DrawnCall& drawn_call, DLDevice device)
      : tensors(drawn_call.tensors.size()), slots(drawn_call.attributes) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const Kind kind = drawn_call.op->declaration.fields[i].kind;
      if (kind != Kind::kInput && kind != Kind::kOutput) continue;
      const DrawnTensor& t = drawn_call.tensors[i];
      tensors[i].device = device;
      tensors[i].ndim = static_cast<int32_t>(t.shape.size());
      tensors[i].dtype = dlpack_dtype(t.dtype);
      tensors[i].shape = const_cast<int64_t*>(t.shape.data());
      tensors[i].strides = const_cast<int64_t*>(t.strides.data());
      tensors[i].byte_offset = static_cast<uint64_t>(t.first * size_of(t.dtype));
      slots[i].tensor = t.present ? &tensors[i] : nullptr;
    }
  }
  DrawnArguments(const DrawnArguments&) = delete;

  std::vector<DLTensor> tensors;
  std::vector<fk_slot> slots;
};

// Calls visit(k, offset) with each element's place among the values and in memory.
template <class Visit>
void for_each_element(const DrawnTensor& t, const Visit& visit) {
  std::vector<int64_t> index(t.shape.size(), 0);
  const int64_t count = t.numel();
  int64_t offset = t.first;
  for (int64_t k = 0; k < count; ++k) {
    visit(k, offset);
    for (int d = static_cast<int>(index.size()) - 1; d >= 0; --d) {
      offset += t.strides[d];
      if (++index[d] < t.shape[d]) break;
      offset -= t.strides[d] * t.shape[d];
      index[d] = 0;
    }
  }
}

// Holds a tensor's memory, on the host.
class Image {
 public:
  explicit Image(const DrawnTensor& t) : bytes_(t.elements * size_of(t.dtype), char(kPoison)) {
    view_.dtype = t.dtype;
    view_.data = bytes_.data();
    if (t.values.empty()) return;
    for_each_element(t, [&](int64_t k, int64_t offset) { put(offset, t.values[k]); });
  }

  char* data() { return bytes_.data(); }
  size_t size() const { return bytes_.size(); }
  bool operator==(const Image& other) const { return bytes_ == other.bytes_; }

  double get(int64_t offset) const {
    if (view_.dtype == DType::kInt32 || view_.dtype == DType::kInt64) {
      return static_cast<double>(load_index(view_, offset));
    }
    return load(view_, offset);
  }

  void put(int64_t offset, double value) {
    if (view_.dtype == DType::kInt64) {
      view_.ptr<int64_t>()[offset] = static_cast<int64_t>(value);
    } else if (view_.dtype == DType::kInt32) {
      view_.ptr<int32_t>()[offset] = static_cast<int32_t>(value);
    } else {
      store(view_, offset, value);
    }
  }

  // Sets the elements of `t` back to what they are in `other`.
  void restore(const DrawnTensor& t, const Image& other) {
    const int64_t size = size_of(t.dtype);
    for_each_element(t, [&](int64_t, int64_t offset) {
      std::memcpy(&bytes_[offset * size], &other.bytes_[offset * size], size);
    });
  }

 private:
  Image(const Image&) = delete;
  std::vector<char> bytes_;
  Tensor view_;
};

// Owns memory that it gives back in the end.
class Allocation {
 public:
  explicit Allocation(CheckMemory& memory) : memory_(memory) {}
  ~Allocation() {
    if (data_ != nullptr) memory_.release(data_);
  }
  Allocation(const Allocation&) = delete;

  Status allocate(const void* contents, size_t bytes) {
    FK_RETURN_IF_ERROR(memory_.allocate(bytes, &data_));
    return memory_.copy_in(data_, contents, bytes);
  }
  void* data() const { return data_; }

 private:
  CheckMemory& memory_;
  void* data_ = nullptr;
};

// Takes one implementation for as long as it lives.
class Forced {
 public:
  explicit Forced(const fk_op& op) : op_(op), before_(op.forced) {}
  ~Forced() { op_.forced = before_; }
  Forced(const Forced&) = delete;

  Status force(const char* implementation) {
    if (fk_force_implementation(&op_, implementation) == FK_OK) return {};
    return invalid(fk_last_error());
  }

 private:
  const fk_op& op_;
  const fk_op::Implementation* before_;
};

class Run {
 public:
  Run(const DrawnCall& drawn_call, CheckMemory& memory)
      : drawn_(drawn_call),
        memory_(memory),
        arguments_(drawn_call, memory.device()),
        images_(drawn_call.tensors.size()),
        allocations_(drawn_call.tensors.size()) {}

  Status call() {
    size_t workspace_bytes = 0;
    FK_RETURN_IF_ERROR(query_workspace(*drawn_.op, arguments_.slots.data(), &workspace_bytes));
    for (size_t i = 0; i < images_.size(); ++i) {
      const DrawnTensor& t = drawn_.tensors[i];
      if (!t.present || t.alias >= 0) continue;
      images_[i] = std::make_unique<Image>(t);
      allocations_[i] = std::make_unique<Allocation>(memory_);
      FK_RETURN_IF_ERROR(allocations_[i]->allocate(images_[i]->data(), images_[i]->size()));
    }
    for (size_t i = 0; i < images_.size(); ++i) {
      if (drawn_.tensors[i].present) arguments_.tensors[i].data = allocations_[home(i)]->data();
    }
    std::vector<char> poison(workspace_bytes + kWorkspaceGuard, char(kPoison));
    Allocation workspace(memory_);
    FK_RETURN_IF_ERROR(workspace.allocate(poison.data(), poison.size()));
    fk_exec exec = FK_EXEC_DEFAULTS;
    exec.workspace = workspace.data();
    exec.workspace_bytes = workspace_bytes;
    FK_RETURN_IF_ERROR(fk::call(*drawn_.op, arguments_.slots.data(), exec));
    FK_RETURN_IF_ERROR(memory_.copy_out(poison.data(), workspace.data(), poison.size()));
    for (size_t k = workspace_bytes; k < poison.size(); ++k) {
      if (poison[k] != char(kPoison)) return {FK_INTERNAL, "wrote past the end of the workspace"};
    }
    return {};
  }

  Status read(std::vector<DrawnTensor>* outputs) {
    outputs->assign(drawn_.tensors.size(), {});
    std::vector<std::unique_ptr<Image>> after(images_.size());
    for (size_t i = 0; i < images_.size(); ++i) {
      if (images_[i] == nullptr) continue;
      after[i] = std::make_unique<Image>(drawn_.tensors[i]);
      FK_RETURN_IF_ERROR(
          memory_.copy_out(after[i]->data(), allocations_[i]->data(), after[i]->size()));
    }
    for (size_t i = 0; i < images_.size(); ++i) {
      const DrawnTensor& t = drawn_.tensors[i];
      if (field(i).kind != Kind::kOutput || !t.present) continue;
      DrawnTensor& output = (*outputs)[i];
      output = t;
      output.values.resize(t.numel());
      for_each_element(
          t, [&](int64_t k, int64_t offset) { output.values[k] = after[home(i)]->get(offset); });
      after[home(i)]->restore(t, *images_[home(i)]);
    }
    // The rest of the difference was written where nothing should be.
    for (size_t i = 0; i < images_.size(); ++i) {
      if (images_[i] == nullptr || *after[i] == *images_[i]) continue;
      const bool input = field(i).kind == Kind::kInput;
      return {FK_INTERNAL,
              (input ? "wrote into the input " : "wrote outside the output ") + field(i).name};
    }
    return {};
  }

 private:
  const Field& field(size_t i) const { return drawn_.op->declaration.fields[i]; }
  // Returns the tensor whose memory holds this one.
  size_t home(size_t i) const { return drawn_.tensors[i].alias >= 0 ? drawn_.tensors[i].alias : i; }

  const DrawnCall& drawn_;
  CheckMemory& memory_;
  DrawnArguments arguments_;
  std::vector<std::unique_ptr<Image>> images_;
  std::vector<std::unique_ptr<Allocation>> allocations_;
};

}  // namespace

CheckMemory& host_memory() {
  static HostMemory memory;
  return memory;
}

Status check_call(const DrawnCall& drawn_call) {
  DrawnArguments arguments(drawn_call, {kDLCPU, 0});
  std::vector<std::unique_ptr<Image>> images;
  for (size_t i = 0; i < drawn_call.tensors.size(); ++i) {
    const DrawnTensor& t = drawn_call.tensors[i];
    const bool index = t.dtype == DType::kInt32 || t.dtype == DType::kInt64;
    if (!t.present || !index || t.values.empty()) continue;
    images.push_back(std::make_unique<Image>(t));
    arguments.tensors[i].data = images.back()->data();
  }
  size_t bytes = 0;
  return query_workspace(*drawn_call.op, arguments.slots.data(), &bytes);
}

std::string implementation_of(const DrawnCall& drawn_call, DLDeviceType device) {
  const DrawnArguments arguments(drawn_call, {device, 0});
  const char* name = "";
  return query_implementation(*drawn_call.op, arguments.slots.data(), &name).ok() ? name : "";
}

Status run_call(const DrawnCall& drawn_call, const char* implementation, CheckMemory& memory,
                std::vector<DrawnTensor>* outputs) {
  Forced forced(*drawn_call.op);
  FK_RETURN_IF_ERROR(forced.force(implementation));
  Run run(drawn_call, memory);
  FK_RETURN_IF_ERROR(run.call());
  return run.read(outputs);
}

}  // namespace fk
