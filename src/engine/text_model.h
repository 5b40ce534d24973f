// This file declares a model that is ready to generate text: the loaded file, its tokenizer, an
// engine and a session.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/session.h"
#include "model/load.h"

namespace fk::engine {

struct OpenOptions {
  std::string model;      // a path, or a known model's name; empty: the built-in model
  std::string tokenizer;  // a file; empty: the one in or beside the model
  std::string device = "cpu";
  std::string quantize;  // the type that float weights become, such as "q4_0"; empty: as stored
  std::string cache = "auto";  // "f16" or "f32" keys and values; auto: f32 for float32 models
  int64_t context = 0;         // in tokens; 0: what the model was made for
  bool need_tokenizer = true;  // fail if there is no tokenizer
  // Accepts a config.json without weights and makes some up, for timing.
  bool make_up_weights = false;
};

class TextModel {
 public:
  // Loads the model's files and makes its engine. On failure *out stays as it was.
  static Status open(const OpenOptions& options, std::unique_ptr<TextModel>* out);

  // Returns the tokenizer, or null where the files have none (tokenizer_error() says why): then
  // only the engine can be used, with token ids.
  const model::Tokenizer* tokenizer() const { return model_.tokenizer.get(); }
  const std::string& tokenizer_error() const { return model_.tokenizer_error; }
  Engine& engine() { return *engine_; }
  const std::string& path() const { return model_.path; }

  // Sets `ids` to the tokens of a prompt, with the special tokens that the model expects. An empty
  // prompt becomes the token that begins a text.
  Status encode_prompt(std::string_view text, std::vector<int32_t>* ids) const;
  // Generates a text with the model's session (engine/session.h). Returns an error if the model has
  // no tokenizer.
  Status generate(const std::vector<int32_t>& prompt, const GenerateOptions& options,
                  const Session::Piece& piece, Generated* result);

 private:
  TextModel() = default;

  model::Model model_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Session> session_;
};

}  // namespace fk::engine
