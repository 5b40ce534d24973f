// Registers FlashKernel's handlers with the XLA that a process has loaded already, EXLA's say,
// without XLA's headers: its C API is asked for by name.
#include <dlfcn.h>

#include <cstring>
#include <string>

#include "../jax/xla_ffi.h"
#include "core/last_error.h"
#include "flashkernel/abi.h"

extern "C" fk::xla::Error* fk_exla_call_cpu(fk::xla::CallFrame*);
extern "C" fk::xla::Error* fk_exla_call_cuda(fk::xla::CallFrame*);

namespace fk::xla {
namespace {

constexpr char kTarget[] = "flashkernel";

ByteSpan span_of(const char* text) { return {text, std::strlen(text)}; }

// What XLA says went wrong; the error is given back.
std::string take_message(const Api& api, Error* error) {
  ErrorGetMessageArgs told{sizeof(ErrorGetMessageArgs), nullptr, error, nullptr};
  api.error_get_message(&told);
  const std::string message = told.message == nullptr ? "" : told.message;
  ErrorDestroyArgs destroyed{sizeof(ErrorDestroyArgs), nullptr, error};
  api.error_destroy(&destroyed);
  return message;
}

Status register_with(const char* library) {
  if (library == nullptr) return null("library");
  void* const xla = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
  if (xla == nullptr) {
    return unsupported(std::string("library: expected one that is loaded, got ") + library);
  }
  // The C function stands in newer versions; EXLA's older ones have the one of C++ alone.
  void* get = dlsym(xla, "XLA_FFI_GetApi");
  if (get == nullptr) get = dlsym(xla, "_ZN3xla3ffi12GetXlaFfiApiEv");
  dlclose(xla);  // it stays loaded for those who had loaded it
  if (get == nullptr) {
    return unsupported(std::string("library: expected one with XLA's FFI, got ") + library);
  }
  const Api* api = reinterpret_cast<const Api* (*)()>(get)();
  const size_t needed = offsetof(Api, device_memory_free) + sizeof(Api::device_memory_free);
  if (api == nullptr || api->struct_size < needed || api->api_version.major_version != kApiMajor) {
    return unsupported(std::string("library: expected version 0 of XLA's FFI, got another in ") +
                       library);
  }
  constexpr struct {
    const char* platform;
    Handler handler;
  } kHandlers[] = {{"Host", fk_exla_call_cpu}, {"CUDA", fk_exla_call_cuda}};
  for (const auto& h : kHandlers) {
    HandlerRegisterArgs args{sizeof(HandlerRegisterArgs),
                             nullptr,
                             span_of(kTarget),
                             span_of(h.platform),
                             {nullptr, nullptr, nullptr, h.handler},
                             /*traits=*/0};
    if (Error* error = api->handler_register(&args)) {
      return unsupported(std::string(h.platform) + ": " + take_message(*api, error));
    }
  }
  return {};
}

}  // namespace
}  // namespace fk::xla

// `library` is the name by which XLA was loaded. A second call finds the handlers registered, and
// XLA says so.
extern "C" FK_API fk_status fk_exla_register(const char* library) {
  return fk::guarded("fk_exla_register", [&] { return fk::xla::register_with(library); });
}
