// Finds out what a path is, calls the format's reader, and puts model and tokenizer together.
#include "model/load.h"

#include <sys/stat.h>

#include <algorithm>

#include "model/builtin.h"
#include "model/formats.h"
#include "model/mapped_file.h"
#include "model/safetensors.h"

namespace fk::model {
namespace {

bool is_folder(const std::string& path) {
  struct stat status;
  return ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

bool exists(const std::string& path) {
  struct stat status;
  return ::stat(path.c_str(), &status) == 0;
}

// Returns the folder that a path is in.
std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash + 1);
}

std::string join(const std::string& folder, const std::string& name) {
  return folder.empty() || folder.back() == '/' ? folder + name : folder + "/" + name;
}

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

bool is_gguf(std::string_view bytes) { return bytes.substr(0, 4) == "GGUF"; }

// A safetensors file has its header's length in 8 bytes, then the header, which begins with "{".
bool is_safetensors(std::string_view bytes) { return bytes.size() > 8 && bytes[8] == '{'; }

// Maps a file. If its name ends in .gguf, it must be one.
Status open_file(const std::string& path, std::shared_ptr<const MappedFile>* file) {
  FK_RETURN_IF_ERROR(MappedFile::open(path, file));
  const std::string_view bytes = (*file)->bytes();
  if (!ends_with(path, ".gguf") || is_gguf(bytes)) return {};
  return file_error(path, "expected a GGUF file, which begins with \"GGUF\", got something else");
}

Status read_json(const std::string& path, Json* json) {
  std::shared_ptr<const MappedFile> file;
  FK_RETURN_IF_ERROR(MappedFile::open(path, &file));
  return parse_json(path, file->bytes(), json);
}

// Reads a file that may be absent: *json then stays null.
Status read_optional_json(const std::string& path, Json* json) {
  if (!exists(path)) return {};
  return read_json(path, json);
}

// Maps a safetensors file and adds its tensors to the table. The model keeps the mapping.
Status map_safetensors(const std::string& path, Model* model, TensorTable* table) {
  std::shared_ptr<const MappedFile> file;
  FK_RETURN_IF_ERROR(MappedFile::open(path, &file));
  model->files.push_back(file);
  return read_safetensors(file->path(), file->bytes(), table);
}

// Maps the files that model.safetensors.index.json names, and checks that each tensor is in the
// file that it says.
Status map_indexed(const std::string& folder, const std::string& index_path, Model* model,
                   TensorTable* table) {
  JsonDocument index;
  FK_RETURN_IF_ERROR(read_json(index_path, &index));
  const auto map = index.find("weight_map");
  if (map == index.end() || !map->is_object()) {
    return file_error(index_path, "weight_map: expected an object");
  }
  std::vector<std::string> names;
  for (const auto& [tensor, file] : map->items()) {
    if (!file.is_string()) return file_error(index_path, "weight_map: expected file names");
    const std::string& name = file.get_ref<const std::string&>();
    const bool in_folder = ends_with(name, ".safetensors") && name.find('/') == std::string::npos &&
                           name.find('\0') == std::string::npos;
    if (!in_folder) {
      return file_error(index_path,
                        "weight_map: expected names of .safetensors files in the same "
                        "folder, got " +
                            shown(file));
    }
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    if (names.size() > 1024) return file_error(index_path, "weight_map: names too many files");
  }
  for (const std::string& name : names) {
    FK_RETURN_IF_ERROR(map_safetensors(join(folder, name), model, table));
  }
  for (const auto& [tensor, file] : map->items()) {
    const StoredTensor* found = table->find(tensor);
    if (found == nullptr || *found->file != join(folder, file.get<std::string>())) {
      return file_error(index_path,
                        "weight_map: tensor " + shown_text(tensor) + " is not in " + shown(file));
    }
  }
  return {};
}

// Loads the tokenizer.json at `path`, with tokenizer_config.json and chat_template.jinja from
// `folder` if they are there.
Status load_json_tokenizer(const std::string& folder, const std::string& path,
                           std::unique_ptr<Tokenizer>* tokenizer) {
  JsonDocument json, config;
  FK_RETURN_IF_ERROR(read_json(path, &json));
  FK_RETURN_IF_ERROR(read_optional_json(join(folder, "tokenizer_config.json"), &config));
  const std::string chat = join(folder, "chat_template.jinja");
  if (exists(chat)) {
    std::shared_ptr<const MappedFile> file;
    FK_RETURN_IF_ERROR(MappedFile::open(chat, &file));
    if (config.is_null()) static_cast<Json&>(config) = Json::object();
    config["chat_template"] = std::string(file->bytes());
  }
  return tokenizer_from_json(path, json, config.is_null() ? nullptr : &config, tokenizer);
}

// Loads the model in a Hugging Face folder. `weights` is the .safetensors file, or "" to find them.
Status load_huggingface(const std::string& folder, const std::string& weights, Model* model) {
  model->format = FileFormat::kSafetensors;
  const std::string config_path = join(folder, "config.json");
  if (!exists(config_path)) {
    return file_error(config_path,
                      "is missing: a Hugging Face model has one beside its .safetensors");
  }
  JsonDocument config, generation;
  FK_RETURN_IF_ERROR(read_json(config_path, &config));
  FK_RETURN_IF_ERROR(read_optional_json(join(folder, "generation_config.json"), &generation));
  TensorTable table(weights.empty() ? folder : weights);
  const std::string single = join(folder, "model.safetensors");
  const std::string index = join(folder, "model.safetensors.index.json");
  if (!weights.empty()) {
    FK_RETURN_IF_ERROR(map_safetensors(weights, model, &table));
  } else if (exists(single)) {
    FK_RETURN_IF_ERROR(map_safetensors(single, model, &table));
  } else if (exists(index)) {
    FK_RETURN_IF_ERROR(map_indexed(folder, index, model, &table));
  } else {
    return file_error(folder, "has neither model.safetensors nor model.safetensors.index.json");
  }
  return decoder_from_huggingface(config_path, config, generation.is_null() ? nullptr : &generation,
                                  table, &model->decoder);
}

// Makes a decoder from a configuration alone. All its weights lie in the same place, which is as
// large as the largest of them and full of small numbers.
Status load_made_up(const std::string& config_path, Model* model) {
  JsonDocument config;
  FK_RETURN_IF_ERROR(read_json(config_path, &config));
  std::string name = "bfloat16";
  const JsonFields fields(config_path, config);
  FK_RETURN_IF_ERROR(fields.get("torch_dtype", &name));
  FK_RETURN_IF_ERROR(fields.get("dtype", &name));
  const WeightType type = name == "float32"   ? WeightType::kF32
                          : name == "float16" ? WeightType::kF16
                                              : WeightType::kBF16;
  model->made_up.resize(1);
  int64_t largest = 0;
  for (const bool sizes_known : {false, true}) {
    model->decoder = Decoder();
    TensorTable table(config_path);
    table.make_up(type, model->made_up.data());
    FK_RETURN_IF_ERROR(
        decoder_from_huggingface(config_path, config, nullptr, table, &model->decoder));
    if (sizes_known) break;
    for (const auto& [weight_name, weight] : named_weights(model->decoder)) {
      largest = std::max(largest, weight->rows * weight->columns * type_info(type).bytes);
    }
    model->made_up.resize(static_cast<size_t>(largest / 2));
  }
  // The numbers have magnitudes from 1/64 to 1/32, whichever of the three types they are read as.
  const uint16_t least = type == WeightType::kF16 ? 0x2400 : 0x3c80;
  uint32_t state = 1;
  for (uint16_t& half : model->made_up) {
    state = state * 1664525 + 1013904223;
    half = static_cast<uint16_t>(least | (state >> 25) | (state >> 9 & 0x8000));
  }
  return {};
}

// Loads a model from the bytes of a GGUF or llama2.c file.
Status load_bytes(const std::string& file, std::string_view bytes, Model* model) {
  if (is_gguf(bytes)) {
    model->format = FileFormat::kGguf;
    Gguf gguf;
    TensorTable table(file);
    FK_RETURN_IF_ERROR(Gguf::parse(file, bytes, &gguf, &table));
    FK_RETURN_IF_ERROR(decoder_from_gguf(gguf, table, &model->decoder));
    const Status status = tokenizer_from_gguf(gguf, &model->tokenizer);
    if (!status.ok()) model->tokenizer_error = status.message();
    return {};
  }
  model->format = FileFormat::kLlama2c;
  return decoder_from_llama2c(file, bytes, &model->decoder);
}

// Checks that the tokenizer fits the decoder, and completes each one's bos, eos and chat template
// by the other's.
Status agree(Model* model) {
  Config& config = model->decoder.config;
  if (model->tokenizer == nullptr) return {};
  Tokenizer& tokenizer = *model->tokenizer;
  if (tokenizer.size() > config.vocab) {
    // Empty or special tokens beyond the embedding are left over from training and are accepted.
    // Any other might come in a text and would be out of range.
    for (int32_t id = static_cast<int32_t>(config.vocab); id < tokenizer.size(); ++id) {
      if (!tokenizer.token(id).empty() && !tokenizer.is_special(id)) {
        return file_error(model->path,
                          "tokenizer: expected at most " + std::to_string(config.vocab) +
                              " tokens, as the model has, got " + std::to_string(tokenizer.size()));
      }
    }
  }
  if (tokenizer.bos < 0) tokenizer.bos = config.bos;
  if (config.bos < 0 && tokenizer.bos < config.vocab) config.bos = tokenizer.bos;
  const auto add = [](std::vector<int32_t>* ids, int32_t id) {
    if (std::find(ids->begin(), ids->end(), id) == ids->end()) ids->push_back(id);
  };
  for (int32_t id : config.eos) add(&tokenizer.eos, id);
  for (int32_t id : tokenizer.eos) {
    if (id < config.vocab) add(&config.eos, id);
  }
  if (config.chat_template.empty()) config.chat_template = tokenizer.chat_template;
  return {};
}

// Returns the path of the tokenizer beside a model, or "" if there is none.
std::string beside(const std::string& folder, FileFormat format) {
  const char* name = format == FileFormat::kLlama2c ? "tokenizer.bin" : "tokenizer.json";
  const std::string path = join(folder, name);
  return exists(path) ? path : "";
}

Status no_tokenizer_beside(const std::string& path) {
  return file_error(path, "has no tokenizer beside it; name one");
}

Status tokenizer_beside(const std::string& path, FileFormat format, int64_t vocab,
                        std::unique_ptr<Tokenizer>* tokenizer) {
  const std::string found = beside(folder_of(path), format);
  return found.empty() ? no_tokenizer_beside(path) : load_tokenizer(found, vocab, tokenizer);
}

Status builtin_tokenizer(std::unique_ptr<Tokenizer>* tokenizer) {
  Model model;
  FK_RETURN_IF_ERROR(load("", {}, &model));
  *tokenizer = std::move(model.tokenizer);
  return {};
}

}  // namespace

Model::Model() = default;
Model::Model(Model&&) noexcept = default;
Model& Model::operator=(Model&&) noexcept = default;
Model::~Model() = default;

Status load_tokenizer(const std::string& path, int64_t vocab,
                      std::unique_ptr<Tokenizer>* tokenizer) {
  if (path.empty()) return builtin_tokenizer(tokenizer);
  if (is_folder(path)) return load_json_tokenizer(path, join(path, "tokenizer.json"), tokenizer);
  std::shared_ptr<const MappedFile> file;
  FK_RETURN_IF_ERROR(open_file(path, &file));
  const std::string_view bytes = file->bytes();
  if (is_gguf(bytes)) {
    Gguf gguf;
    TensorTable table(path);
    FK_RETURN_IF_ERROR(Gguf::parse(file->path(), bytes, &gguf, &table));
    return tokenizer_from_gguf(gguf, tokenizer);
  }
  if (ends_with(path, ".json")) return load_json_tokenizer(folder_of(path), path, tokenizer);
  if (ends_with(path, ".safetensors") || is_safetensors(bytes)) {
    return tokenizer_beside(path, FileFormat::kSafetensors, vocab, tokenizer);
  }
  // A llama2.c model may have no magic number, but its size fits its header.
  Decoder decoder;
  if (vocab == 0 && decoder_from_llama2c(path, bytes, &decoder).ok()) {
    return tokenizer_beside(path, FileFormat::kLlama2c, decoder.config.vocab, tokenizer);
  }
  return tokenizer_from_llama2c(path, bytes, vocab, tokenizer);
}

Status load(const std::string& path, const LoadOptions& options, Model* model) {
  if (path.empty()) {
    if (options.tokenizer.empty()) {
      return load_memory(builtin_model(), {}, "the built-in model", model);
    }
    return invalid("tokenizer: expected none for the built-in model, which has its own, got " +
                   options.tokenizer);
  }
  *model = Model();
  model->path = path;
  if (!exists(path)) return file_error(path, "there is no such file or folder");
  const bool folder = is_folder(path);
  std::shared_ptr<const MappedFile> file;
  if (!folder) FK_RETURN_IF_ERROR(open_file(path, &file));
  const bool weightless = folder && exists(join(path, "config.json")) &&
                          !exists(join(path, "model.safetensors")) &&
                          !exists(join(path, "model.safetensors.index.json"));
  if (options.make_up_weights && (weightless || ends_with(path, ".json"))) {
    FK_RETURN_IF_ERROR(load_made_up(folder ? join(path, "config.json") : path, model));
  } else if (ends_with(path, ".json")) {
    return file_error(path, "is no model; name the folder it is in");
  } else if (folder) {
    FK_RETURN_IF_ERROR(load_huggingface(path, "", model));
  } else if (!is_gguf(file->bytes()) &&
             (ends_with(path, ".safetensors") || is_safetensors(file->bytes()))) {
    FK_RETURN_IF_ERROR(load_huggingface(folder_of(path), path, model));
  } else {
    model->files.push_back(file);
    FK_RETURN_IF_ERROR(load_bytes(file->path(), file->bytes(), model));
  }
  std::string tokenizer = options.tokenizer;
  if (tokenizer.empty() && model->tokenizer == nullptr) {
    tokenizer = beside(folder ? path : folder_of(path), model->format);
    if (tokenizer.empty() && model->tokenizer_error.empty()) {
      model->tokenizer_error = no_tokenizer_beside(path).message();
    }
  }
  if (!tokenizer.empty()) {
    const Status status = load_tokenizer(tokenizer, model->decoder.config.vocab, &model->tokenizer);
    // A tokenizer that the user has named must be good.
    if (!status.ok() && !options.tokenizer.empty()) return status;
    model->tokenizer_error = status.message();
  }
  if (model->tokenizer == nullptr && options.need_tokenizer) {
    return invalid(model->tokenizer_error);
  }
  return agree(model);
}

Status load_memory(std::string_view bytes, std::string_view tokenizer, const std::string& name,
                   Model* model) {
  *model = Model();
  model->path = name;
  FK_RETURN_IF_ERROR(load_bytes(model->path, bytes, model));
  if (!tokenizer.empty()) {
    FK_RETURN_IF_ERROR(tokenizer_from_llama2c(name + ": tokenizer", tokenizer,
                                              model->decoder.config.vocab, &model->tokenizer));
  }
  return agree(model);
}

}  // namespace fk::model
