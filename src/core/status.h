// Errors are values inside the library. The message says what was expected and what came; dispatch
// puts the op's name in front.
#pragma once

#include <string>
#include <utility>

#include "flashkernel/abi.h"

namespace fk {

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(fk_status code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == FK_OK; }
  fk_status code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  fk_status code_ = FK_OK;
  std::string message_;
};

inline Status invalid(std::string message) { return {FK_INVALID_ARGUMENT, std::move(message)}; }
inline Status unsupported(std::string message) { return {FK_UNSUPPORTED, std::move(message)}; }

#define FK_RETURN_IF_ERROR(expression)       \
  do {                                       \
    ::fk::Status fk_status_ = (expression);  \
    if (!fk_status_.ok()) return fk_status_; \
  } while (0)

}  // namespace fk
