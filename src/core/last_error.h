// The message behind fk_last_error, for the parts of the C ABI.
#pragma once

#include <string>

#include "flashkernel/abi.h"

namespace fk {

// Keeps the message for this thread and returns `code`.
fk_status set_last_error(fk_status code, std::string message);

}  // namespace fk
