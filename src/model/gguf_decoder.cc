// Makes a decoder from a GGUF file of the architecture llama (Llama, Mistral, SmolLM), qwen2, qwen3
// or gpt2.
#include <algorithm>
#include <cmath>

#include "model/check_config.h"
#include "model/formats.h"
#include "model/mapped_file.h"
#include "model/rope.h"

namespace fk::model {
namespace {

// Reads the rotary embedding; `prefix` is the architecture and a dot.
Status read_rope(const Gguf& gguf, const std::string& prefix, const TensorTable& table,
                 Config* config) {
  config->rotary_dim = config->head_dim;
  FK_RETURN_IF_ERROR(
      gguf.get(prefix + "rope.dimension_count", &config->rotary_dim, 2, config->head_dim));
  double theta = 10000;
  FK_RETURN_IF_ERROR(gguf.get(prefix + "rope.freq_base", &theta));
  config->rope_theta = static_cast<float>(theta);
  RopeScaling scaling;
  FK_RETURN_IF_ERROR(gguf.get(prefix + "rope.scaling.type", &scaling.type));
  FK_RETURN_IF_ERROR(gguf.get(prefix + "rope.scaling.factor", &scaling.factor));
  FK_RETURN_IF_ERROR(
      gguf.get(prefix + "rope.scaling.original_context_length", &scaling.original_context));
  FK_RETURN_IF_ERROR(gguf.get(prefix + "rope.scaling.attn_factor", &scaling.attention_factor));
  FK_RETURN_IF_ERROR(check_config(gguf.file(), *config));
  const Status status = set_rope(scaling, config);
  if (!status.ok()) return {status.code(), gguf.file() + ": " + status.message()};

  // Llama 3's scaling is stored as a tensor with one divisor per frequency.
  if (!table.has("rope_freqs.weight")) return {};
  Weight divisors;
  FK_RETURN_IF_ERROR(table.vector("rope_freqs.weight", config->rotary_dim / 2, &divisors));
  std::vector<float> values(config->rope_frequencies.size());
  read_row(divisors, 0, values.data());
  for (size_t i = 0; i < values.size(); ++i) {
    if (!(values[i] > 0 && std::isfinite(values[i]))) {
      return gguf.error("tensor rope_freqs.weight", "expected numbers above 0");
    }
    config->rope_frequencies[i] /= values[i];
  }
  config->rope_scaling = "llama3";
  return {};
}

// Reads everything but the weights.
Status read_config(const Gguf& gguf, const TensorTable& table, Config* config) {
  FK_RETURN_IF_ERROR(gguf.get("general.name", &config->name));
  FK_RETURN_IF_ERROR(gguf.get("general.architecture", &config->architecture));
  const std::string& architecture = config->architecture;
  if (architecture == "llama") {
    config->family = Family::kLlama;
  } else if (architecture == "qwen2") {
    config->family = Family::kQwen2;
  } else if (architecture == "qwen3") {
    config->family = Family::kQwen3;
  } else if (architecture == "gpt2") {
    config->family = Family::kGpt2;
  } else {
    return unsupported(gguf.file() +
                       ": general.architecture: expected llama, qwen2, qwen3 or gpt2, got " +
                       (architecture.empty() ? "none" : shown_text(architecture)));
  }
  const std::string prefix = architecture + ".";
  int64_t experts = 0;
  FK_RETURN_IF_ERROR(gguf.get(prefix + "expert_count", &experts, 0, INT32_MAX));
  if (experts > 0) {
    return unsupported(gguf.file() + ": " + prefix + "expert_count: expected a dense model, got " +
                       std::to_string(experts) + " experts");
  }
  const struct {
    const char* key;
    int64_t* value;
    int64_t limit;
  } sizes[] = {
      {"embedding_length", &config->dim, kMaxDim},
      {"feed_forward_length", &config->hidden, kMaxHidden},
      {"block_count", &config->layers, kMaxLayers},
      {"attention.head_count", &config->heads, kMaxHeads},
      {"context_length", &config->context, kMaxContext},
  };
  for (const auto& size : sizes) {
    if (!gguf.has(prefix + size.key)) return gguf.error(prefix + size.key, "is missing");
    FK_RETURN_IF_ERROR(gguf.get(prefix + size.key, size.value, 1, size.limit));
  }
  config->kv_heads = config->heads;
  FK_RETURN_IF_ERROR(gguf.get(prefix + "attention.head_count_kv", &config->kv_heads, 1, kMaxHeads));
  if (!gguf.has(prefix + "attention.key_length") && config->dim % config->heads != 0) {
    return gguf.error(prefix + "attention.head_count",
                      "expected a divisor of the embedding length " + std::to_string(config->dim) +
                          ", got " + std::to_string(config->heads));
  }
  config->head_dim = config->dim / config->heads;
  FK_RETURN_IF_ERROR(gguf.get(prefix + "attention.key_length", &config->head_dim, 1, kMaxDim));
  int64_t value_length = config->head_dim;
  FK_RETURN_IF_ERROR(gguf.get(prefix + "attention.value_length", &value_length, 1, kMaxDim));
  if (value_length != config->head_dim) {
    return unsupported(gguf.file() + ": " + prefix + "attention.value_length: expected " +
                       std::to_string(config->head_dim) + ", the key length, got " +
                       std::to_string(value_length));
  }
  FK_RETURN_IF_ERROR(
      gguf.get(prefix + "attention.sliding_window", &config->window, 0, kMaxContext));

  const bool gpt2 = config->family == Family::kGpt2;
  config->norm = gpt2 ? Norm::kLayer : Norm::kRms;
  config->activation = gpt2 ? Activation::kGeluTanh : Activation::kSilu;
  config->gated = !gpt2;
  config->learned_positions = gpt2;
  // When a llama file is made, the rows of its query and key weights are reordered, so that
  // neighbours are pairs.
  config->rope_interleaved = config->family == Family::kLlama;
  double eps = 1e-5;
  const char* eps_key = gpt2 ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon";
  FK_RETURN_IF_ERROR(gguf.get(prefix + eps_key, &eps));
  config->norm_eps = static_cast<float>(eps);

  const StoredTensor* embedding = table.find("token_embd.weight");
  if (embedding == nullptr || embedding->shape.size() != 2) {
    return gguf.error("tensor token_embd.weight", "expected a matrix");
  }
  config->vocab = embedding->shape[0];
  FK_RETURN_IF_ERROR(check_config(gguf.file(), *config));
  if (!gpt2) FK_RETURN_IF_ERROR(read_rope(gguf, prefix, table, config));

  FK_RETURN_IF_ERROR(gguf.get("tokenizer.chat_template", &config->chat_template));
  int64_t id = -1;
  FK_RETURN_IF_ERROR(gguf.get("tokenizer.ggml.bos_token_id", &id, 0, config->vocab - 1));
  config->bos = static_cast<int32_t>(id);
  for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"}) {
    id = -1;
    FK_RETURN_IF_ERROR(gguf.get(key, &id, 0, config->vocab - 1));
    const auto& known = config->eos;
    if (id >= 0 && std::find(known.begin(), known.end(), id) == known.end()) {
      config->eos.push_back(static_cast<int32_t>(id));
    }
  }
  return {};
}

// Finds the weights of layer `index`.
Status read_layer(const TensorTable& table, const Config& config, int64_t index, Layer* layer) {
  const std::string prefix = "blk." + std::to_string(index) + ".";
  const int64_t dim = config.dim, hidden = config.hidden;
  const int64_t q_rows = config.heads * config.head_dim;
  const int64_t kv_rows = config.kv_heads * config.head_dim;
  layer->window = config.window;
  FK_RETURN_IF_ERROR(table.vector(prefix + "attn_norm.weight", dim, &layer->attention_norm));
  FK_RETURN_IF_ERROR(table.vector(prefix + "ffn_norm.weight", dim, &layer->ffn_norm));
  if (config.family == Family::kGpt2) {
    Weight qkv, qkv_bias;
    FK_RETURN_IF_ERROR(table.matrix(prefix + "attn_qkv.weight", q_rows + 2 * kv_rows, dim, &qkv));
    FK_RETURN_IF_ERROR(table.vector(prefix + "attn_qkv.bias", q_rows + 2 * kv_rows, &qkv_bias));
    layer->q = slice(qkv, 0, q_rows);
    layer->k = slice(qkv, q_rows, kv_rows);
    layer->v = slice(qkv, q_rows + kv_rows, kv_rows);
    layer->q_bias = slice(qkv_bias, 0, q_rows);
    layer->k_bias = slice(qkv_bias, q_rows, kv_rows);
    layer->v_bias = slice(qkv_bias, q_rows + kv_rows, kv_rows);
    FK_RETURN_IF_ERROR(table.vector(prefix + "attn_norm.bias", dim, &layer->attention_norm_bias));
    FK_RETURN_IF_ERROR(table.vector(prefix + "ffn_norm.bias", dim, &layer->ffn_norm_bias));
    FK_RETURN_IF_ERROR(table.vector(prefix + "attn_output.bias", dim, &layer->o_bias));
    FK_RETURN_IF_ERROR(table.vector(prefix + "ffn_up.bias", hidden, &layer->up_bias));
    FK_RETURN_IF_ERROR(table.vector(prefix + "ffn_down.bias", dim, &layer->down_bias));
  } else {
    FK_RETURN_IF_ERROR(table.matrix(prefix + "attn_q.weight", q_rows, dim, &layer->q));
    FK_RETURN_IF_ERROR(table.matrix(prefix + "attn_k.weight", kv_rows, dim, &layer->k));
    FK_RETURN_IF_ERROR(table.matrix(prefix + "attn_v.weight", kv_rows, dim, &layer->v));
    FK_RETURN_IF_ERROR(table.optional_vector(prefix + "attn_q.bias", q_rows, &layer->q_bias));
    FK_RETURN_IF_ERROR(table.optional_vector(prefix + "attn_k.bias", kv_rows, &layer->k_bias));
    FK_RETURN_IF_ERROR(table.optional_vector(prefix + "attn_v.bias", kv_rows, &layer->v_bias));
    FK_RETURN_IF_ERROR(table.optional_vector(prefix + "attn_output.bias", dim, &layer->o_bias));
    FK_RETURN_IF_ERROR(table.matrix(prefix + "ffn_gate.weight", hidden, dim, &layer->gate));
  }
  if (config.family == Family::kQwen3) {
    FK_RETURN_IF_ERROR(
        table.vector(prefix + "attn_q_norm.weight", config.head_dim, &layer->q_norm));
    FK_RETURN_IF_ERROR(
        table.vector(prefix + "attn_k_norm.weight", config.head_dim, &layer->k_norm));
  }
  FK_RETURN_IF_ERROR(table.matrix(prefix + "attn_output.weight", dim, q_rows, &layer->o));
  FK_RETURN_IF_ERROR(table.matrix(prefix + "ffn_up.weight", hidden, dim, &layer->up));
  return table.matrix(prefix + "ffn_down.weight", dim, hidden, &layer->down);
}

}  // namespace

Status decoder_from_gguf(const Gguf& gguf, const TensorTable& table, Decoder* decoder) {
  Config& config = decoder->config;
  FK_RETURN_IF_ERROR(read_config(gguf, table, &config));
  FK_RETURN_IF_ERROR(
      table.matrix("token_embd.weight", config.vocab, config.dim, &decoder->token_embedding));
  if (config.learned_positions) {
    FK_RETURN_IF_ERROR(table.matrix("position_embd.weight", config.context, config.dim,
                                    &decoder->position_embedding));
    FK_RETURN_IF_ERROR(table.vector("output_norm.bias", config.dim, &decoder->output_norm_bias));
  }
  for (int64_t i = 0; i < config.layers; ++i) {
    Layer layer;
    FK_RETURN_IF_ERROR(read_layer(table, config, i, &layer));
    decoder->layers.push_back(layer);
  }
  FK_RETURN_IF_ERROR(table.vector("output_norm.weight", config.dim, &decoder->output_norm));
  config.tied = !table.has("output.weight");
  decoder->output = decoder->token_embedding;
  if (config.tied) return {};
  return table.matrix("output.weight", config.vocab, config.dim, &decoder->output);
}

}  // namespace fk::model
