// This file declares the readers of the file formats. Each fills a decoder or a tokenizer, and
// checks everything that it reads. `file` names the file in errors and must outlive the model.
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

// `config` is config.json, which `config_file` names in errors; `generation` is
// generation_config.json or null.
Status decoder_from_huggingface(const std::string& config_file, const Json& config,
                                const Json* generation, const TensorTable& table, Decoder* decoder);
// `json` is tokenizer.json; `config` is tokenizer_config.json or null.
Status tokenizer_from_json(const std::string& file, const Json& json, const Json* config,
                           std::unique_ptr<Tokenizer>* tokenizer);

// Returns whether the bytes begin with the magic number of llama2.c's versions 1 (float) and 2
// (int8). The legacy form, which decoder_from_llama2c also reads, has none.
bool is_llama2c(std::string_view bytes);
Status decoder_from_llama2c(const std::string& file, std::string_view bytes, Decoder* decoder);
// `vocab` is how many tokens the model has; 0 accepts as many as the file holds.
Status tokenizer_from_llama2c(const std::string& file, std::string_view bytes, int64_t vocab,
                              std::unique_ptr<Tokenizer>* tokenizer);

}  // namespace fk::model
