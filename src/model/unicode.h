// Unicode beyond its encoding: white space and canonical composition.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/utf8.h"

namespace fk::model {

bool is_white_space(uint32_t code_point);

// Normal form C of valid UTF-8.
std::string nfc(std::string_view text);

}  // namespace fk::model
