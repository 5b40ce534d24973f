// Torch's kernels for every op: one boxed function that turns torch's stack into slots, allocates the
// outputs and makes the call. Which op it is, and which of its outputs are wanted, is registered with
// the name; the Python side (flashkernel/torch) derives the names and schemas from the declarations.
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/infer.h"
#include "core/op.h"
#include "shim.h"

namespace fk::torch {
namespace {

constexpr int kMaxTensors = 32;
constexpr int kMaxSlots = 64;
constexpr int kMaxKernels = 512;

const Shim* shim = nullptr;

// What is registered under one name.
struct Kernel {
  const fk_op* op = nullptr;
  uint64_t outputs = 0;           // bit i: output i is computed and returned
  bool outputs_on_stack = false;  // an argument after the op's own holds `outputs`; all are returned,
                                  // those not computed as tensors without elements
  uint64_t absent = 0;            // bit i: field i, an input, is not among the arguments
  uint64_t boxed = 0;             // bit i: field i, an input, is optional in the schema
  int in_place = -1;              // the output that is written over the input it may alias
};

Kernel kernels[kMaxKernels];
int num_kernels = 0;

[[noreturn]] void fail(const fk_op& op, const std::string& what) {
  throw std::runtime_error(op.public_name() + ": " + what);
}

void check(const fk_op& op, int32_t status, const char* what) {
  if (status == 0) return;
  const auto why = shim->torch_exception_get_what_without_backtrace;
  fail(op, std::string("torch could not ") + what + (why == nullptr ? "" : std::string(": ") + why()));
}

// Tensors owned until the end of a call.
class Owned {
 public:
  Owned() = default;
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    for (int i = 0; i < count_; ++i) shim->aoti_torch_delete_tensor_object(handles_[i]);
  }

  void add(Handle handle) { handles_[count_++] = handle; }
  void release_all() { count_ = 0; }

 private:
  Handle handles_[kMaxTensors];
  int count_ = 0;
};

void describe(const fk_op& op, const Field& field, Handle handle, bool writable, DLTensor* out) {
  int64_t ndim = 0;
  int32_t dtype = 0, device_type = 0, device_index = 0;
  int32_t status = shim->aoti_torch_get_dim(handle, &ndim);
  status |= shim->aoti_torch_get_sizes(handle, &out->shape);
  status |= shim->aoti_torch_get_strides(handle, &out->strides);
  status |= shim->aoti_torch_get_dtype(handle, &dtype);
  status |= shim->aoti_torch_get_device_type(handle, &device_type);
  if (device_type != shim->cpu) status |= shim->aoti_torch_get_device_index(handle, &device_index);
  if (writable) {
    status |= shim->torch_get_mutable_data_ptr(handle, &out->data);
  } else {
    const void* data = nullptr;
    status |= shim->torch_get_const_data_ptr(handle, &data);
    out->data = const_cast<void*>(data);
  }
  check(op, status, ("describe " + field.name).c_str());
  if (device_type != shim->cpu && device_type != shim->cuda) {
    fail(op, field.name + ": expected a CPU or CUDA tensor, got another device");
  }
  if (dtype < 0 || dtype >= Shim::kMaxDTypes || shim->dlpack[dtype].lanes == 0) {
    fail(op, field.name + ": unknown dtype (torch's code " + std::to_string(dtype) + ")");
  }
  out->device.device_type = device_type == shim->cuda ? kDLCUDA : kDLCPU;
  out->device.device_id = device_type == shim->cuda ? device_index : 0;
  out->ndim = static_cast<int32_t>(ndim);
  out->dtype = shim->dlpack[dtype];
  out->byte_offset = 0;
}

Handle allocate(const fk_op& op, const OutputType& type, DLDevice device, DLTensor* out) {
  int64_t strides[kMaxDims];
  int64_t stride = 1;
  for (int i = type.ndim - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= type.shape[i] > 1 ? type.shape[i] : 1;  // as torch counts them where a size is 0
  }
  const bool on_cuda = device.device_type == kDLCUDA;
  Handle handle = nullptr;
  check(op,
        shim->aoti_torch_empty_strided(type.ndim, type.shape, strides,
                                       shim->dtype_code(type.dtype), on_cuda ? shim->cuda : shim->cpu,
                                       on_cuda ? device.device_id : -1, &handle),
        "allocate an output");
  if (out != nullptr) {
    shim->torch_get_mutable_data_ptr(handle, &out->data);
    shim->aoti_torch_get_sizes(handle, &out->shape);
    shim->aoti_torch_get_strides(handle, &out->strides);
    out->device = device;
    out->ndim = type.ndim;
    out->dtype = type.dtype;
    out->byte_offset = 0;
  }
  return handle;
}

// Workspace as a torch tensor, so that it counts in torch's memory figures and, on CUDA, lives until
// the stream has passed this call.
struct Workspace {
  DLDevice device{};
  Handle handle = nullptr;

  ~Workspace() {
    if (handle != nullptr) shim->aoti_torch_delete_tensor_object(handle);
  }

  static void* allocate(void* self, size_t bytes) {
    constexpr uintptr_t kAlignment = 256;
    auto* workspace = static_cast<Workspace*>(self);
    const bool on_cuda = workspace->device.device_type == kDLCUDA;
    const auto size = static_cast<int64_t>(bytes + kAlignment);
    const int64_t stride = 1;
    void* data = nullptr;
    if (shim->aoti_torch_empty_strided(1, &size, &stride, shim->aoti_torch_dtype_uint8(),
                                       on_cuda ? shim->cuda : shim->cpu,
                                       on_cuda ? workspace->device.device_id : -1,
                                       &workspace->handle) != 0 ||
        shim->torch_get_mutable_data_ptr(workspace->handle, &data) != 0) {
      return nullptr;
    }
    const auto address = reinterpret_cast<uintptr_t>(data);
    return reinterpret_cast<void*>((address + kAlignment - 1) / kAlignment * kAlignment);
  }
};

void parallel_for(void*, int64_t count, int64_t grain, fk_range_body body, void* context) {
  if (shim->torch_parallel_for(0, count, grain, body, context) != 0) {
    throw std::runtime_error("torch_parallel_for failed");
  }
}

// The message of the call's own checks for inputs whose outputs could not even be inferred.
[[noreturn]] void explain(const fk_op& op, fk_slot* slots, const Status& inference) {
  const auto& fields = op.declaration.fields;
  for (size_t i = 0; i < fields.size(); ++i) {
    if (fields[i].kind == Kind::kOutput) slots[i].tensor = nullptr;
  }
  size_t bytes = 0;
  if (fk_op_workspace(&op, slots, &bytes) != FK_OK) throw std::runtime_error(fk_last_error());
  fail(op, inference.message());
}

void run(const Kernel& kernel, StableIValue* stack) {
  const fk_op& op = *kernel.op;
  const auto& fields = op.declaration.fields;
  Owned inputs, outputs;
  Handle handles[kMaxSlots];
  fk_slot slots[kMaxSlots];
  DLTensor tensors[kMaxTensors];

  // Everything on the stack is ours from here on, so it is all taken before anything may throw.
  const StableIValue* next = stack;
  for (size_t i = 0; i < fields.size(); ++i) {
    const Field& f = fields[i];
    if (f.kind == Kind::kOutput) continue;
    if ((kernel.absent >> i & 1) != 0) {
      handles[i] = nullptr;
      continue;
    }
    StableIValue value = *next++;
    if (f.kind == Kind::kInput) {
      if ((kernel.boxed >> i & 1) != 0 && value != 0) {
        auto* box = reinterpret_cast<StableIValue*>(value);
        value = *box;
        delete box;
      }
      handles[i] = reinterpret_cast<Handle>(value);
      if (handles[i] != nullptr) inputs.add(handles[i]);
    } else {
      slots[i].integer = static_cast<int64_t>(value);  // the bits of any attribute
    }
  }
  const uint64_t wanted = kernel.outputs_on_stack ? *next : kernel.outputs;

  int used = 0;
  const std::string* in_place_input = nullptr;
  if (kernel.in_place >= 0) in_place_input = &fields[kernel.in_place].may_alias;
  const DLTensor* first = nullptr;
  for (size_t i = 0; i < fields.size(); ++i) {
    if (fields[i].kind != Kind::kInput) continue;
    slots[i].tensor = nullptr;
    if (handles[i] == nullptr) continue;
    const bool writable = in_place_input != nullptr && fields[i].name == *in_place_input;
    describe(op, fields[i], handles[i], writable, &tensors[used]);
    slots[i].tensor = &tensors[used++];
    if (first == nullptr) first = slots[i].tensor;
  }
  if (first == nullptr) fail(op, "expected at least one tensor, got none");

  ShapeInference inference;
  Status status = inference.bind(op.declaration, slots);
  if (!status.ok()) explain(op, slots, status);
  StableIValue results[kMaxTensors];
  int num_results = 0, output = 0;
  for (size_t i = 0; i < fields.size(); ++i) {
    if (fields[i].kind != Kind::kOutput) continue;
    slots[i].tensor = nullptr;
    const bool compute = (wanted >> output++ & 1) != 0;
    if (static_cast<int>(i) == kernel.in_place) {
      if (compute) slots[i].tensor = slots[op.declaration.find(*in_place_input)].tensor;
      continue;
    }
    if (!compute && !kernel.outputs_on_stack) continue;
    OutputType type;
    if (compute) {
      status = inference.output(fields[i], &type);
      if (!status.ok()) explain(op, slots, status);
    } else {
      type.dtype = first->dtype;
      type.ndim = 1;
    }
    const Handle handle = allocate(op, type, first->device, compute ? &tensors[used] : nullptr);
    outputs.add(handle);
    results[num_results++] = reinterpret_cast<StableIValue>(handle);
    if (compute) slots[i].tensor = &tensors[used++];
  }

  Workspace workspace;
  workspace.device = first->device;
  fk_exec exec = FK_EXEC_DEFAULTS;
  exec.parallel_for = parallel_for;
  exec.allocate = Workspace::allocate;
  exec.allocator = &workspace;
  exec.deterministic = shim->deterministic() ? 1 : 0;
  if (first->device.device_type == kDLCUDA && shim->aoti_torch_get_current_cuda_stream != nullptr) {
    check(op,
          shim->aoti_torch_get_current_cuda_stream(first->device.device_id, &exec.stream),
          "tell the current CUDA stream");
  }
  if (fk_op_call(&op, slots, &exec) != FK_OK) throw std::runtime_error(fk_last_error());

  outputs.release_all();
  for (int i = 0; i < num_results; ++i) stack[i] = results[i];
}

// Torch calls a boxed kernel without saying which, so each registered name gets a function of its own.
template <int index>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  run(kernels[index], stack);
}

template <int... indices>
constexpr std::array<BoxedKernel, sizeof...(indices)> make_table(
    std::integer_sequence<int, indices...>) {
  return {boxed<indices>...};
}

constexpr auto kTable = make_table(std::make_integer_sequence<int, kMaxKernels>());

const char* register_kernel(const char* name, const Kernel& kernel) {
  int tensors = 0;
  for (const Field& f : kernel.op->declaration.fields) {
    tensors += f.kind == Kind::kInput || f.kind == Kind::kOutput ? 1 : 0;
  }
  if (tensors > kMaxTensors || kernel.op->declaration.fields.size() > kMaxSlots) {
    return "the op has more arguments than the torch binding allows";
  }
  if (num_kernels == kMaxKernels) return "the torch binding's table of kernels is full";
  static LibraryHandle libraries[2] = {};  // never deleted: the kernels stay registered
  static constexpr const char* kKeys[2] = {"CPU", "CUDA"};
  kernels[num_kernels] = kernel;
  for (int i = 0; i < 2; ++i) {
    if (libraries[i] == nullptr &&
        shim->aoti_torch_library_init_impl("flashkernel", kKeys[i], __FILE__, __LINE__,
                                           &libraries[i]) != 0) {
      return "torch could not open the flashkernel namespace";
    }
    if (shim->torch_library_impl(libraries[i], name, kTable[num_kernels], kBuildVersion) != 0) {
      return "torch refused the kernel";
    }
  }
  ++num_kernels;
  return nullptr;
}

}  // namespace
}  // namespace fk::torch

extern "C" {

// Registers CPU and CUDA kernels for the torch op `flashkernel::<name>`, whose schema exists already.
// outputs: which of the op's outputs it returns (bit i: output i), or -1: told by a last argument of
// the call. in_place: the output (counted among the outputs) written over its input, or -1. absent,
// boxed: the inputs (bit i: field i) that the schema leaves out, and those it has as `Tensor?`.
// Returns NULL, or what went wrong.
FK_API const char* fk_torch_register(const char* name, const fk_op* op, int64_t outputs,
                                     int32_t in_place, uint64_t absent, uint64_t boxed) {
  const char* error = nullptr;
  fk::torch::shim = fk::torch::load_shim(&error);
  if (fk::torch::shim == nullptr) return error;
  fk::torch::Kernel kernel;
  kernel.op = op;
  kernel.outputs_on_stack = outputs < 0;
  kernel.outputs = static_cast<uint64_t>(outputs);
  kernel.absent = absent;
  kernel.boxed = boxed;
  int output = 0;
  for (size_t i = 0; i < op->declaration.fields.size(); ++i) {
    if (op->declaration.fields[i].kind != fk::Kind::kOutput) continue;
    if (output++ == in_place) kernel.in_place = static_cast<int>(i);
  }
  return fk::torch::register_kernel(name, kernel);
}

}  // extern "C"
