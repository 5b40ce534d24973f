// This file declares the model inside the library, with which `fk generate` writes if the user
// names none.
#pragma once

#include <string_view>

namespace fk::model {

// Returns the bytes of a GGUF file, 64-byte aligned, which contains its tokenizer.
// examples/train_builtin.py trained it on the plays of Shakespeare and on Frankenstein.
std::string_view builtin_model();

}  // namespace fk::model
