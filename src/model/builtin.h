// The model inside the library: what `fk generate` writes with where none is named.
#pragma once

#include <string_view>

namespace fk::model {

// A GGUF file with its tokenizer, 64-byte aligned. examples/train_builtin.py made it, on the plays
// of Shakespeare and on Frankenstein.
std::string_view builtin_model();

}  // namespace fk::model
