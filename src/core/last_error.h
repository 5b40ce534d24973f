// The parts of the C ABI share the message behind fk_last_error, and the edge that no exception
// passes.
#pragma once

#include <cxxabi.h>

#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "core/status.h"

namespace fk {

// Keeps the message for this thread, as printable text, and returns `code`. Never throws: where
// there is no memory for the message, it is cut short.
fk_status set_last_error(fk_status code, std::string message) noexcept;
// Does the same with "what: why", for callers that may have no memory to build the message with.
fk_status set_last_error(fk_status code, const char* what, std::string_view why) noexcept;

// Runs `function` and returns what it does; where it throws, returns on_failure(why).
template <class Function, class OnFailure>
auto without_exceptions(const Function& function, const OnFailure& on_failure)
    -> decltype(function()) {
  try {
    return function();
  } catch (const abi::__forced_unwind&) {
    throw;  // the system ends this thread (pthread_cancel): that must not be stopped
  } catch (const std::bad_alloc&) {
    return on_failure("out of memory");
  } catch (const std::exception& e) {
    return on_failure(e.what());
  } catch (...) {
    return on_failure("unknown exception");
  }
}

// Runs the body of a function of the C ABI that returns a status. What goes wrong in it (of
// exceptions only out of memory is expected) becomes the last error, with `what` in front.
template <class Function>
fk_status guarded(const char* what, const Function& function) {
  return without_exceptions(
      [&]() -> fk_status {
        const Status status = function();
        if (status.ok()) return FK_OK;
        return set_last_error(status.code(), what, status.message());
      },
      [&](const char* why) { return set_last_error(FK_INTERNAL, what, why); });
}

// Runs the body of one that returns something else: where it throws, that is `failure`, and the
// last error is set.
template <class Result, class Function>
Result guarded_or(const char* what, Result failure, const Function& function) {
  return without_exceptions([&]() -> Result { return function(); },
                            [&](const char* why) {
                              set_last_error(FK_INTERNAL, what, why);
                              return failure;
                            });
}

inline Status null(const char* name) {
  return invalid(std::string(name) + ": expected one, got NULL");
}

}  // namespace fk
