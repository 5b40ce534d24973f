// This file declares the structs behind the C ABI's handles of models and tokenizers.
// engine/c_api.cc, which takes such handles too, includes them.
#pragma once

#include <memory>
#include <string>

#include "flashkernel/model.h"
#include "model/load.h"

struct fk_tokenizer {
  const fk::model::Tokenizer* tokenizer = nullptr;
  std::unique_ptr<fk::model::Tokenizer> owned;  // null where it belongs to a model
  std::string info;                             // the JSON that fk_tokenizer_info returns
};

struct fk_model {
  fk::model::Model model;
  fk_tokenizer tokenizer;  // its `tokenizer` is null where the model has none
  std::vector<std::pair<std::string, const fk::model::Weight*>> weights;
  std::string info;
};
