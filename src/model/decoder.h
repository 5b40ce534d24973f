// Describes a decoder-only language model, whatever file it came from. A loader fills one
// `Decoder`; an engine reads nothing else.
//
// Per layer, with x the residual stream:
//   h = norm(x, attention_norm);  q, k, v = h Wq + bq, h Wk + bk, h Wv + bv
//   q, k = rms_norm(q, q_norm), rms_norm(k, k_norm)   over each head, where q_norm is defined
//   q, k = rope(q), rope(k)                           where rotary_dim > 0
//   x += attention(q, k, v; causal, layer.window) Wo + bo
//   h = norm(x, ffn_norm)
//   x += (act(h Wgate) * (h Wup)) Wdown               if gated
//   x += act(h Wup + bup) Wdown + bdown               otherwise
// logits = norm(x, output_norm) output^T; x starts as token_embedding[id] (+ position_embedding).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/quantized.h"

namespace fk::model {

enum class Family : uint8_t { kLlama, kMistral, kQwen2, kQwen3, kGpt2 };
enum class Norm : uint8_t { kRms, kLayer };
enum class Activation : uint8_t { kSilu, kGeluTanh };

// Returns the family's name for people, such as "Llama".
const char* family_name(Family family);

// Describes a matrix (rows = outputs, columns = inputs, y = W x) or a vector (rows = 1) inside a
// mapped file, to which it points and which must outlive it.
struct Weight {
  const void* data = nullptr;  // where row 0 begins; null where the model has no such weight
  WeightType type = WeightType::kF32;
  int64_t rows = 0;
  int64_t columns = 0;
  // Holds the bytes from one stored row to the next. Stored rows are the matrix's rows, or its
  // columns if it is `transposed` (GPT-2 in Hugging Face's form; F32, F16 and BF16 only).
  int64_t row_bytes = 0;
  bool transposed = false;
  // These are for kInt8Grouped only: weight (r, c) = int8 * scales[(r * columns + c) / group].
  const float* scales = nullptr;
  int64_t group = 0;

  explicit operator bool() const { return data != nullptr; }
  // Returns the size in the file, scales included.
  int64_t bytes() const;
};

// Converts one row of any weight to `columns` floats at `out`.
void read_row(const Weight& weight, int64_t row, float* out);

// Holds one layer's weights, with their shapes.
struct Layer {
  Weight attention_norm, attention_norm_bias;  // (dim)
  Weight q, k, v;  // (heads * head_dim, dim), (kv_heads * head_dim, dim)
  Weight q_bias, k_bias, v_bias;
  Weight q_norm, k_norm;  // (head_dim)
  Weight o, o_bias;       // (dim, heads * head_dim)
  Weight ffn_norm, ffn_norm_bias;
  Weight gate;             // (hidden, dim); undefined where the activation is not gated
  Weight up, up_bias;      // (hidden, dim)
  Weight down, down_bias;  // (dim, hidden)
  int64_t window = 0;      // a query sees itself and the window - 1 keys before it; 0: all
};

struct Config {
  Family family = Family::kLlama;
  std::string name;          // what the file calls itself; may be empty
  std::string architecture;  // as the file spells it: "llama", "Qwen3ForCausalLM"
  int64_t dim = 0;
  int64_t hidden = 0;
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;  // divides heads
  int64_t head_dim = 0;  // heads * head_dim need not be dim
  int64_t vocab = 0;
  int64_t context = 0;  // how many positions the model was made for

  Norm norm = Norm::kRms;
  float norm_eps = 1e-5f;
  Activation activation = Activation::kSilu;
  bool gated = true;
  bool tied = false;               // the output matrix is token_embedding
  bool learned_positions = false;  // position_embedding is added to x
  int64_t window = 0;              // the largest of the layers'; 0: none has one

  // The rotary embedding rotates the first rotary_dim dimensions of each head (0: none). Pair i is
  // dimensions (2i, 2i + 1) if rope_interleaved, else (i, i + rotary_dim / 2); it is rotated by the
  // angle position * rope_frequencies[i], with cosine and sine multiplied by rope_magnitude.
  // Scaling (linear, Llama 3, YaRN) is already contained in both.
  int64_t rotary_dim = 0;
  bool rope_interleaved = false;
  float rope_theta = 0;
  std::string rope_scaling;             // "", "linear", "llama3" or "yarn", only to be shown
  std::vector<float> rope_frequencies;  // rotary_dim / 2 of them
  float rope_magnitude = 1.0f;

  int32_t bos = -1;           // the token that begins a text; -1: none
  std::vector<int32_t> eos;   // the tokens that end a text
  std::string chat_template;  // Jinja text; empty where the file has none
};

struct Decoder {
  Config config;
  Weight token_embedding;     // (vocab, dim)
  Weight position_embedding;  // (context, dim)
  std::vector<Layer> layers;
  Weight output_norm, output_norm_bias;
  Weight output;  // (vocab, dim); the same as token_embedding where tied

  // Returns the size of all weights in the file; a tied one counts once.
  int64_t weight_bytes() const;
};

// Lists every weight that the model has with its name, such as "layers.3.q_bias". The pointers are
// into `decoder`.
std::vector<std::pair<std::string, const Weight*>> named_weights(const Decoder& decoder);

}  // namespace fk::model
