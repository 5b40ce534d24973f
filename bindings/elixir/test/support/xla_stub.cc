// A libxla_extension.so of which only the registration of handlers is there, to test ours against:
// EXLA's own cannot be had where the tests run. It offers XLA's API as it is told:
//   -DAPI_BY=0  by no function      -DMAJOR=1        of a version to come
//   -DAPI_BY=1  by the one of C     -DREFUSES=1      which takes no handlers
//   -DAPI_BY=2  by the one of C++
#include <cstring>
#include <string>

#include "../../../jax/xla_ffi.h"

#ifndef MAJOR
#define MAJOR 0
#endif
#ifndef REFUSES
#define REFUSES 0
#endif

namespace fk::xla {

struct Error {
  std::string message;
};

namespace {

constexpr int kMost = 8;
HandlerRegisterArgs registered[kMost];
int count = 0;

// A handler tells its version where XLA asks for it; another function would not.
bool is_handler(Handler handler) {
  if (handler == nullptr) return false;
  Metadata metadata{};
  metadata.struct_size = sizeof(Metadata);
  metadata.api_version.major_version = -1;
  MetadataExtension extension{};
  extension.base = {sizeof(MetadataExtension), ExtensionType::kMetadata, nullptr};
  extension.metadata = &metadata;
  CallFrame frame{};
  frame.struct_size = sizeof(CallFrame);
  frame.extension_start = &extension.base;
  return handler(&frame) == nullptr && metadata.api_version.major_version == kApiMajor;
}

Error* register_handler(HandlerRegisterArgs* args) {
  if (REFUSES) return new Error{"the stub takes no handlers"};
  if (count == kMost) return new Error{"too many handlers"};
  registered[count++] = *args;
  return nullptr;
}

const Api* api() {
  static Api made{};
  made.struct_size = sizeof(Api);
  made.api_version = {sizeof(ApiVersion), nullptr, MAJOR, 1};
  made.error_get_message = [](ErrorGetMessageArgs* a) { a->message = a->error->message.c_str(); };
  made.error_destroy = [](ErrorDestroyArgs* a) { delete a->error; };
  made.handler_register = register_handler;
  return &made;
}

}  // namespace
}  // namespace fk::xla

#if API_BY == 2
namespace xla::ffi {
const fk::xla::Api* GetXlaFfiApi() { return fk::xla::api(); }
}  // namespace xla::ffi
#endif

extern "C" {

#if API_BY == 1
const fk::xla::Api* XLA_FFI_GetApi() { return fk::xla::api(); }
#endif

// "NAME PLATFORM", and whether it is a handler, of what was registered so far.
int stub_count() { return fk::xla::count; }
bool stub_handler(int i, char* text, size_t size) {
  (void)fk::xla::api;
  const fk::xla::HandlerRegisterArgs& r = fk::xla::registered[i];
  const std::string name =
      std::string(r.name.data, r.name.size) + " " + std::string(r.platform.data, r.platform.size);
  std::strncpy(text, name.c_str(), size - 1);
  text[size - 1] = 0;
  return fk::xla::is_handler(r.bundle.execute);
}

}  // extern "C"
