// safetensors and Hugging Face folders: one bad file per rule.
#include "model/safetensors.h"

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "files.h"

namespace fk::model {
namespace {

const std::string kFile = "file";

Status read(const std::string& bytes, TensorTable* table) {
  return read_safetensors(kFile, bytes, table);
}

Status read(const std::string& bytes) {
  TensorTable table(kFile);
  return read(bytes, &table);
}

TEST(Safetensors, GoodFilesAreRead) {
  TensorTable table(kFile);
  const std::string header =
      R"({"__metadata__": {"format": "pt"},)"
      R"("a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},)"
      R"("empty": {"dtype": "F32", "shape": [0, 3], "data_offsets": [24, 24]},)"
      R"("mask": {"dtype": "BOOL", "shape": [4], "data_offsets": [28, 32]},)"
      R"("b": {"dtype": "BF16", "shape": [2], "data_offsets": [24, 28]}}       )";
  const std::string bytes = safetensors(header + std::string((8 - header.size() % 8) % 8, ' '), 32);
  const Status status = read(bytes, &table);
  ASSERT_TRUE(status.ok()) << status.message();
  Weight weight;
  EXPECT_TRUE(table.matrix("a", 2, 3, &weight).ok());
  EXPECT_EQ(weight.row_bytes, 12);
  EXPECT_TRUE(table.transposed("a", 3, 2, &weight).ok());
  EXPECT_TRUE(weight.transposed);
  EXPECT_EQ(weight.rows, 3);
  EXPECT_TRUE(table.vector("b", 2, &weight).ok());
  expect_error(table.matrix("a", 3, 2, &weight), {"a", "(3, 2)", "(2, 3)"});
  expect_error(table.vector("mask", 4, &weight), {"mask", "BOOL"});
  expect_error(table.vector("none", 4, &weight), {"none", "missing"});
}

TEST(Safetensors, BadFilesAreRefused) {
  const std::string good = R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}   )";
  ASSERT_EQ(good.size() % 8, 0u);
  ASSERT_TRUE(read(safetensors(good, 8)).ok());
  expect_error(read(""), {"too short"});
  expect_error(read("1234567"), {"too short"});
  expect_error(read(Bytes().put<uint64_t>(~uint64_t{0}).raw(good).text()), {"header length"});
  expect_error(read(Bytes().put<uint64_t>(101 << 20).raw(good).text()), {"header length"});
  expect_error(read(Bytes().put<uint64_t>(0).text()), {"header", "{"});
  expect_error(read(safetensors(" " + good, 8)), {"header", "{"});
  expect_error(read(safetensors("{\"a\"", 0)), {"not JSON"});
  expect_error(read(safetensors("{\"\xff\": 1}", 0)), {"not JSON"});
  expect_error(read(safetensors("{}x", 0)), {"not JSON"});
  expect_error(read(safetensors("{" + std::string(), 0)), {"not JSON"});
  std::string deep = "{\"a\": ";
  for (int i = 0; i < 100000; ++i) deep += '[';
  expect_error(read(safetensors(deep, 0)), {"deeper"});
  expect_error(read(safetensors(good, 4)), {"data_offsets", "within the 4 bytes"});
  expect_error(read(safetensors(good, 12)), {"expected 8 bytes of data, got 12"});

  struct Broken {
    const char* tensors;
    size_t bytes;
    std::vector<std::string> message;
  };
  const Broken broken[] = {
      {R"("a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
          "a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]})",
       8,
       {"\"a\"", "comes twice"}},
      {R"("a": 1)", 0, {"\"a\"", "object"}},
      {R"("a": {"shape": [1], "data_offsets": [0, 4]})", 4, {"dtype"}},
      {R"("a": {"dtype": 4, "shape": [1], "data_offsets": [0, 4]})", 4, {"dtype"}},
      {R"("a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]})", 4, {"dtype", "F33"}},
      {R"("a": {"dtype": "F32", "data_offsets": [0, 4]})", 4, {"shape"}},
      {R"("a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]})", 4, {"shape"}},
      {R"("a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]})", 4, {"shape", "-1"}},
      {R"("a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]})", 4, {"shape", "1.5"}},
      {R"("a": {"dtype": "F32", "shape": [4294967296, 4294967296], "data_offsets": [0, 4]})",
       4,
       {"shape", "too large"}},
      {R"("a": {"dtype": "F32", "shape": [1,1,1,1,1,1,1,1,1], "data_offsets": [0, 4]})",
       4,
       {"shape", "at most 8"}},
      {R"("a": {"dtype": "F32", "shape": [1]})", 4, {"data_offsets"}},
      {R"("a": {"dtype": "F32", "shape": [1], "data_offsets": [0]})", 4, {"data_offsets"}},
      {R"("a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]})", 4, {"data_offsets"}},
      {R"("a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]})", 8, {"4 bytes", "got 8"}},
      {R"("a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 18446744073709551615]})",
       8,
       {"data_offsets"}},
      {R"("a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
          "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]})",
       4,
       {"inside another"}},
      {R"("a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]})", 8, {"from byte 0"}},
      {R"("a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]},
          "b": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]})",
       6,
       {"\"b\"", "aligned to 4"}},
      {R"("__metadata__": {"a": 1})", 0, {"__metadata__"}},
  };
  for (const Broken& b : broken) {
    SCOPED_TRACE(b.tensors);
    std::string header = std::string("{") + b.tensors + "}";
    header.resize((header.size() + 7) / 8 * 8, ' ');
    expect_error(read(safetensors(header, b.bytes)), b.message);
  }
}

class Folder : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/fk_model_XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    folder_ = name;
    std::string header = "{";
    size_t at = 0;
    const auto add = [&](const std::string& tensor, std::vector<int> shape) {
      size_t size = 4;
      std::string text;
      for (int extent : shape) {
        size *= static_cast<size_t>(extent);
        text += (text.empty() ? "" : ",") + std::to_string(extent);
      }
      header += (at == 0 ? "\"" : ",\"") + tensor + "\":{\"dtype\":\"F32\",\"shape\":[" + text +
                "],\"data_offsets\":[" + std::to_string(at) + "," + std::to_string(at + size) +
                "]}";
      at += size;
    };
    add("model.embed_tokens.weight", {16, 8});
    add("model.norm.weight", {8});
    for (const char* name :
         {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}) {
      add(std::string("model.layers.0.") + name + ".weight", {8, 8});
    }
    add("model.layers.0.input_layernorm.weight", {8});
    add("model.layers.0.post_attention_layernorm.weight", {8});
    add("model.layers.0.mlp.gate_proj.weight", {12, 8});
    add("model.layers.0.mlp.up_proj.weight", {12, 8});
    add("model.layers.0.mlp.down_proj.weight", {8, 12});
    header += "}";
    header.resize((header.size() + 7) / 8 * 8, ' ');
    weights_ = safetensors(header, at);
    write("model.safetensors", weights_);
    write("config.json", config());
  }

  void TearDown() override { std::filesystem::remove_all(folder_); }

  void write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ + "/" + name, std::ios::binary) << text;
  }

  static std::string config(const std::string& more = "") {
    return R"({"model_type": "mistral", "hidden_size": 8, "intermediate_size": 12,
      "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32,
      "vocab_size": 16, "eos_token_id": [1, 2], "sliding_window": 4)" +
           more + "}";
  }

  Status open(Model* model) { return load(folder_, {}, model); }
  Status open() {
    Model model;
    return open(&model);
  }

  std::string folder_, weights_;
};

TEST_F(Folder, Loads) {
  Model model;
  const Status status = open(&model);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(model.decoder.config.family, Family::kMistral);
  EXPECT_EQ(model.decoder.layers[0].window, 4);
  EXPECT_EQ(model.decoder.config.eos, (std::vector<int32_t>{1, 2}));
  EXPECT_TRUE(model.decoder.config.tied);
  EXPECT_EQ(model.tokenizer, nullptr);
  EXPECT_NE(model.tokenizer_error, "");
  EXPECT_TRUE(load(folder_ + "/model.safetensors", {}, &model).ok());
  LoadOptions options;
  options.need_tokenizer = true;
  expect_error(load(folder_, options, &model), {"tokenizer"});
}

TEST_F(Folder, IndexIsChecked) {
  std::filesystem::rename(folder_ + "/model.safetensors", folder_ + "/a.safetensors");
  expect_error(open(), {"neither"});
  const std::string index = "model.safetensors.index.json";
  write(index, R"({"weight_map": {"model.norm.weight": "a.safetensors"}})");
  EXPECT_TRUE(open().ok());
  write(index, R"({"weight_map": {"model.norm.weight": "../a.safetensors"}})");
  expect_error(open(), {index, "same folder"});
  write(index, R"({"weight_map": {"model.norm.weight": "b.safetensors"}})");
  expect_error(open(), {"b.safetensors", "cannot be opened"});
  write(index, R"({"weight_map": {"nothing": "a.safetensors"}})");
  expect_error(open(), {index, "nothing"});
  write(index, R"({"weight_map": {"x": 1}})");
  expect_error(open(), {index, "file names"});
  write(index, R"({"map": {}})");
  expect_error(open(), {index, "weight_map"});
  write("b.safetensors", weights_);
  write(index, R"({"weight_map": {"model.norm.weight": "a.safetensors", "x": "b.safetensors"}})");
  expect_error(open(), {"another file"});
}

TEST_F(Folder, ConfigIsChecked) {
  struct Broken {
    std::string from, to;
    std::vector<std::string> message;
  };
  const Broken broken[] = {
      {"mistral", "t5", {"model_type", "t5"}},
      {"\"hidden_size\": 8,", "", {"hidden_size", "missing"}},
      {"\"hidden_size\": 8", "\"hidden_size\": -8", {"hidden_size", "-8"}},
      {"\"hidden_size\": 8", "\"hidden_size\": \"8\"", {"hidden_size", "\"8\""}},
      {"\"hidden_size\": 8", "\"hidden_size\": 18446744073709551615", {"hidden_size"}},
      {"\"num_attention_heads\": 2", "\"num_attention_heads\": 3", {"num_attention_heads"}},
      {"\"vocab_size\": 16", "\"vocab_size\": 17", {"embed_tokens", "(17, 8)"}},
      {"\"num_hidden_layers\": 1", "\"num_hidden_layers\": 2", {"layers.1", "missing"}},
      {"[1, 2]", "[1, 16]", {"eos_token_id", "below 16"}},
      {"[1, 2]", "\"x\"", {"eos_token_id"}},
      {"\"sliding_window\": 4", "\"sliding_window\": -4", {"sliding_window"}},
      {"4}", "4, \"hidden_act\": \"relu\"}", {"hidden_act", "relu"}},
      {"4}", "4, \"num_key_value_heads\": 0}", {"num_key_value_heads"}},
      {"4}", "4, \"rms_norm_eps\": \"x\"}", {"rms_norm_eps"}},
      {"4}", "4, \"rope_theta\": 0}", {"rope theta"}},
      {"4}", "4, \"rope_scaling\": 1}", {"rope_scaling"}},
      {"4}", "4, \"rope_scaling\": {\"type\": \"su\"}}", {"su"}},
      {"4}", "4, \"rope_scaling\": {\"type\": \"linear\", \"factor\": 0}}", {"factor"}},
      {"4}", "4, \"tie_word_embeddings\": false}", {"lm_head.weight", "missing"}},
      {"4}", "4, \"vocab_size\": 16}", {"vocab_size", "twice"}},
      {"4}", "4, \"x\": [1}", {"not JSON"}},
  };
  for (const Broken& b : broken) {
    SCOPED_TRACE(b.to);
    std::string text = config();
    text.replace(text.find(b.from), b.from.size(), b.to);
    write("config.json", text);
    std::vector<std::string> message = b.message;
    message.push_back(folder_);
    expect_error(open(), message);
  }
}

TEST_F(Folder, CutAnywhere) {
  for (size_t size = 0; size < weights_.size(); size += 97) {
    write("model.safetensors", weights_.substr(0, size));
    EXPECT_FALSE(open().ok()) << size;
  }
}

TEST_F(Folder, Rope) {
  Model model;
  write("config.json", config(R"(, "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000,
    "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
    "original_max_position_embeddings": 16})"));
  ASSERT_TRUE(open(&model).ok());
  const Config& config = model.decoder.config;
  EXPECT_EQ(config.rope_theta, 500000);
  // A wave of 2 pi lies between 16 / 4 and 16 / 1; the other is far longer than the context.
  const double blend = (16 / 6.283185307179586 - 1) / 3;
  EXPECT_FLOAT_EQ(config.rope_frequencies[0], static_cast<float>((1 - blend) / 8 + blend));
  EXPECT_FLOAT_EQ(config.rope_frequencies[1], static_cast<float>(1 / std::sqrt(500000.0) / 8));
}

TEST(Load, NothingThere) {
  Model model;
  expect_error(load("/nowhere/model.gguf", {}, &model), {"/nowhere/model.gguf", "no such file"});
  expect_error(load("/dev/null", {}, &model), {"/dev/null"});
}

}  // namespace
}  // namespace fk::model
