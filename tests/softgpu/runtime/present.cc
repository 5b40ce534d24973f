// This file makes host memory pass for a GPU's. Two functions are replaced by -Wl,--wrap, in the
// test library alone:
//
// - dlsym, by which the torch binding finds the functions of torch's C shim: those that tell a
//   tensor's device, allocate one or give the current stream are replaced, so that CPU tensors are
//   CUDA tensors to the library. torch itself goes on computing with them on the CPU.
// - fk_op_call: for its length, the tensors of a call are the GPU's memory, so that a kernel which
//   reads or writes behind one of them is found.
#include <atomic>
#include <cstdint>
#include <cstring>

#include "core/op.h"
#include "flashkernel/abi.h"
#include "softgpu/runtime/call_memory.h"

using namespace fk::softgpu;

namespace {

// These are torch's numbers for devices.
constexpr int32_t kTorchCpu = 0, kTorchCuda = 1;

using DeviceType = int32_t (*)(void* tensor, int32_t* type);
using EmptyStrided = int32_t (*)(int64_t ndim, const int64_t* sizes, const int64_t* strides,
                                 int32_t dtype, int32_t device_type, int32_t device_index,
                                 void** result);
DeviceType real_device_type;
EmptyStrided real_empty_strided;

// Says whether torch's CPU tensors are CUDA tensors at the moment.
std::atomic<bool> presented{true};

int32_t device_type(void* tensor, int32_t* type) {
  const int32_t status = real_device_type(tensor, type);
  if (*type == kTorchCpu && presented) *type = kTorchCuda;
  return status;
}

int32_t device_index(void*, int32_t* index) {
  *index = 0;
  return 0;
}

int32_t empty_strided(int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                      int32_t type, int32_t index, void** result) {
  if (type == kTorchCuda) {
    type = kTorchCpu;
    index = -1;
  }
  return real_empty_strided(ndim, sizes, strides, dtype, type, index, result);
}

int32_t current_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}

// Wraps the caller's allocator, whose memory becomes the GPU's for the length of the call.
struct Allocator {
  CallMemory* memory;
  const fk_exec* caller;

  static void* allocate(void* self, size_t bytes) {
    const auto& allocator = *static_cast<Allocator*>(self);
    void* data = allocator.caller->allocate(allocator.caller->allocator, bytes);
    if (data != nullptr)
      allocator.memory->add({static_cast<char*>(data), bytes}, "workspace", true);
    return data;
  }
};

bool on_gpu(const DLTensor* tensor) {
  return tensor != nullptr && tensor->device.device_type == kDLCUDA;
}

}  // namespace

extern "C" {

FK_API void fk_softgpu_present(bool on) { presented = on; }

void* __real_dlsym(void* handle, const char* name);

void* __wrap_dlsym(void* handle, const char* name) {
  void* found = __real_dlsym(handle, name);
  if (std::strcmp(name, "aoti_torch_get_current_cuda_stream") == 0) {
    return reinterpret_cast<void*>(current_stream);
  }
  if (found == nullptr) return nullptr;
  if (std::strcmp(name, "aoti_torch_get_device_type") == 0) {
    real_device_type = reinterpret_cast<DeviceType>(found);
    return reinterpret_cast<void*>(device_type);
  }
  if (std::strcmp(name, "aoti_torch_get_device_index") == 0) {
    return reinterpret_cast<void*>(device_index);
  }
  if (std::strcmp(name, "aoti_torch_empty_strided") == 0) {
    real_empty_strided = reinterpret_cast<EmptyStrided>(found);
    return reinterpret_cast<void*>(empty_strided);
  }
  return found;
}

fk_status __real_fk_op_call(const fk_op* op, const fk_slot* slots, const fk_exec* exec);

fk_status __wrap_fk_op_call(const fk_op* op, const fk_slot* slots, const fk_exec* exec) {
  if (op == nullptr || slots == nullptr || exec == nullptr)
    return __real_fk_op_call(op, slots, exec);
  CallMemory memory;
  bool any = false;
  const auto& fields = op->declaration.fields;
  for (size_t i = 0; i < fields.size(); ++i) {
    const bool output = fields[i].kind == fk::Kind::kOutput;
    if ((!output && fields[i].kind != fk::Kind::kInput) || !on_gpu(slots[i].tensor)) continue;
    // An input may be written where an output lies on it; then both say so.
    memory.add(range_of(*slots[i].tensor), fields[i].name, output);
    any = true;
  }
  if (!any) return __real_fk_op_call(op, slots, exec);
  if (exec->workspace != nullptr) {
    memory.add({static_cast<char*>(exec->workspace), exec->workspace_bytes}, "workspace", true);
  }
  Allocator allocator = {&memory, exec};
  fk_exec own = *exec;
  if (exec->allocate != nullptr) {
    own.allocate = Allocator::allocate;
    own.allocator = &allocator;
  }
  return __real_fk_op_call(op, slots, &own);
}

}  // extern "C"
