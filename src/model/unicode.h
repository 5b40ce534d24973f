// This file declares white space and canonical composition in Unicode; core/utf8.h has its
// encoding.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/utf8.h"

namespace fk::model {

// Returns whether a character has Unicode's property White_Space.
bool is_white_space(uint32_t code_point);

// Returns the normal form C of a text, which must be valid UTF-8.
std::string nfc(std::string_view text);

}  // namespace fk::model
