// One function per file format: fills a decoder (and a tokenizer where the format holds one) from
// checked bytes. `file` names the file in errors and outlives the model.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "core/status.h"
#include "model/decoder.h"
#include "model/gguf.h"
#include "model/json.h"
#include "model/tensor_table.h"
#include "model/tokenizer.h"

namespace fk::model {

Status decoder_from_gguf(const Gguf& gguf, const TensorTable& table, Decoder* decoder);
Status tokenizer_from_gguf(const Gguf& gguf, std::unique_ptr<Tokenizer>* tokenizer);

// `config`: config.json; `generation`: generation_config.json or null.
Status decoder_from_huggingface(const std::string& config_file, const Json& config,
                                const Json* generation, const TensorTable& table, Decoder* decoder);
// tokenizer.json, and tokenizer_config.json or null.
Status tokenizer_from_json(const std::string& file, const Json& json, const Json* config,
                           std::unique_ptr<Tokenizer>* tokenizer);

// llama2.c's checkpoints: the legacy form, and versions 1 (float) and 2 (int8).
bool is_llama2c(std::string_view bytes);
Status decoder_from_llama2c(const std::string& file, std::string_view bytes, Decoder* decoder);
// `vocab`: how many tokens the model has; 0: as many as the file holds.
Status tokenizer_from_llama2c(const std::string& file, std::string_view bytes, int64_t vocab,
                              std::unique_ptr<Tokenizer>* tokenizer);

}  // namespace fk::model
