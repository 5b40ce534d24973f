// Loads a model from files. Files are mapped and weights are used where they lie. Nothing in a file
// is believed before it is checked; an error names the file, the field and what is wrong.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model/decoder.h"
#include "model/tokenizer.h"

namespace fk::model {

enum class FileFormat : uint8_t { kSafetensors, kGguf, kLlama2c };

class MappedFile;

// Holds a loaded model: the description, the tokenizer, and the mappings that the weights point
// into.
class Model {
 public:
  Model();
  Model(Model&&) noexcept;
  Model& operator=(Model&&) noexcept;
  ~Model();

  Decoder decoder;
  std::unique_ptr<Tokenizer> tokenizer;  // null where none was found
  std::string tokenizer_error;           // why none was found or accepted
  FileFormat format = FileFormat::kSafetensors;
  std::string path;  // as given to `load`, or the name for errors
  std::vector<std::shared_ptr<const MappedFile>> files;
  std::vector<uint16_t> made_up;  // the weights of a model that is only a configuration
};

struct LoadOptions {
  // Names a tokenizer.json, llama2.c's tokenizer.bin, or a .gguf; where it is empty, the one in or
  // beside the model is meant.
  std::string tokenizer;
  bool need_tokenizer = false;  // fail if there is none
  // If true, `load` accepts a config.json, or a folder that has one and no weights, and makes up
  // weights of noise.
  bool make_up_weights = false;
};

// Loads a model from a Hugging Face folder, a .safetensors file (with config.json beside it), a
// .gguf file or llama2.c's .bin file. An empty path loads the built-in model.
Status load(const std::string& path, const LoadOptions& options, Model* model);

// Loads a model from a .gguf or llama2.c file that is in memory already; `bytes` must be 64-byte
// aligned and outlive `model`. `name` is what errors call it. `tokenizer` is a tokenizer.bin for
// llama2.c, or empty.
Status load_memory(std::string_view bytes, std::string_view tokenizer, const std::string& name,
                   Model* model);

// Loads a tokenizer alone. `path` is a tokenizer.json or its folder, a tokenizer.bin or a .gguf
// file; for any other file that `load` takes, it is the tokenizer beside it; an empty path stands
// for the built-in model's. `vocab` is how many tokens the model has, which a tokenizer.bin is
// checked against; 0 where there is no model.
Status load_tokenizer(const std::string& path, int64_t vocab,
                      std::unique_ptr<Tokenizer>* tokenizer);

}  // namespace fk::model
