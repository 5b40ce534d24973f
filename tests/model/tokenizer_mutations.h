// Tokenizers that nobody would make: tokenizer.json changed part by part, so that most of them
// load.
#pragma once

#include <random>
#include <string>

#include "model/json.h"

namespace fk::model {

// A regular expression of what is known to take long, mostly a valid one.
std::string odd_expression(std::mt19937_64* random);
// A text that repeats something, mostly short, at times a megabyte.
std::string odd_text(std::mt19937_64* random);
// Puts in other normalizers, splits, decoders, added tokens, merges, ids around a text and chat
// templates, nested and in numbers.
void mutate_tokenizer(std::mt19937_64* random, Json* tokenizer);

}  // namespace fk::model
