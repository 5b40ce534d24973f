#include "shim.h"

#include <dlfcn.h>

#include <string>

namespace fk::torch {

void* find_symbol(const char* name) {
  for (const char* library :
       {"libtorch_cpu.so", "libtorch_cuda.so", "libc10.so", "libtorch_python.so"}) {
    void* handle = dlopen(library, RTLD_NOLOAD | RTLD_LAZY);
    if (handle == nullptr) continue;
    void* symbol = dlsym(handle, name);
    dlclose(handle);  // gives back the reference that dlopen took, not the library
    if (symbol != nullptr) return symbol;
  }
  return dlsym(RTLD_DEFAULT, name);
}

namespace {

template <class Function>
bool bind(const char* name, Function* function) {
  *function = reinterpret_cast<Function>(find_symbol(name));
  return *function != nullptr;
}

std::string bind_all(Shim* shim) {
  std::string missing;
#define FK_BIND(result, name, arguments) \
  if (!bind(#name, &shim->name)) missing += std::string(missing.empty() ? "" : ", ") + #name;
  FK_TORCH_FUNCTIONS(FK_BIND)
#undef FK_BIND
#define FK_BIND_OPTIONAL(result, name, arguments) bind(#name, &shim->name);
  FK_TORCH_OPTIONAL_FUNCTIONS(FK_BIND_OPTIONAL)
#undef FK_BIND_OPTIONAL
  if (!missing.empty()) return "torch 2.11 or later is needed; this one lacks " + missing;

  shim->cpu = shim->aoti_torch_device_type_cpu();
  shim->cuda = shim->aoti_torch_device_type_cuda();
  const auto add = [shim](int32_t code, DLDataType dtype) {
    if (code >= 0 && code < Shim::kMaxDTypes) shim->dlpack[code] = dtype;
  };
  add(shim->aoti_torch_dtype_float32(), {kDLFloat, 32, 1});
  add(shim->aoti_torch_dtype_float16(), {kDLFloat, 16, 1});
  add(shim->aoti_torch_dtype_bfloat16(), {kDLBfloat, 16, 1});
  add(shim->aoti_torch_dtype_float64(), {kDLFloat, 64, 1});
  add(shim->aoti_torch_dtype_int32(), {kDLInt, 32, 1});
  add(shim->aoti_torch_dtype_int64(), {kDLInt, 64, 1});
  add(shim->aoti_torch_dtype_int8(), {kDLInt, 8, 1});
  add(shim->aoti_torch_dtype_uint8(), {kDLUInt, 8, 1});
  add(shim->aoti_torch_dtype_float8_e4m3fn(), {FLASHKERNEL_DL_FLOAT8_E4M3FN, 8, 1});

  bind("_ZN2at13globalContextEv", &shim->global_context);
  bind("_ZNK2at7Context23deterministicAlgorithmsEv", &shim->deterministic_algorithms);
  bind("_ZNK3c1010TensorImpl8_fw_gradEmRKN2at10TensorBaseE", &shim->tangent);
  shim->nothing = find_symbol("_ZN3c1019UndefinedTensorImpl10_singletonE");
  return "";
}

}  // namespace

bool Shim::deterministic() const {
  if (global_context == nullptr || deterministic_algorithms == nullptr) return true;
  return deterministic_algorithms(global_context());
}

bool Shim::has_tangent(Handle tensor) const {
  constexpr uint64_t kLevel = 0;  // torch has no other
  if (tangent == nullptr || nothing == nullptr) return false;
  const auto implementation = [](Handle t) { return *reinterpret_cast<void* const*>(t); };
  return implementation(tangent(implementation(tensor), kLevel, tensor)) != nothing;
}

int32_t Shim::dtype_code(DLDataType dtype) const {
  for (int32_t code = 0; code < kMaxDTypes; ++code) {
    const DLDataType& d = dlpack[code];
    if (d.lanes == dtype.lanes && d.code == dtype.code && d.bits == dtype.bits) return code;
  }
  return -1;
}

const Shim* load_shim(const char** error) {
  static Shim shim;
  static const std::string problem = bind_all(&shim);
  if (problem.empty()) return &shim;
  *error = problem.c_str();
  return nullptr;
}

}  // namespace fk::torch
