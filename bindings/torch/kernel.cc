#include "kernel.h"

#include <sys/mman.h>

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "core/infer.h"
#include "core/integers.h"
#include "layout.h"

namespace fk::torch {

const Shim* shim = nullptr;

namespace {

[[noreturn]] void fail(const fk_op& op, const std::string& what) {
  throw std::runtime_error(op.public_name() + ": " + what);
}

void check(const fk_op& op, int32_t status, const char* what) {
  if (status == 0) return;
  const auto why = shim->torch_exception_get_what_without_backtrace;
  fail(op,
       std::string("torch could not ") + what + (why == nullptr ? "" : std::string(": ") + why()));
}

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
  const uintptr_t begin = round_up(reinterpret_cast<uintptr_t>(data), kPage);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

// Allocates an output, which lies in memory as the tensor `like` of the same shape, or row-major
// where that is NULL.
Handle allocate(const fk_op& op, const OutputType& type, const DLTensor* like, DLDevice device,
                DLTensor* out) {
  int64_t strides[kMaxDims];
  int64_t elements = 1;
  for (int i = type.ndim - 1; i >= 0; --i) {
    strides[i] = elements;
    elements *= type.shape[i] > 1 ? type.shape[i] : 1;  // as torch counts them where a size is 0
  }
  if (like != nullptr) strides_like(*like, strides);
  const bool on_cuda = device.device_type == kDLCUDA;
  Handle handle = nullptr;
  check(op,
        shim->aoti_torch_empty_strided(type.ndim, type.shape, strides, shim->dtype_code(type.dtype),
                                       on_cuda ? shim->cuda : shim->cpu,
                                       on_cuda ? device.device_id : -1, &handle),
        "allocate an output");
  shim->torch_get_mutable_data_ptr(handle, &out->data);
  shim->aoti_torch_get_sizes(handle, &out->shape);
  shim->aoti_torch_get_strides(handle, &out->strides);
  out->device = device;
  out->ndim = type.ndim;
  out->dtype = type.dtype;
  out->byte_offset = 0;
  if (!on_cuda) advise_huge_pages(out->data, elements * (type.dtype.bits / 8));
  return handle;
}

// Takes workspace as a torch tensor, so that it counts in torch's memory figures and, on CUDA,
// lives until the stream has passed this call.
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
    return reinterpret_cast<void*>(round_up(address, kAlignment));
  }
};

// Throws the message of the call's own checks, for inputs whose outputs could not even be inferred.
[[noreturn]] void explain(const fk_op& op, fk_slot* slots, const Status& inference) {
  const auto& fields = op.declaration.fields;
  for (size_t i = 0; i < fields.size(); ++i) {
    if (fields[i].kind == Kind::kOutput) slots[i].tensor = nullptr;
  }
  size_t bytes = 0;
  if (fk_op_workspace(&op, slots, &bytes) != FK_OK) throw std::runtime_error(fk_last_error());
  fail(op, inference.message());
}

// Describes an output of the same shape and dtype as a tensor.
OutputType type_like(const DLTensor& tensor) {
  OutputType type;
  type.dtype = tensor.dtype;
  type.ndim = tensor.ndim;
  for (int i = 0; i < tensor.ndim; ++i) type.shape[i] = tensor.shape[i];
  return type;
}

bool has_shape(const DLTensor& tensor, const OutputType& type) {
  return tensor.ndim == type.ndim && std::equal(type.shape, type.shape + type.ndim, tensor.shape);
}

}  // namespace

void parallel_for(void*, int64_t count, int64_t grain, fk_range_body body, void* context) {
  if (shim->torch_parallel_for(0, count, grain, body, context) != 0) {
    throw std::runtime_error("torch_parallel_for failed");
  }
}

void compute(const Kernel& kernel, Call* call) {
  const fk_op& op = *kernel.op;
  const auto& fields = op.declaration.fields;
  const Handle* handles = call->handles;
  fk_slot* slots = call->slots;
  Owned outputs;
  DLTensor tensors[kMaxTensors];

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

  std::optional<OutputInference> inference;  // made when an output needs it
  for (size_t i = 0; i < kernel.outputs.size(); ++i) {
    const Kernel::Output& output = kernel.outputs[i];
    const bool compute = (call->wanted >> i & 1) != 0;
    slots[output.field].tensor = nullptr;
    if (output.over >= 0) {
      if (compute) slots[output.field].tensor = slots[output.over].tensor;
      continue;
    }
    if (!compute) {
      if (kernel.wanted_on_stack) call->results[call->num_results++] = nullptr;
      continue;
    }
    OutputType type;
    if (output.like >= 0) {
      type = type_like(*slots[output.like].tensor);
    } else {
      if (!inference) inference.emplace(op.declaration, slots);
      const Status status = inference->infer(fields[output.field], &type);
      if (!status.ok()) explain(op, slots, status);
    }
    const DLTensor* like = nullptr;
    if (output.laid_out_as >= 0) like = slots[output.laid_out_as].tensor;
    if (like != nullptr && !has_shape(*like, type)) like = nullptr;
    const Handle handle = allocate(op, type, like, first.device, &tensors[used]);
    outputs.add(handle);
    call->results[call->num_results++] = handle;
    slots[output.field].tensor = &tensors[used++];
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
}

Handle empty_result(const Kernel& kernel, const Call& call) {
  for (const Kernel::Argument& argument : kernel.arguments) {
    if (!argument.is_tensor || call.handles[argument.field] == nullptr) continue;
    DLTensor like;
    describe(*kernel.op, kernel.op->declaration.fields[argument.field],
             call.handles[argument.field], false, &like);
    OutputType type;
    type.dtype = like.dtype;
    type.ndim = 1;
    DLTensor out;
    return allocate(*kernel.op, type, nullptr, like.device, &out);
  }
  fail(*kernel.op, "expected at least one tensor, got none");
}

}  // namespace fk::torch
