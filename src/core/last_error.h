// What the parts of the C ABI share: the message behind fk_last_error, and the edge that no
// exception passes.
#pragma once

#include <exception>
#include <string>

#include "core/status.h"

namespace fk {

// Keeps the message for this thread and returns `code`.
fk_status set_last_error(fk_status code, std::string message);

// The body of a function of the C ABI. What goes wrong in it (of exceptions only out of memory is
// expected) becomes the last error, with `what` in front.
template <class Function>
fk_status guarded(const char* what, const Function& function) {
  try {
    const Status status = function();
    if (status.ok()) return FK_OK;
    return set_last_error(status.code(), std::string(what) + ": " + status.message());
  } catch (const std::exception& e) {
    return set_last_error(FK_INTERNAL, std::string(what) + ": " + e.what());
  }
}

inline Status null(const char* name) {
  return invalid(std::string(name) + ": expected one, got NULL");
}

}  // namespace fk
