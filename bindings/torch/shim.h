// Declares the functions of LibTorch's stable C ABI that the binding uses. They are bound when
// torch is first seen, so that building needs no torch and one binary serves every version
// from 2.11 on.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flashkernel/abi.h"

namespace fk::torch {

using Handle = struct OpaqueTensor*;          // AtenTensorHandle: an owning pointer
using LibraryHandle = struct OpaqueLibrary*;  // TorchLibraryHandle
using StableIValue = uint64_t;                // one argument or result of a boxed kernel
using BoxedKernel = void (*)(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);

// Our boxed kernels follow the conventions of this version, whatever the version they meet: an
// optional argument is a pointer to a StableIValue, allocated by new and deleted by the receiver.
constexpr uint64_t kBuildVersion = (uint64_t{2} << 56) | (uint64_t{11} << 48);

// Each entry is a result, a name and arguments. Every int32_t result but a code's is 0 for success.
#define FK_TORCH_FUNCTIONS(X)                                                                      \
  X(int32_t, aoti_torch_get_dim, (Handle, int64_t*))                                               \
  X(int32_t, aoti_torch_get_sizes, (Handle, int64_t**))                                            \
  X(int32_t, aoti_torch_get_strides, (Handle, int64_t**))                                          \
  X(int32_t, aoti_torch_get_dtype, (Handle, int32_t*))                                             \
  X(int32_t, aoti_torch_get_device_type, (Handle, int32_t*))                                       \
  X(int32_t, aoti_torch_get_device_index, (Handle, int32_t*))                                      \
  X(int32_t, torch_get_const_data_ptr, (Handle, const void**))                                     \
  X(int32_t, torch_get_mutable_data_ptr, (Handle, void**))                                         \
  X(int32_t, aoti_torch_empty_strided,                                                             \
    (int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype,                    \
     int32_t device_type, int32_t device_index, Handle* result))                                   \
  X(int32_t, aoti_torch_delete_tensor_object, (Handle))                                            \
  X(int32_t, torch_parallel_for,                                                                   \
    (int64_t begin, int64_t end, int64_t grain, fk_range_body body, void* context))                \
  X(int32_t, aoti_torch_library_init_impl,                                                         \
    (const char* name_space, const char* key, const char* file, uint32_t line, LibraryHandle*))    \
  X(int32_t, torch_library_impl, (LibraryHandle, const char* name, BoxedKernel, uint64_t version)) \
  X(int32_t, aoti_torch_device_type_cpu, ())                                                       \
  X(int32_t, aoti_torch_device_type_cuda, ())                                                      \
  X(int32_t, aoti_torch_dtype_float32, ())                                                         \
  X(int32_t, aoti_torch_dtype_float16, ())                                                         \
  X(int32_t, aoti_torch_dtype_bfloat16, ())                                                        \
  X(int32_t, aoti_torch_dtype_float64, ())                                                         \
  X(int32_t, aoti_torch_dtype_int32, ())                                                           \
  X(int32_t, aoti_torch_dtype_int64, ())                                                           \
  X(int32_t, aoti_torch_dtype_int8, ())                                                            \
  X(int32_t, aoti_torch_dtype_uint8, ())                                                           \
  X(int32_t, aoti_torch_dtype_float8_e4m3fn, ())

// These may be missing: in a torch without CUDA, in an older torch, in one that renames its
// internals.
#define FK_TORCH_OPTIONAL_FUNCTIONS(X)                                                  \
  X(int32_t, aoti_torch_get_current_cuda_stream, (int32_t device_index, void** stream)) \
  X(const char*, torch_exception_get_what_without_backtrace, ())

struct Shim {
#define FK_DECLARE(result, name, arguments) result(*name) arguments = nullptr;
  FK_TORCH_FUNCTIONS(FK_DECLARE)
  FK_TORCH_OPTIONAL_FUNCTIONS(FK_DECLARE)
#undef FK_DECLARE

  static constexpr int kMaxDTypes = 64;
  DLDataType dlpack[kMaxDTypes] = {};  // by torch's dtype code; lanes = 0: unknown to us
  int32_t cpu = 0, cuda = 1;           // torch's device type codes

  // Asks torch.are_deterministic_algorithms_enabled(); true where that cannot be asked.
  bool deterministic() const;
  // Tells whether forward mode (torch.autograd.forward_ad) follows a tensor, which has a tangent
  // then; false where that cannot be asked.
  bool has_tangent(Handle tensor) const;
  // Gives torch's code of a dtype, or -1.
  int32_t dtype_code(DLDataType dtype) const;

  // These are two exported functions of ATen's context and not part of the C ABI.
  void* (*global_context)() = nullptr;
  bool (*deterministic_algorithms)(const void* context) = nullptr;
  // These are not either: c10::TensorImpl::_fw_grad, and what implements a tensor that is not
  // there.
  Handle (*tangent)(const void* implementation, uint64_t level, Handle tensor) = nullptr;
  const void* nothing = nullptr;
};

// Finds a symbol of torch's libraries, which `import torch` has loaded; NULL where there is none.
void* find_symbol(const char* name);

// Binds every function. Returns NULL, with what is missing in `error`, where torch is not loaded or
// has no such function. Later calls return the same table.
const Shim* load_shim(const char** error);

}  // namespace fk::torch
