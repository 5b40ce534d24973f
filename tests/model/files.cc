#include "files.h"

#include <algorithm>

#include "model/text_tokenizer.h"

namespace fk::model {
namespace {

constexpr uint64_t kVocab = 300, kDim = 32, kHidden = 64, kHeads = 4, kKeyHeads = 2, kContext = 16;
constexpr uint64_t kLayers = 2, kKeyRows = kDim / kHeads * kKeyHeads;

std::string layer(uint64_t index, const char* name) {
  return "blk." + std::to_string(index) + "." + name;
}

void add_tokenizer(GgufFile* file) {
  std::vector<std::string> tokens(byte_alphabet().begin(), byte_alphabet().end());
  for (const char* token : {"he", "ll", "hell", "hello"}) tokens.push_back(token);
  while (tokens.size() < kVocab - 2) tokens.push_back("unused" + std::to_string(tokens.size()));
  std::vector<int32_t> types(kVocab, 1);
  for (const char* token : {"<|im_start|>", "<|im_end|>"}) {
    types[tokens.size()] = 3;
    tokens.push_back(token);
  }
  file->text("tokenizer.ggml.model", "gpt2");
  file->text("tokenizer.ggml.pre", "gpt-2");
  file->texts("tokenizer.ggml.tokens", tokens);
  file->array("tokenizer.ggml.token_type", 5, types);
  file->texts("tokenizer.ggml.merges", {"h e", "l l", "he ll", "hell o"});
  file->integer("tokenizer.ggml.bos_token_id", kVocab - 2);
  file->integer("tokenizer.ggml.eos_token_id", kVocab - 1);
  file->text("tokenizer.chat_template", "<|im_start|>system\nBe kind.<|im_end|>\n");
}

void add_sizes(const std::string& prefix, GgufFile* file) {
  file->text("general.architecture", prefix);
  file->text("general.name", "small");
  file->integer(prefix + ".embedding_length", kDim);
  file->integer(prefix + ".feed_forward_length", kHidden);
  file->integer(prefix + ".block_count", kLayers);
  file->integer(prefix + ".attention.head_count", kHeads);
  file->integer(prefix + ".context_length", kContext);
}

}  // namespace

void GgufFile::erase(const std::string& key) {
  keys.erase(
      std::remove_if(keys.begin(), keys.end(), [&](const auto& k) { return k.first == key; }),
      keys.end());
}

GgufFile::Tensor& GgufFile::tensor(const std::string& name) {
  return *std::find_if(tensors.begin(), tensors.end(),
                       [&](const Tensor& t) { return t.name == name; });
}

void GgufFile::add(const std::string& name, std::vector<uint64_t> shape) {
  Tensor tensor;
  tensor.name = name;
  tensor.bytes = 4;
  for (uint64_t extent : shape) tensor.bytes *= extent;
  tensor.shape = std::move(shape);
  if (!tensors.empty())
    tensor.offset = tensors.back().offset + (tensors.back().bytes + 31) / 32 * 32;
  tensors.push_back(std::move(tensor));
}

GgufFile GgufFile::llama() {
  GgufFile file;
  add_sizes("llama", &file);
  file.integer("llama.attention.head_count_kv", kKeyHeads);
  file.number("llama.attention.layer_norm_rms_epsilon", 1e-5f);
  add_tokenizer(&file);
  file.add("token_embd.weight", {kDim, kVocab});
  for (uint64_t i = 0; i < kLayers; ++i) {
    file.add(layer(i, "attn_norm.weight"), {kDim});
    file.add(layer(i, "attn_q.weight"), {kDim, kDim});
    file.add(layer(i, "attn_k.weight"), {kDim, kKeyRows});
    file.add(layer(i, "attn_v.weight"), {kDim, kKeyRows});
    file.add(layer(i, "attn_output.weight"), {kDim, kDim});
    file.add(layer(i, "ffn_norm.weight"), {kDim});
    file.add(layer(i, "ffn_gate.weight"), {kDim, kHidden});
    file.add(layer(i, "ffn_up.weight"), {kDim, kHidden});
    file.add(layer(i, "ffn_down.weight"), {kHidden, kDim});
  }
  file.add("output_norm.weight", {kDim});
  return file;
}

GgufFile GgufFile::gpt2() {
  GgufFile file;
  add_sizes("gpt2", &file);
  add_tokenizer(&file);
  file.add("token_embd.weight", {kDim, kVocab});
  file.add("position_embd.weight", {kDim, kContext});
  for (uint64_t i = 0; i < kLayers; ++i) {
    for (const char* norm : {"attn_norm", "ffn_norm"}) {
      file.add(layer(i, norm) + ".weight", {kDim});
      file.add(layer(i, norm) + ".bias", {kDim});
    }
    file.add(layer(i, "attn_qkv.weight"), {kDim, 3 * kDim});
    file.add(layer(i, "attn_qkv.bias"), {3 * kDim});
    file.add(layer(i, "attn_output.weight"), {kDim, kDim});
    file.add(layer(i, "attn_output.bias"), {kDim});
    file.add(layer(i, "ffn_up.weight"), {kDim, kHidden});
    file.add(layer(i, "ffn_up.bias"), {kHidden});
    file.add(layer(i, "ffn_down.weight"), {kHidden, kDim});
    file.add(layer(i, "ffn_down.bias"), {kDim});
  }
  file.add("output_norm.weight", {kDim});
  file.add("output_norm.bias", {kDim});
  return file;
}

GgufFile GgufFile::sentencepiece() {
  GgufFile file = llama();
  std::vector<std::string> tokens = {"<unk>", "<s>", "</s>"};
  std::vector<int32_t> types = {2, 3, 3};
  std::vector<float> scores(kVocab, -100);
  for (int byte = 0; byte < 256; ++byte) {
    char name[8];
    std::snprintf(name, sizeof(name), "<0x%02X>", byte);
    tokens.push_back(name);
    types.push_back(6);
  }
  for (const char* token : {"\xE2\x96\x81", "h", "i", "hi", "\xE2\x96\x81hi"}) {
    scores[tokens.size()] = -static_cast<float>(tokens.size());
    tokens.push_back(token);
    types.push_back(1);
  }
  while (tokens.size() < kVocab) {
    tokens.push_back("[" + std::to_string(tokens.size()) + "]");
    types.push_back(5);
  }
  file.text("tokenizer.ggml.model", "llama");
  file.texts("tokenizer.ggml.tokens", tokens);
  file.array("tokenizer.ggml.token_type", 5, types);
  file.array("tokenizer.ggml.scores", 6, scores);
  file.erase("tokenizer.ggml.merges");
  file.erase("tokenizer.ggml.pre");
  file.integer("tokenizer.ggml.bos_token_id", 1);
  file.integer("tokenizer.ggml.eos_token_id", 2);
  file.text("tokenizer.chat_template", "[INST] <<SYS>>");
  return file;
}

std::string GgufFile::build() const {
  Bytes bytes;
  bytes.raw("GGUF").put(version);
  bytes.put<uint64_t>(tensors.size() + extra_tensors).put<uint64_t>(keys.size() + extra_keys);
  for (const auto& [key, value] : keys) bytes.string(key).raw(value);
  uint64_t end = 0;
  for (const Tensor& tensor : tensors) {
    bytes.string(tensor.name).put<uint32_t>(static_cast<uint32_t>(tensor.shape.size()));
    for (uint64_t extent : tensor.shape) bytes.put(extent);
    bytes.put(tensor.type).put(tensor.offset);
    end = std::max(end, tensor.offset + tensor.bytes);
  }
  bytes.align(32);
  // What a test makes absurd on purpose is not written.
  return bytes.text() + std::string(std::min<uint64_t>(end, 1 << 20), '\0');
}

std::string safetensors(const std::string& header, size_t bytes) {
  return Bytes().put<uint64_t>(header.size()).raw(header).text() + std::string(bytes, '\0');
}

std::string llama2c(int version, bool shared) {
  constexpr int32_t kGroup = 32;
  const int32_t dim = kDim, hidden = kHidden, layers = kLayers, heads = kHeads, keys = kKeyHeads;
  const int32_t vocab = kVocab, context = kContext;
  Bytes bytes;
  if (version > 0) bytes.put<uint32_t>(0x616b3432).put<int32_t>(version);
  bytes.put(dim).put(hidden).put(layers).put(heads).put(keys);
  bytes.put(version == 0 && !shared ? -vocab : vocab).put(context);
  if (version > 0) bytes.put<uint8_t>(shared);
  if (version == 2) bytes.put(kGroup);
  if (version > 0) bytes.align(256);
  const size_t norms = kLayers * 2 * kDim + kDim;
  const size_t matrix = kLayers * (2 * kDim * kDim + 2 * kKeyRows * kDim + 3 * kDim * kHidden) +
                        kVocab * kDim * (shared ? 1 : 2);
  size_t size = (norms + matrix) * 4;
  if (version == 0) size += kContext * (kDim / kHeads / 2) * 2 * 4;
  if (version == 2) size = norms * 4 + matrix + matrix / kGroup * 4;
  return bytes.text() + std::string(size, '\0');
}

std::string llama2c_tokenizer(int tokens) {
  Bytes bytes;
  bytes.put<int32_t>(8);
  for (int i = 0; i < tokens; ++i) {
    char name[8];
    std::snprintf(name, sizeof(name), "<0x%02X>", (i - 3) & 255);
    static const char* const kText[] = {" ", "h", "i", " h", "hi", " hi"};
    const std::string text = i < 3     ? "<s>"
                             : i < 259 ? name
                             : i < 265 ? kText[i - 259]
                                       : "t" + std::to_string(i);
    bytes.put<float>(static_cast<float>(-i)).put<int32_t>(static_cast<int32_t>(text.size()));
    bytes.raw(text);
  }
  return bytes.text();
}

std::string tokenizer_json() {
  return R"({"version": "1.0",
    "added_tokens": [{"id": 6, "content": "<s>", "special": true, "normalized": false}],
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
      {"type": "Split", "pattern": {"Regex": "\\d"}, "behavior": "Isolated", "invert": false},
      {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true}]},
    "post_processor": {"type": "TemplateProcessing",
      "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A"}}],
      "special_tokens": {"<s>": {"id": "<s>", "ids": [6], "tokens": ["<s>"]}}},
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "unk_token": null, "byte_fallback": false,
      "vocab": {"a": 0, "b": 1, "ab": 2, "1": 3, "Ġ": 4, "aba": 5},
      "merges": ["a b", ["ab", "a"]]}})";
}

std::string decoded(const Tokenizer& tokenizer, const std::vector<int32_t>& ids,
                    bool skip_special) {
  std::string text;
  const Status status = tokenizer.decode(ids, skip_special, &text);
  EXPECT_TRUE(status.ok()) << status.message();
  return text;
}

void expect_error(const Status& status, const std::vector<std::string>& parts) {
  EXPECT_FALSE(status.ok());
  for (const std::string& part : parts) {
    EXPECT_NE(status.message().find(part), std::string::npos)
        << "expected " << part << " in: " << status.message();
  }
}

Status load_bytes(const std::string& bytes, Model* model, const std::string& tokenizer) {
  return load_memory(bytes, tokenizer, "file", model);
}

Status load_bytes(const std::string& bytes) {
  Model model;
  return load_bytes(bytes, &model);
}

}  // namespace fk::model
