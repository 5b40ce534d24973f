// Reads a model from what is on the disk. Files are mapped, weights stay where they lie, and
// nothing in a file is believed before it is checked: an error names the file, the field and what
// is wrong.
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

// A loaded model: the description, the tokenizer, and the mappings that the weights point into.
class Model {
 public:
  Model();
  Model(Model&&) noexcept;
  Model& operator=(Model&&) noexcept;
  ~Model();

  Decoder decoder;
  std::unique_ptr<Tokenizer> tokenizer;  // null where none was found
  std::string tokenizer_error;           // why none was found or taken
  FileFormat format = FileFormat::kSafetensors;
  std::string path;
  std::vector<std::shared_ptr<const MappedFile>> files;
  std::vector<uint16_t> made_up;  // where the weights of a configuration alone lie
};

struct LoadOptions {
  // tokenizer.json, llama2.c's tokenizer.bin, or a .gguf; empty: what is in or beside the model.
  std::string tokenizer;
  bool need_tokenizer = false;  // without one, fail
  // A config.json (or a folder that has one and no weights) gives a model whose weights are noise.
  bool make_up_weights = false;
};

// A Hugging Face folder, a .safetensors (config.json beside it), .gguf or llama2.c .bin file.
Status load(const std::string& path, const LoadOptions& options, Model* model);

// A .gguf or llama2.c file that is in memory already; `bytes` (64-byte aligned) must outlive
// `model`. `name` is what errors call it. `tokenizer`: a tokenizer.bin for llama2.c, else empty.
Status load_memory(std::string_view bytes, std::string_view tokenizer, const std::string& name,
                   Model* model);

// A tokenizer alone, from tokenizer.json (or its folder), tokenizer.bin or .gguf, or from any other
// file that `load` takes: that beside it; an empty path: the built-in model's. `vocab`: the
// model's, to check a tokenizer.bin against; 0 where there is no model.
Status load_tokenizer(const std::string& path, int64_t vocab,
                      std::unique_ptr<Tokenizer>* tokenizer);

}  // namespace fk::model
