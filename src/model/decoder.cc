// Reads rows of weights and lists them by name.
#include "model/decoder.h"

namespace fk::model {

const char* family_name(Family family) {
  static constexpr const char* kNames[] = {"Llama", "Mistral", "Qwen2", "Qwen3", "GPT-2"};
  return kNames[static_cast<int>(family)];
}

int64_t Weight::bytes() const {
  if (data == nullptr) return 0;
  const WeightTypeInfo& info = type_info(type);
  const int64_t count = rows * columns;
  const int64_t scale_bytes = group > 0 ? count / group * 4 : 0;
  return count / info.block * info.bytes + scale_bytes;
}

void read_row(const Weight& weight, int64_t row, float* out) {
  const char* data = static_cast<const char*>(weight.data);
  if (weight.transposed) {
    const int64_t element = type_info(weight.type).bytes;
    for (int64_t i = 0; i < weight.columns; ++i) {
      dequantize(weight.type, data + i * weight.row_bytes + row * element, 1, out + i);
    }
  } else if (weight.type == WeightType::kInt8Grouped) {
    const int8_t* values = reinterpret_cast<const int8_t*>(data + row * weight.row_bytes);
    const int64_t begin = row * weight.columns;
    for (int64_t i = 0; i < weight.columns; ++i) {
      out[i] = static_cast<float>(values[i]) * weight.scales[(begin + i) / weight.group];
    }
  } else {
    dequantize(weight.type, data + row * weight.row_bytes, weight.columns, out);
  }
}

std::vector<std::pair<std::string, const Weight*>> named_weights(const Decoder& decoder) {
  std::vector<std::pair<std::string, const Weight*>> all;
  const auto add = [&](std::string name, const Weight& weight) {
    if (weight) all.emplace_back(std::move(name), &weight);
  };
  add("token_embedding", decoder.token_embedding);
  add("position_embedding", decoder.position_embedding);
  for (size_t i = 0; i < decoder.layers.size(); ++i) {
    const Layer& layer = decoder.layers[i];
    const std::string prefix = "layers." + std::to_string(i) + ".";
    add(prefix + "attention_norm", layer.attention_norm);
    add(prefix + "attention_norm_bias", layer.attention_norm_bias);
    add(prefix + "q", layer.q);
    add(prefix + "k", layer.k);
    add(prefix + "v", layer.v);
    add(prefix + "q_bias", layer.q_bias);
    add(prefix + "k_bias", layer.k_bias);
    add(prefix + "v_bias", layer.v_bias);
    add(prefix + "q_norm", layer.q_norm);
    add(prefix + "k_norm", layer.k_norm);
    add(prefix + "o", layer.o);
    add(prefix + "o_bias", layer.o_bias);
    add(prefix + "ffn_norm", layer.ffn_norm);
    add(prefix + "ffn_norm_bias", layer.ffn_norm_bias);
    add(prefix + "gate", layer.gate);
    add(prefix + "up", layer.up);
    add(prefix + "up_bias", layer.up_bias);
    add(prefix + "down", layer.down);
    add(prefix + "down_bias", layer.down_bias);
  }
  add("output_norm", decoder.output_norm);
  add("output_norm_bias", decoder.output_norm_bias);
  if (!decoder.config.tied) add("output", decoder.output);
  return all;
}

int64_t Decoder::weight_bytes() const {
  int64_t bytes = 0;
  for (const auto& [name, weight] : named_weights(*this)) bytes += weight->bytes();
  return bytes;
}

}  // namespace fk::model
