// Makes a decoder from Hugging Face's config.json and the tensors of its safetensors files.
#include <algorithm>

#include "model/check_config.h"
#include "model/formats.h"
#include "model/mapped_file.h"
#include "model/rope.h"

namespace fk::model {
namespace {

// Reads which family the model belongs to, and fails for others.
Status read_family(const JsonFields& fields, Config* config) {
  std::string type;
  FK_RETURN_IF_ERROR(fields.get("model_type", &type));
  if (const Json* list = fields.find("architectures");
      list != nullptr && list->is_array() && !list->empty() && (*list)[0].is_string()) {
    config->architecture = (*list)[0].get<std::string>();
  } else {
    config->architecture = type;
  }
  static constexpr struct {
    const char* name;
    Family family;
  } kFamilies[] = {{"llama", Family::kLlama},
                   {"mistral", Family::kMistral},
                   {"qwen2", Family::kQwen2},
                   {"qwen3", Family::kQwen3},
                   {"gpt2", Family::kGpt2}};
  for (const auto& known : kFamilies) {
    if (type == known.name) {
      config->family = known.family;
      return {};
    }
  }
  return unsupported(fields.file() +
                     ": model_type: expected llama, mistral, qwen2, qwen3 or gpt2, got " +
                     (type.empty() ? "none" : shown_text(type)));
}

// Reads a size from 1 to `limit` that must be there.
Status need_size(const JsonFields& fields, const char* name, int64_t limit, int64_t* value) {
  if (!fields.has(name)) return fields.error(name, "is missing");
  return fields.get(name, value, 1, limit);
}

Status read_rope(const JsonFields& fields, Config* config) {
  double theta = 10000;
  FK_RETURN_IF_ERROR(fields.get("rope_theta", &theta));
  RopeScaling scaling;
  // Transformers 5 has the theta and the scaling in rope_parameters, earlier versions have the
  // scaling in rope_scaling.
  for (const char* name : {"rope_scaling", "rope_parameters"}) {
    const Json* json = fields.find(name);
    if (json == nullptr) continue;
    if (!json->is_object()) return fields.error(name, "expected an object, got " + shown(*json));
    const JsonFields rope(fields.file(), *json, std::string(name) + ".");
    FK_RETURN_IF_ERROR(rope.get("rope_theta", &theta));
    FK_RETURN_IF_ERROR(rope.get("type", &scaling.type));
    FK_RETURN_IF_ERROR(rope.get("rope_type", &scaling.type));
    FK_RETURN_IF_ERROR(rope.get("factor", &scaling.factor));
    FK_RETURN_IF_ERROR(rope.get("original_max_position_embeddings", &scaling.original_context));
    FK_RETURN_IF_ERROR(rope.get("low_freq_factor", &scaling.low_freq_factor));
    FK_RETURN_IF_ERROR(rope.get("high_freq_factor", &scaling.high_freq_factor));
    FK_RETURN_IF_ERROR(rope.get("beta_fast", &scaling.beta_fast));
    FK_RETURN_IF_ERROR(rope.get("beta_slow", &scaling.beta_slow));
    FK_RETURN_IF_ERROR(rope.get("attention_factor", &scaling.attention_factor));
  }
  config->rope_theta = static_cast<float>(theta);
  config->rotary_dim = config->head_dim;
  FK_RETURN_IF_ERROR(check_config(fields.file(), *config));
  const Status status = set_rope(scaling, config);
  if (!status.ok()) return {status.code(), fields.file() + ": " + status.message()};
  return {};
}

// Reads GPT-2's sizes and options, which have names of their own.
Status read_gpt2(const JsonFields& fields, Config* config) {
  FK_RETURN_IF_ERROR(need_size(fields, "n_embd", kMaxDim, &config->dim));
  FK_RETURN_IF_ERROR(need_size(fields, "n_layer", kMaxLayers, &config->layers));
  FK_RETURN_IF_ERROR(need_size(fields, "n_head", kMaxHeads, &config->heads));
  FK_RETURN_IF_ERROR(need_size(fields, "n_positions", kMaxContext, &config->context));
  config->kv_heads = config->heads;
  config->hidden = 4 * config->dim;
  FK_RETURN_IF_ERROR(fields.get("n_inner", &config->hidden, 1, kMaxHidden));
  if (config->dim % config->heads != 0) {
    return fields.error("n_head", "expected a divisor of n_embd = " + std::to_string(config->dim) +
                                      ", got " + std::to_string(config->heads));
  }
  config->head_dim = config->dim / config->heads;
  double eps = 1e-5;
  FK_RETURN_IF_ERROR(fields.get("layer_norm_epsilon", &eps));
  config->norm_eps = static_cast<float>(eps);
  config->norm = Norm::kLayer;
  config->activation = Activation::kGeluTanh;
  config->gated = false;
  config->learned_positions = true;
  std::string activation = "gelu_new";
  FK_RETURN_IF_ERROR(fields.get("activation_function", &activation));
  if (activation != "gelu_new" && activation != "gelu_pytorch_tanh") {
    return unsupported(fields.file() + ": activation_function: expected gelu_new, got " +
                       shown_text(activation));
  }
  bool scaled = true, by_layer = false;
  FK_RETURN_IF_ERROR(fields.get("scale_attn_weights", &scaled));
  FK_RETURN_IF_ERROR(fields.get("scale_attn_by_inverse_layer_idx", &by_layer));
  if (!scaled || by_layer) {
    return unsupported(fields.file() +
                       ": expected scale_attn_weights without scale_attn_by_inverse_layer_idx");
  }
  return check_config(fields.file(), *config);
}

// Reads the sizes and options of the other families.
Status read_llama(const JsonFields& fields, Config* config) {
  FK_RETURN_IF_ERROR(need_size(fields, "hidden_size", kMaxDim, &config->dim));
  FK_RETURN_IF_ERROR(need_size(fields, "intermediate_size", kMaxHidden, &config->hidden));
  FK_RETURN_IF_ERROR(need_size(fields, "num_hidden_layers", kMaxLayers, &config->layers));
  FK_RETURN_IF_ERROR(need_size(fields, "num_attention_heads", kMaxHeads, &config->heads));
  FK_RETURN_IF_ERROR(need_size(fields, "max_position_embeddings", kMaxContext, &config->context));
  config->kv_heads = config->heads;
  FK_RETURN_IF_ERROR(fields.get("num_key_value_heads", &config->kv_heads, 1, kMaxHeads));
  if (!fields.has("head_dim") && config->dim % config->heads != 0) {
    return fields.error("num_attention_heads",
                        "expected a divisor of hidden_size = " + std::to_string(config->dim) +
                            ", got " + std::to_string(config->heads));
  }
  config->head_dim = config->dim / config->heads;
  FK_RETURN_IF_ERROR(fields.get("head_dim", &config->head_dim, 1, kMaxDim));
  double eps = 1e-6;
  FK_RETURN_IF_ERROR(fields.get("rms_norm_eps", &eps));
  config->norm_eps = static_cast<float>(eps);
  std::string activation = "silu";
  FK_RETURN_IF_ERROR(fields.get("hidden_act", &activation));
  if (activation != "silu") {
    return unsupported(fields.file() + ": hidden_act: expected silu, got " +
                       shown_text(activation));
  }
  return read_rope(fields, config);
}

// Sets the window of each layer, 0 for none. Where there is a window, these layers have it: those
// that layer_types names; or else all of Mistral's, and Qwen's from max_window_layers on if
// use_sliding_window says so.
Status read_windows(const JsonFields& fields, Config* config, std::vector<int64_t>* windows) {
  windows->assign(static_cast<size_t>(config->layers), 0);
  if (config->family == Family::kLlama || config->family == Family::kGpt2) return {};
  int64_t window = 0;
  FK_RETURN_IF_ERROR(fields.get("sliding_window", &window, 0, kMaxContext));
  const bool qwen = config->family != Family::kMistral;
  bool used = !qwen;
  FK_RETURN_IF_ERROR(fields.get("use_sliding_window", &used));
  if (window == 0 || !used) return {};
  int64_t first = qwen ? 28 : 0;
  if (qwen) FK_RETURN_IF_ERROR(fields.get("max_window_layers", &first, 0, INT32_MAX));
  const Json* types = fields.find("layer_types");
  if (types != nullptr && (!types->is_array() || types->size() != windows->size())) {
    return fields.error("layer_types", "expected one string per layer");
  }
  for (size_t i = 0; i < windows->size(); ++i) {
    bool slides = static_cast<int64_t>(i) >= first;
    if (types != nullptr) slides = (*types)[i] == "sliding_attention";
    if (slides) (*windows)[i] = config->window = window;
  }
  return {};
}

constexpr size_t kMaxEndIds = 1024;  // limits the list in which each new token is looked up

// Reads a field that is a token id or a list of them; absent, it leaves *ids as it is.
Status read_ids(const JsonFields& fields, const char* name, int64_t vocab,
                std::vector<int32_t>* ids) {
  const Json* json = fields.find(name);
  if (json == nullptr) return {};
  ids->clear();
  const auto add = [&](const Json& entry) {
    if (!entry.is_number_unsigned() || entry.get<uint64_t>() >= static_cast<uint64_t>(vocab)) {
      return fields.error(name,
                          "expected ids below " + std::to_string(vocab) + ", got " + shown(entry));
    }
    ids->push_back(entry.get<int32_t>());
    return Status();
  };
  if (!json->is_array()) return add(*json);
  if (json->size() > kMaxEndIds) {
    return fields.error(name, "expected at most " + std::to_string(kMaxEndIds) + " ids, got " +
                                  std::to_string(json->size()));
  }
  for (const Json& entry : *json) FK_RETURN_IF_ERROR(add(entry));
  return {};
}

// Finds the weights of one of GPT-2's layers, whose tensors' names begin with `prefix`.
Status read_gpt2_layer(const TensorTable& table, const Config& config, const std::string& prefix,
                       Layer* layer) {
  const int64_t dim = config.dim, hidden = config.hidden;
  Weight qkv, qkv_bias;
  FK_RETURN_IF_ERROR(table.transposed(prefix + "attn.c_attn.weight", 3 * dim, dim, &qkv));
  FK_RETURN_IF_ERROR(table.vector(prefix + "attn.c_attn.bias", 3 * dim, &qkv_bias));
  Weight* const parts[] = {&layer->q, &layer->k, &layer->v};
  Weight* const biases[] = {&layer->q_bias, &layer->k_bias, &layer->v_bias};
  for (int i = 0; i < 3; ++i) {
    *parts[i] = slice(qkv, i * dim, dim);
    *biases[i] = slice(qkv_bias, i * dim, dim);
  }
  FK_RETURN_IF_ERROR(table.vector(prefix + "ln_1.weight", dim, &layer->attention_norm));
  FK_RETURN_IF_ERROR(table.vector(prefix + "ln_1.bias", dim, &layer->attention_norm_bias));
  FK_RETURN_IF_ERROR(table.transposed(prefix + "attn.c_proj.weight", dim, dim, &layer->o));
  FK_RETURN_IF_ERROR(table.vector(prefix + "attn.c_proj.bias", dim, &layer->o_bias));
  FK_RETURN_IF_ERROR(table.vector(prefix + "ln_2.weight", dim, &layer->ffn_norm));
  FK_RETURN_IF_ERROR(table.vector(prefix + "ln_2.bias", dim, &layer->ffn_norm_bias));
  FK_RETURN_IF_ERROR(table.transposed(prefix + "mlp.c_fc.weight", hidden, dim, &layer->up));
  FK_RETURN_IF_ERROR(table.vector(prefix + "mlp.c_fc.bias", hidden, &layer->up_bias));
  FK_RETURN_IF_ERROR(table.transposed(prefix + "mlp.c_proj.weight", dim, hidden, &layer->down));
  return table.vector(prefix + "mlp.c_proj.bias", dim, &layer->down_bias);
}

// Finds the weights of a layer of the other families.
Status read_llama_layer(const TensorTable& table, const Config& config, const std::string& prefix,
                        Layer* layer) {
  const int64_t dim = config.dim, hidden = config.hidden;
  const int64_t q_rows = config.heads * config.head_dim;
  const int64_t kv_rows = config.kv_heads * config.head_dim;
  const std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
  FK_RETURN_IF_ERROR(table.vector(prefix + "input_layernorm.weight", dim, &layer->attention_norm));
  FK_RETURN_IF_ERROR(
      table.vector(prefix + "post_attention_layernorm.weight", dim, &layer->ffn_norm));
  FK_RETURN_IF_ERROR(table.matrix(attention + "q_proj.weight", q_rows, dim, &layer->q));
  FK_RETURN_IF_ERROR(table.matrix(attention + "k_proj.weight", kv_rows, dim, &layer->k));
  FK_RETURN_IF_ERROR(table.matrix(attention + "v_proj.weight", kv_rows, dim, &layer->v));
  FK_RETURN_IF_ERROR(table.matrix(attention + "o_proj.weight", dim, q_rows, &layer->o));
  FK_RETURN_IF_ERROR(table.optional_vector(attention + "q_proj.bias", q_rows, &layer->q_bias));
  FK_RETURN_IF_ERROR(table.optional_vector(attention + "k_proj.bias", kv_rows, &layer->k_bias));
  FK_RETURN_IF_ERROR(table.optional_vector(attention + "v_proj.bias", kv_rows, &layer->v_bias));
  FK_RETURN_IF_ERROR(table.optional_vector(attention + "o_proj.bias", dim, &layer->o_bias));
  if (config.family == Family::kQwen3) {
    FK_RETURN_IF_ERROR(table.vector(attention + "q_norm.weight", config.head_dim, &layer->q_norm));
    FK_RETURN_IF_ERROR(table.vector(attention + "k_norm.weight", config.head_dim, &layer->k_norm));
  }
  FK_RETURN_IF_ERROR(table.matrix(mlp + "gate_proj.weight", hidden, dim, &layer->gate));
  FK_RETURN_IF_ERROR(table.matrix(mlp + "up_proj.weight", hidden, dim, &layer->up));
  FK_RETURN_IF_ERROR(table.matrix(mlp + "down_proj.weight", dim, hidden, &layer->down));
  for (const char* name : {"gate_proj.bias", "up_proj.bias", "down_proj.bias"}) {
    const StoredTensor* bias = table.find(mlp + name);
    if (bias != nullptr) {
      return unsupported(*bias->file + ": tensor " + mlp + name +
                         ": expected a gated layer without biases");
    }
  }
  return {};
}

}  // namespace

Status decoder_from_huggingface(const std::string& config_file, const Json& json,
                                const Json* generation, const TensorTable& table,
                                Decoder* decoder) {
  Config& config = decoder->config;
  const JsonFields fields(config_file, json);
  FK_RETURN_IF_ERROR(read_family(fields, &config));
  FK_RETURN_IF_ERROR(fields.get("_name_or_path", &config.name));
  FK_RETURN_IF_ERROR(need_size(fields, "vocab_size", kMaxVocab, &config.vocab));
  const bool gpt2 = config.family == Family::kGpt2;
  FK_RETURN_IF_ERROR(gpt2 ? read_gpt2(fields, &config) : read_llama(fields, &config));
  std::vector<int64_t> windows;
  FK_RETURN_IF_ERROR(read_windows(fields, &config, &windows));

  std::vector<int32_t> bos;
  FK_RETURN_IF_ERROR(read_ids(fields, "bos_token_id", config.vocab, &bos));
  FK_RETURN_IF_ERROR(read_ids(fields, "eos_token_id", config.vocab, &config.eos));
  if (generation != nullptr) {
    const JsonFields more(config_file, *generation, "generation_config.json: ");
    FK_RETURN_IF_ERROR(read_ids(more, "bos_token_id", config.vocab, &bos));
    FK_RETURN_IF_ERROR(read_ids(more, "eos_token_id", config.vocab, &config.eos));
  }
  config.bos = bos.empty() ? -1 : bos[0];

  // If a model was saved without its head, its tensors' names do not begin with the outer module's.
  const std::string outer = gpt2 ? "transformer." : "model.";
  const std::string first = gpt2 ? "wte.weight" : "embed_tokens.weight";
  const std::string prefix = table.has(first) ? "" : outer;
  FK_RETURN_IF_ERROR(
      table.matrix(prefix + first, config.vocab, config.dim, &decoder->token_embedding));
  const std::string norm = prefix + (gpt2 ? "ln_f" : "norm");
  FK_RETURN_IF_ERROR(table.vector(norm + ".weight", config.dim, &decoder->output_norm));
  if (gpt2) {
    FK_RETURN_IF_ERROR(table.vector(norm + ".bias", config.dim, &decoder->output_norm_bias));
    FK_RETURN_IF_ERROR(table.matrix(prefix + "wpe.weight", config.context, config.dim,
                                    &decoder->position_embedding));
  }
  for (int64_t i = 0; i < config.layers; ++i) {
    Layer layer;
    layer.window = windows[static_cast<size_t>(i)];
    const std::string at = prefix + (gpt2 ? "h." : "layers.") + std::to_string(i) + ".";
    FK_RETURN_IF_ERROR(gpt2 ? read_gpt2_layer(table, config, at, &layer)
                            : read_llama_layer(table, config, at, &layer));
    decoder->layers.push_back(layer);
  }
  config.tied = table.made_up() ? gpt2 : !table.has("lm_head.weight");
  FK_RETURN_IF_ERROR(fields.get("tie_word_embeddings", &config.tied));
  decoder->output = decoder->token_embedding;
  if (config.tied) return {};
  return table.matrix("lm_head.weight", config.vocab, config.dim, &decoder->output);
}

}  // namespace fk::model
