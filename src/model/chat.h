// Which chat format a template is.
#pragma once

#include "model/tokenizer.h"

namespace fk::model {

// Sets chat_format and default_system from chat_template, and adds the tokens that end a turn to
// eos.
void set_chat(Tokenizer* tokenizer);

}  // namespace fk::model
