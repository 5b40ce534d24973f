// A model that is ready to write: file, tokenizer, engine, one session.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/session.h"
#include "model/load.h"

namespace fk::engine {

struct OpenOptions {
  std::string model;      // a path, or a known model's name; empty: the built-in one
  std::string tokenizer;  // a file; empty: what is in or beside the model
  std::string device = "cpu";
  std::string quantize;        // "q4_0"...; empty: as stored
  std::string cache = "auto";  // "f16" or "f32" keys and values; auto: f32 for float32 models
  int64_t context = 0;         // 0: what the model was made for
  bool need_tokenizer = true;
  bool make_up_weights = false;  // take a config.json without weights, to time it
};

class TextModel {
 public:
  static Status open(const OpenOptions& options, std::unique_ptr<TextModel>* out);

  // Null where the files have none: then only ids go in.
  const model::Tokenizer* tokenizer() const { return model_.tokenizer.get(); }
  const std::string& tokenizer_error() const { return model_.tokenizer_error; }
  Engine& engine() { return *engine_; }
  const std::string& path() const { return model_.path; }

  // The ids of a prompt as the model wants to see it; of an empty one, what begins a text.
  Status encode_prompt(std::string_view text, std::vector<int32_t>* ids) const;
  Status generate(const std::vector<int32_t>& prompt, const GenerateOptions& options,
                  const Session::Piece& piece, Generated* result);

 private:
  TextModel() = default;

  model::Model model_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Session> session_;
};

}  // namespace fk::engine
