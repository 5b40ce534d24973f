// What stands behind the C ABI's handles, for the other parts of it that take them.
#pragma once

#include <memory>
#include <string>

#include "flashkernel/model.h"
#include "model/load.h"

struct fk_tokenizer {
  const fk::model::Tokenizer* tokenizer = nullptr;
  std::unique_ptr<fk::model::Tokenizer> owned;  // where it came without a model
  std::string info;
};

struct fk_model {
  fk::model::Model model;
  fk_tokenizer tokenizer;
  std::vector<std::pair<std::string, const fk::model::Weight*>> weights;
  std::string info;
};
