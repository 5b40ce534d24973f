// Torch's kernels for every op: one boxed function that turns torch's stack into slots, allocates
// the outputs and makes the call. Which op it is, and which of its outputs are wanted, is
// registered with the name; the Python side (flashkernel/torch) derives the names and schemas from
// the declarations.
#include <sys/mman.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/infer.h"
#include "core/op.h"
#include "shim.h"

namespace fk::torch {
namespace {

constexpr int kMaxTensors = 32;
constexpr int kMaxSlots = 64;
constexpr int kMaxKernels = 512;

const Shim* shim = nullptr;

// What is registered under one name, laid out for the call.
struct Kernel {
  struct Argument {
    int field;
    bool is_tensor;
    bool boxed;     // a tensor that is optional in the schema
    bool writable;  // a tensor that the output `in_place` is written over
  };
  struct Output {
    int field;
    int like;  // a field, an input always there, whose shape and dtype this output has; or -1
  };

  const fk_op* op = nullptr;
  std::vector<Argument> arguments;  // in the schema's order
  std::vector<int> absent;          // fields, inputs, that are not among the arguments
  std::vector<Output> outputs;      // all of the op's
  uint64_t wanted = 0;              // bit i: output i is computed and returned
  bool wanted_on_stack = false;  // a last argument holds `wanted`; all outputs are returned, those
                                 // not computed as tensors without elements
  int in_place = -1;             // the output's field that is written over ...
  int in_place_input = -1;       // ... this input's field
};

Kernel kernels[kMaxKernels];
int num_kernels = 0;

[[noreturn]] void fail(const fk_op& op, const std::string& what) {
  throw std::runtime_error(op.public_name() + ": " + what);
}

void check(const fk_op& op, int32_t status, const char* what) {
  if (status == 0) return;
  const auto why = shim->torch_exception_get_what_without_backtrace;
  fail(op,
       std::string("torch could not ") + what + (why == nullptr ? "" : std::string(": ") + why()));
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
  if (status != 0) check(op, status, ("describe " + field.name).c_str());
  if (ndim > kMaxDims) {
    fail(op, field.name + ": expected at most " + std::to_string(kMaxDims) + " dimensions, got " +
                 std::to_string(ndim));
  }
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

// Asks for huge pages under an output that is too large for the C library to serve from memory it
// has: the system hands such memory out page by page as it is first written, and small pages cost
// more than the kernel that writes them. Below that size much of the memory is not fresh, and huge
// pages are cut to pieces when the C library gives the end of its heap back.
void advise_huge_pages(void* data, int64_t bytes) {
  constexpr int64_t kFrom = int64_t{32} << 20;  // the GNU C library's DEFAULT_MMAP_THRESHOLD_MAX
  constexpr uintptr_t kPage = 4096;
  if (data == nullptr || bytes < kFrom) return;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
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
        shim->aoti_torch_empty_strided(type.ndim, type.shape, strides, shim->dtype_code(type.dtype),
                                       on_cuda ? shim->cuda : shim->cpu,
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
    if (!on_cuda) advise_huge_pages(out->data, stride * (type.dtype.bits / 8));
  }
  return handle;
}

// Workspace as a torch tensor, so that it counts in torch's memory figures and, on CUDA, lives
// until the stream has passed this call.
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
    if (shim->aoti_torch_empty_strided(
            1, &size, &stride, shim->aoti_torch_dtype_uint8(), on_cuda ? shim->cuda : shim->cpu,
            on_cuda ? workspace->device.device_id : -1, &workspace->handle) != 0 ||
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

// An output of the same shape and dtype as a tensor.
OutputType type_like(const DLTensor& tensor) {
  OutputType type;
  type.dtype = tensor.dtype;
  type.ndim = tensor.ndim;
  for (int i = 0; i < tensor.ndim; ++i) type.shape[i] = tensor.shape[i];
  return type;
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
  for (const Kernel::Argument& argument : kernel.arguments) {
    StableIValue value = *next++;
    if (!argument.is_tensor) {
      slots[argument.field].integer = static_cast<int64_t>(value);  // the bits of any attribute
      continue;
    }
    if (argument.boxed && value != 0) {
      auto* box = reinterpret_cast<StableIValue*>(value);
      value = *box;
      delete box;
    }
    handles[argument.field] = reinterpret_cast<Handle>(value);
    if (value != 0) inputs.add(handles[argument.field]);
  }
  const uint64_t wanted = kernel.wanted_on_stack ? *next : kernel.wanted;

  int used = 0;
  for (const int field : kernel.absent) slots[field].tensor = nullptr;
  for (const Kernel::Argument& argument : kernel.arguments) {
    if (!argument.is_tensor) continue;
    slots[argument.field].tensor = nullptr;
    if (handles[argument.field] == nullptr) continue;
    describe(op, fields[argument.field], handles[argument.field], argument.writable,
             &tensors[used]);
    slots[argument.field].tensor = &tensors[used++];
  }
  if (used == 0) fail(op, "expected at least one tensor, got none");
  const DLTensor& first = tensors[0];

  ShapeInference inference;
  bool inferred = false;
  StableIValue results[kMaxTensors];
  int num_results = 0;
  for (size_t i = 0; i < kernel.outputs.size(); ++i) {
    const Kernel::Output& output = kernel.outputs[i];
    const bool compute = (wanted >> i & 1) != 0;
    slots[output.field].tensor = nullptr;
    if (output.field == kernel.in_place) {
      if (compute) slots[output.field].tensor = slots[kernel.in_place_input].tensor;
      continue;
    }
    if (!compute && !kernel.wanted_on_stack) continue;
    OutputType type;
    if (!compute) {
      type.dtype = first.dtype;
      type.ndim = 1;
    } else if (output.like >= 0) {
      type = type_like(*slots[output.like].tensor);
    } else {
      Status status;
      if (!inferred) status = inference.bind(op.declaration, slots);
      inferred = true;
      if (status.ok()) status = inference.output(fields[output.field], &type);
      if (!status.ok()) explain(op, slots, status);
    }
    const Handle handle = allocate(op, type, first.device, compute ? &tensors[used] : nullptr);
    outputs.add(handle);
    results[num_results++] = reinterpret_cast<StableIValue>(handle);
    if (compute) slots[output.field].tensor = &tensors[used++];
  }

  Workspace workspace;
  workspace.device = first.device;
  fk_exec exec = FK_EXEC_DEFAULTS;
  exec.parallel_for = parallel_for;
  exec.allocate = Workspace::allocate;
  exec.allocator = &workspace;
  exec.deterministic = shim->deterministic() ? 1 : 0;
  if (first.device.device_type == kDLCUDA) {
    const auto current_stream = shim->aoti_torch_get_current_cuda_stream;
    if (current_stream == nullptr) fail(op, "this torch does not tell its CUDA stream");
    check(op, current_stream(first.device.device_id, &exec.stream), "tell its CUDA stream");
  }
  if (fk_op_call(&op, slots, &exec) != FK_OK) throw std::runtime_error(fk_last_error());

  outputs.release_all();
  for (int i = 0; i < num_results; ++i) stack[i] = results[i];
}

// Torch calls a boxed kernel without saying which, so each registered name gets a function of its
// own.
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

// The first input, always there, that has an output's type.
int input_like(const OpDeclaration& op, const Field& output) {
  if (op.float8 && output.dtype_rule == DTypeRule::kActivation) return -1;
  for (size_t i = 0; i < op.fields.size(); ++i) {
    const Field& f = op.fields[i];
    if (f.kind == Kind::kInput && !f.optional && f.along_axis == output.along_axis &&
        f.shapes.size() == 1 && f.type == output.type && f.dtype_rule != DTypeRule::kParameter) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

const char* register_kernel(const char* name, Kernel kernel) {
  if (num_kernels == kMaxKernels) return "the torch binding's table of kernels is full";
  static LibraryHandle libraries[2] = {};  // never deleted: the kernels stay registered
  static constexpr const char* kKeys[2] = {"CPU", "CUDA"};
  kernels[num_kernels] = std::move(kernel);
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

// Registers CPU and CUDA kernels for the torch op `flashkernel::<name>`, whose schema exists
// already. outputs: which of the op's outputs it returns (bit i: output i), or -1: told by a last
// argument of the call. in_place: the output (counted among the outputs) written over its input, or
// -1. absent, boxed: the inputs (bit i: field i) that the schema leaves out, and those it has as
// `Tensor?`. Returns NULL, or what went wrong.
FK_API const char* fk_torch_register(const char* name, const fk_op* op, int64_t outputs,
                                     int32_t in_place, uint64_t absent, uint64_t boxed) {
  using fk::Kind;
  const char* error = nullptr;
  fk::torch::shim = fk::torch::load_shim(&error);
  if (fk::torch::shim == nullptr) return error;
  const fk::OpDeclaration& declaration = op->declaration;
  if (declaration.fields.size() > fk::torch::kMaxSlots) {
    return "the op has more arguments than the torch binding allows";
  }
  fk::torch::Kernel kernel;
  kernel.op = op;
  kernel.wanted_on_stack = outputs < 0;
  kernel.wanted = static_cast<uint64_t>(outputs);
  int tensors = 0;
  for (size_t i = 0; i < declaration.fields.size(); ++i) {
    const fk::Field& f = declaration.fields[i];
    const int field = static_cast<int>(i);
    if (f.kind == Kind::kOutput) {
      ++tensors;
      if (static_cast<int>(kernel.outputs.size()) == in_place) {
        kernel.in_place = field;
        kernel.in_place_input = declaration.find(f.updates.empty() ? f.may_alias : f.updates);
      }
      kernel.outputs.push_back({field, fk::torch::input_like(declaration, f)});
    } else if ((absent >> i & 1) != 0) {
      kernel.absent.push_back(field);
    } else {
      const bool is_tensor = f.kind == Kind::kInput;
      tensors += is_tensor ? 1 : 0;
      kernel.arguments.push_back({field, is_tensor, (boxed >> i & 1) != 0, false});
    }
  }
  if (tensors > fk::torch::kMaxTensors) {
    return "the op has more tensors than the torch binding allows";
  }
  for (fk::torch::Kernel::Argument& argument : kernel.arguments) {
    argument.writable = argument.field == kernel.in_place_input;
  }
  return fk::torch::register_kernel(name, std::move(kernel));
}

}  // extern "C"
