// Recognises the chat format of a model by its template.
#pragma once

#include "model/tokenizer.h"

namespace fk::model {

// Sets the tokenizer's chat_format and default_system from its chat_template, and adds the tokens
// that end a message to its eos.
void set_chat(Tokenizer* tokenizer);

}  // namespace fk::model
