// This file holds the C functions of flashkernel/model.h: they check arguments, call the loaders
// and tokenizers, and turn errors and exceptions into status codes.
#include "model/c_api.h"

#include <algorithm>

#include "core/json_text.h"
#include "core/last_error.h"

namespace {

using fk::guarded;
using fk::invalid;
using fk::JsonObject;
using fk::null;
using fk::Status;
using namespace fk::model;

// Copies as many of `size` results to `out` as its capacity allows, and sets *count to `size`. Both
// may be null.
template <class T>
void give(const T* values, size_t size, T* out, size_t capacity, size_t* count) {
  if (out != nullptr) std::copy_n(values, std::min(size, capacity), out);
  if (count != nullptr) *count = size;
}

const char* format_name(FileFormat format) {
  static constexpr const char* kNames[] = {"safetensors", "gguf", "llama2.c"};
  return kNames[static_cast<int>(format)];
}

// Describes a tokenizer as JSON.
std::string tokenizer_info(const Tokenizer& tokenizer) {
  static constexpr const char* kChats[] = {"", "chatml", "llama2", "llama3", "mistral"};
  return JsonObject()
      .add("size", tokenizer.size())
      .add("bos", tokenizer.bos)
      .add("eos", tokenizer.eos)
      .add("chat_format", kChats[static_cast<int>(tokenizer.chat_format)])
      .add("chat_template", tokenizer.chat_template)
      .text();
}

// Describes a model as JSON.
std::string model_info(const Model& model) {
  const Config& c = model.decoder.config;
  return JsonObject()
      .add("family", family_name(c.family))
      .add("name", c.name)
      .add("architecture", c.architecture)
      .add("format", format_name(model.format))
      .add("path", model.path)
      .add("dim", c.dim)
      .add("hidden", c.hidden)
      .add("layers", c.layers)
      .add("heads", c.heads)
      .add("kv_heads", c.kv_heads)
      .add("head_dim", c.head_dim)
      .add("vocab", c.vocab)
      .add("context", c.context)
      .add("norm", c.norm == Norm::kRms ? "rms_norm" : "layer_norm")
      .add("norm_eps", c.norm_eps)
      .add("activation", c.activation == Activation::kSilu ? "silu" : "gelu_tanh")
      .add("gated", c.gated)
      .add("tied", c.tied)
      .add("learned_positions", c.learned_positions)
      .add("window", c.window)
      .add("rotary_dim", c.rotary_dim)
      .add("rope_interleaved", c.rope_interleaved)
      .add("rope_theta", c.rope_theta)
      .add("rope_scaling", c.rope_scaling)
      .add("rope_frequencies", c.rope_frequencies)
      .add("rope_magnitude", c.rope_magnitude)
      .add("bos", c.bos)
      .add("eos", c.eos)
      .add("chat_template", c.chat_template)
      .add("weight_bytes", model.decoder.weight_bytes())
      .add("tokenizer_error", model.tokenizer_error)
      .text();
}

// Checks the model and the index of one of its weights.
Status check_index(const fk_model* model, size_t index) {
  if (model == nullptr) return null("model");
  if (index < model->weights.size()) return {};
  return invalid("index: expected one below " + std::to_string(model->weights.size()) +
                 ", the number of weights, got " + std::to_string(index));
}

}  // namespace

extern "C" {

fk_status fk_model_open(const char* path, const char* tokenizer, fk_model** model) {
  return guarded("model", [&]() -> Status {
    if (path == nullptr) return null("path");
    if (model == nullptr) return null("model");
    auto made = std::make_unique<fk_model>();
    LoadOptions options;
    if (tokenizer != nullptr) options.tokenizer = tokenizer;
    FK_RETURN_IF_ERROR(load(path, options, &made->model));
    made->weights = named_weights(made->model.decoder);
    made->info = model_info(made->model);
    if (made->model.tokenizer != nullptr) {
      made->tokenizer.tokenizer = made->model.tokenizer.get();
      made->tokenizer.info = tokenizer_info(*made->model.tokenizer);
    }
    *model = made.release();
    return {};
  });
}

void fk_model_close(fk_model* model) { delete model; }

const char* fk_model_info(const fk_model* model) {
  return model == nullptr ? "" : model->info.c_str();
}

const fk_tokenizer* fk_model_tokenizer(const fk_model* model) {
  return model == nullptr || model->tokenizer.tokenizer == nullptr ? nullptr : &model->tokenizer;
}

size_t fk_model_weight_count(const fk_model* model) {
  return model == nullptr ? 0 : model->weights.size();
}

fk_status fk_model_weight(const fk_model* model, size_t index, const char** name, const char** type,
                          int64_t* rows, int64_t* columns) {
  return guarded("model weight", [&]() -> Status {
    FK_RETURN_IF_ERROR(check_index(model, index));
    const Weight& weight = *model->weights[index].second;
    if (name != nullptr) *name = model->weights[index].first.c_str();
    if (type != nullptr) *type = type_info(weight.type).name;
    if (rows != nullptr) *rows = weight.rows;
    if (columns != nullptr) *columns = weight.columns;
    return {};
  });
}

fk_status fk_model_read_weight(const fk_model* model, size_t index, float* out) {
  return guarded("model weight", [&]() -> Status {
    FK_RETURN_IF_ERROR(check_index(model, index));
    if (out == nullptr) return null("out");
    const Weight& weight = *model->weights[index].second;
    for (int64_t r = 0; r < weight.rows; ++r) read_row(weight, r, out + r * weight.columns);
    return {};
  });
}

fk_status fk_tokenizer_open(const char* path, fk_tokenizer** tokenizer) {
  return guarded("tokenizer", [&]() -> Status {
    if (path == nullptr) return null("path");
    if (tokenizer == nullptr) return null("tokenizer");
    auto made = std::make_unique<fk_tokenizer>();
    FK_RETURN_IF_ERROR(load_tokenizer(path, 0, &made->owned));
    made->tokenizer = made->owned.get();
    made->info = tokenizer_info(*made->tokenizer);
    *tokenizer = made.release();
    return {};
  });
}

void fk_tokenizer_close(fk_tokenizer* tokenizer) { delete tokenizer; }

const char* fk_tokenizer_info(const fk_tokenizer* tokenizer) {
  return tokenizer == nullptr ? "" : tokenizer->info.c_str();
}

fk_status fk_tokenizer_encode(const fk_tokenizer* tokenizer, const char* text, size_t bytes,
                              int32_t add_special, int32_t parse_special, int32_t* ids,
                              size_t capacity, size_t* count) {
  return guarded("encode", [&]() -> Status {
    if (tokenizer == nullptr) return null("tokenizer");
    if (text == nullptr && bytes > 0) return null("text");
    std::vector<int32_t> all;
    FK_RETURN_IF_ERROR(
        tokenizer->tokenizer->encode({text, bytes}, {add_special != 0, parse_special != 0}, &all));
    give(all.data(), all.size(), ids, capacity, count);
    return {};
  });
}

fk_status fk_tokenizer_decode(const fk_tokenizer* tokenizer, const int32_t* ids, size_t count,
                              int32_t skip_special, char* text, size_t capacity, size_t* bytes) {
  return guarded("decode", [&]() -> Status {
    if (tokenizer == nullptr) return null("tokenizer");
    if (ids == nullptr && count > 0) return null("ids");
    const int64_t size = tokenizer->tokenizer->size();
    for (size_t i = 0; i < count; ++i) {
      if (ids[i] >= 0 && ids[i] < size) continue;
      return invalid("id " + std::to_string(i) + ": expected 0 to " + std::to_string(size - 1) +
                     ", got " + std::to_string(ids[i]));
    }
    const std::vector<int32_t> all(ids, ids + count);
    std::string decoded;
    FK_RETURN_IF_ERROR(tokenizer->tokenizer->decode(all, skip_special != 0, &decoded));
    give(decoded.data(), decoded.size(), text, capacity, bytes);
    return {};
  });
}

fk_status fk_tokenizer_chat(const fk_tokenizer* tokenizer, const char* const* roles,
                            const char* const* contents, size_t count, int32_t prompt, int32_t* ids,
                            size_t id_capacity, size_t* id_count, char* text, size_t text_capacity,
                            size_t* text_bytes) {
  return guarded("chat", [&]() -> Status {
    if (tokenizer == nullptr) return null("tokenizer");
    std::vector<ChatMessage> messages;
    for (size_t i = 0; i < count; ++i) {
      if (roles == nullptr || roles[i] == nullptr) return null("role");
      if (contents == nullptr || contents[i] == nullptr) return null("content");
      messages.push_back({roles[i], contents[i]});
    }
    std::vector<int32_t> all;
    std::string written;
    FK_RETURN_IF_ERROR(encode_chat(*tokenizer->tokenizer, messages, prompt != 0, &all));
    FK_RETURN_IF_ERROR(format_chat(*tokenizer->tokenizer, messages, prompt != 0, &written));
    give(all.data(), all.size(), ids, id_capacity, id_count);
    give(written.data(), written.size(), text, text_capacity, text_bytes);
    return {};
  });
}

int32_t fk_tokenizer_find(const fk_tokenizer* tokenizer, const char* token) {
  if (tokenizer == nullptr || token == nullptr) return -1;
  return fk::guarded_or("find", int32_t{-1}, [&] { return tokenizer->tokenizer->find(token); });
}

fk_status fk_dequantize(const char* type, const void* data, size_t bytes, int64_t count,
                        float* out) {
  return guarded("dequantize", [&]() -> Status {
    WeightType found;
    if (type == nullptr || !find_type(type, &found) || found == WeightType::kInt8Grouped) {
      return invalid(std::string("type: expected a GGUF type, got ") +
                     (type == nullptr ? "NULL" : type));
    }
    if (data == nullptr) return null("data");
    if (out == nullptr) return null("out");
    const WeightTypeInfo& info = type_info(found);
    if (count < 0 || count % info.block != 0) {
      return invalid("count: expected whole blocks of " + std::to_string(info.block) + ", got " +
                     std::to_string(count));
    }
    if (bytes / static_cast<size_t>(info.bytes) < static_cast<size_t>(count / info.block)) {
      return invalid("data: expected " + std::to_string(count / info.block) + " blocks, got " +
                     std::to_string(bytes) + " bytes");
    }
    dequantize(found, data, count, out);
    return {};
  });
}

}  // extern "C"
