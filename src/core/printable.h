// Makes text from outside safe to show: names in hostile files, and what a model wrote.
#pragma once

#include <string>
#include <string_view>

namespace fk {

// Returns `text` as valid UTF-8 that a terminal or a log shows as it is and never obeys. Each byte
// of a control character (C0 with NUL, DEL, C1), of what turns the direction of a line or ends it,
// and of what is not UTF-8 becomes \xNN. Applying it again changes nothing. `kept`: control
// characters that stay, "\n\t" for example.
std::string printable(std::string_view text, std::string_view kept = "");

}  // namespace fk
