// GGUF: what a good file gives, and one bad file per rule of the format.
#include "files.h"

namespace fk::model {
namespace {

TEST(Gguf, GoodFilesLoad) {
  Model model;
  for (uint32_t version : {2u, 3u}) {
    GgufFile file = GgufFile::llama();
    file.version = version;
    const std::string bytes = file.build();
    ASSERT_TRUE(load_bytes(bytes, &model).ok());
    const Config& config = model.decoder.config;
    EXPECT_EQ(config.dim, 32);
    EXPECT_EQ(config.kv_heads, 2);
    EXPECT_EQ(config.vocab, 300);
    EXPECT_TRUE(config.tied && config.rope_interleaved);
    EXPECT_EQ(config.eos, std::vector<int32_t>{299});
    EXPECT_EQ(model.decoder.layers.size(), 2u);
    EXPECT_EQ(model.decoder.layers[1].k.rows, 16);
    ASSERT_NE(model.tokenizer, nullptr) << model.tokenizer_error;
    std::vector<int32_t> ids;
    ASSERT_TRUE(model.tokenizer->encode("hello<|im_end|>", {}, &ids).ok());
    EXPECT_EQ(ids, (std::vector<int32_t>{259, 299}));
  }
  const std::string gpt2 = GgufFile::gpt2().build();
  ASSERT_TRUE(load_bytes(gpt2, &model).ok());
  EXPECT_EQ(model.decoder.config.family, Family::kGpt2);
  const Layer& layer = model.decoder.layers[0];
  EXPECT_EQ(static_cast<const char*>(layer.v.data) - static_cast<const char*>(layer.q.data),
            2 * 32 * 32 * 4);
  EXPECT_EQ(
      static_cast<const char*>(layer.v_bias.data) - static_cast<const char*>(layer.q_bias.data),
      2 * 32 * 4);
  const std::string pieces = GgufFile::sentencepiece().build();
  ASSERT_TRUE(load_bytes(pieces, &model).ok());
  ASSERT_NE(model.tokenizer, nullptr) << model.tokenizer_error;
  std::vector<int32_t> ids;
  ASSERT_TRUE(model.tokenizer->encode("hi\n", {}, &ids).ok());
  EXPECT_EQ(ids, (std::vector<int32_t>{1, 263, 3 + 10}));
  EXPECT_EQ(decoded(*model.tokenizer, ids), "hi\n");
}

// As llama.cpp has it: of the types, unknown and control tokens are special, a user's own are not.
TEST(Gguf, UnknownTokenIsSpecial) {
  Model model;
  ASSERT_TRUE(load_bytes(GgufFile::sentencepiece().build(), &model).ok());
  const Tokenizer& tokenizer = *model.tokenizer;
  EXPECT_TRUE(tokenizer.is_special(0));
  EXPECT_FALSE(tokenizer.is_special(263));
  std::vector<int32_t> ids;
  ASSERT_TRUE(tokenizer.encode("hi<unk>", {}, &ids).ok());
  EXPECT_EQ(ids, (std::vector<int32_t>{1, 263, 0}));
  EXPECT_EQ(decoded(tokenizer, ids), "hi");
  EXPECT_EQ(decoded(tokenizer, ids, false), "<s> hi<unk>");
  ids.clear();
  ASSERT_TRUE(tokenizer.encode("hi<unk>", {true, false}, &ids).ok());
  EXPECT_EQ(decoded(tokenizer, ids), "hi<unk>");
}

// Each breaks one rule.
struct Broken {
  const char* rule;
  void (*change)(GgufFile*);
  std::vector<std::string> message;
};

const Broken kBroken[] = {
    {"version", [](GgufFile* f) { f->version = 1; }, {"version", "got 1"}},
    {"endianness", [](GgufFile* f) { f->version = 3u << 24; }, {"big-endian"}},
    {"tensor_count", [](GgufFile* f) { f->extra_tensors = uint64_t{1} << 60; }, {"tensors"}},
    {"key_count", [](GgufFile* f) { f->extra_keys = uint64_t{1} << 60; }, {"keys"}},
    {"one_key_too_many", [](GgufFile* f) { f->extra_keys = 1; }, {"file"}},
    {"one_tensor_too_many", [](GgufFile* f) { f->extra_tensors = 1; }, {"file"}},
    {"key_twice",
     [](GgufFile* f) { f->keys.push_back(f->keys[0]); },
     {"general.architecture", "comes twice"}},
    {"empty_key", [](GgufFile* f) { f->keys[1].first = ""; }, {"key 1", "1 to 65535"}},
    {"value_type",
     [](GgufFile* f) { f->set("x", Bytes().put<uint32_t>(13).text()); },
     {"x", "value type", "13"}},
    {"nested_array",
     [](GgufFile* f) {
       f->set("x", Bytes().put<uint32_t>(9).put<uint32_t>(9).put<uint64_t>(1).text());
     },
     {"x", "arrays"}},
    {"array_length",
     [](GgufFile* f) {
       f->set("x", Bytes().put<uint32_t>(9).put<uint32_t>(12).put(uint64_t{1} << 61).text());
     },
     {"x", "ends in the middle"}},
    {"string_array_length",
     [](GgufFile* f) {
       f->set("x", Bytes().put<uint32_t>(9).put<uint32_t>(8).put(uint64_t{1} << 40).text());
     },
     {"x", "ends in the middle"}},
    {"string_length",
     [](GgufFile* f) { f->set("x", Bytes().put<uint32_t>(8).put(~uint64_t{0}).text()); },
     {"x", "ends in the middle"}},
    {"bool",
     [](GgufFile* f) { f->set("x", Bytes().put<uint32_t>(7).put<uint8_t>(2).text()); },
     {"x", "booleans"}},
    {"alignment_power",
     [](GgufFile* f) { f->integer("general.alignment", 48); },
     {"general.alignment", "power of two"}},
    {"alignment_zero",
     [](GgufFile* f) { f->integer("general.alignment", 0); },
     {"general.alignment"}},
    {"alignment_type",
     [](GgufFile* f) { f->text("general.alignment", "32"); },
     {"general.alignment", "integer", "string"}},
    {"tensor_name", [](GgufFile* f) { f->tensors[1].name = ""; }, {"tensor 1", "name"}},
    {"long_tensor_name",
     [](GgufFile* f) { f->tensors[1].name = std::string(300, 'x'); },
     {"tensor 1", "name", "300"}},
    {"tensor_twice",
     [](GgufFile* f) { f->tensors[2].name = f->tensors[1].name; },
     {"blk.0.attn_norm.weight", "twice"}},
    {"no_dimensions", [](GgufFile* f) { f->tensors[1].shape = {}; }, {"dimensions", "got 0"}},
    {"dimensions",
     [](GgufFile* f) {
       f->tensors[1].shape = {1, 1, 1, 1, 1};
     },
     {"dimensions", "got 5"}},
    {"zero_size", [](GgufFile* f) { f->tensors[1].shape = {0}; }, {"sizes", "got 0"}},
    {"negative_size",
     [](GgufFile* f) { f->tensors[1].shape = {~uint64_t{0}}; },
     {"sizes of 1 and more"}},
    {"size_overflow",
     [](GgufFile* f) {
       f->tensors[1].shape = {uint64_t{1} << 40, uint64_t{1} << 40};
     },
     {"sizes", "product"}},
    {"bytes_overflow",
     [](GgufFile* f) { f->tensors[1].shape = {uint64_t{1} << 62}; },
     {"too large"}},
    {"unknown_type", [](GgufFile* f) { f->tensors[1].type = 99; }, {"unknown (99)"}},
    {"known_type", [](GgufFile* f) { f->tensors[1].type = 10; }, {"Q2_K (10)"}},
    {"partial_block",
     [](GgufFile* f) {
       f->tensor("blk.0.attn_q.weight").type = 12;  // blocks of 256
     },
     {"blk.0.attn_q.weight", "whole blocks of 256"}},
    {"unaligned_offset",
     [](GgufFile* f) { f->tensors[1].offset += 4; },
     {"offset", "whole 32 bytes"}},
    {"offset_outside",
     [](GgufFile* f) { f->tensors[1].offset = uint64_t{1} << 40; },
     {"reach past"}},
    {"offset_overflow",
     [](GgufFile* f) { f->tensors[1].offset = ~uint64_t{0} - 31; },
     {"reach past"}},
    {"overlap", [](GgufFile* f) { f->tensors[2].offset -= 32; }, {"lies over"}},
    {"no_architecture",
     [](GgufFile* f) { f->erase("general.architecture"); },
     {"general.architecture", "got none"}},
    {"architecture",
     [](GgufFile* f) { f->text("general.architecture", "mamba"); },
     {"general.architecture", "mamba"}},
    {"architecture_type",
     [](GgufFile* f) { f->integer("general.architecture", 1); },
     {"general.architecture", "string"}},
    {"missing_size",
     [](GgufFile* f) { f->erase("llama.block_count"); },
     {"llama.block_count", "missing"}},
    {"zero_layers",
     [](GgufFile* f) { f->integer("llama.block_count", 0); },
     {"llama.block_count", "got 0"}},
    {"many_layers", [](GgufFile* f) { f->integer("llama.block_count", 3); }, {"blk.2.", "missing"}},
    {"heads",
     [](GgufFile* f) { f->integer("llama.attention.head_count", 5); },
     {"head_count", "divisor"}},
    {"key_heads",
     [](GgufFile* f) { f->integer("llama.attention.head_count_kv", 3); },
     {"key heads", "divisor"}},
    {"experts", [](GgufFile* f) { f->integer("llama.expert_count", 8); }, {"8 experts"}},
    {"epsilon",
     [](GgufFile* f) { f->number("llama.attention.layer_norm_rms_epsilon", -1); },
     {"epsilon"}},
    {"infinite_theta",
     [](GgufFile* f) { f->number("llama.rope.freq_base", 1.0f / 0.0f); },
     {"llama.rope.freq_base", "finite"}},
    {"zero_theta", [](GgufFile* f) { f->number("llama.rope.freq_base", 0); }, {"rope theta"}},
    {"rope_scaling",
     [](GgufFile* f) { f->text("llama.rope.scaling.type", "longrope"); },
     {"longrope"}},
    {"odd_rope",
     [](GgufFile* f) { f->integer("llama.rope.dimension_count", 3); },
     {"rotary dimensions", "even"}},
    {"missing_tensor",
     [](GgufFile* f) { f->tensor("blk.1.ffn_up.weight").name = "other"; },
     {"blk.1.ffn_up.weight", "missing"}},
    {"shape",
     [](GgufFile* f) {
       f->tensor("blk.1.attn_k.weight").shape = {16, 32};
     },
     {"blk.1.attn_k.weight", "(16, 32)", "(32, 16)"}},
    {"quantized_norm",
     [](GgufFile* f) { f->tensor("blk.1.attn_norm.weight").type = 8; },
     {"blk.1.attn_norm.weight", "F32, F16 or BF16"}},
    {"bos",
     [](GgufFile* f) { f->integer("tokenizer.ggml.bos_token_id", 300); },
     {"bos_token_id", "300"}},
};

TEST(Gguf, BadFilesAreRefused) {
  for (const Broken& broken : kBroken) {
    SCOPED_TRACE(broken.rule);
    GgufFile file = GgufFile::llama();
    broken.change(&file);
    expect_error(load_bytes(file.build()), broken.message);
  }
}

const Broken kBrokenTokenizers[] = {
    {"model", [](GgufFile* f) { f->text("tokenizer.ggml.model", "bert"); }, {"bert"}},
    {"pre", [](GgufFile* f) { f->text("tokenizer.ggml.pre", "poro"); }, {"poro"}},
    {"no_tokens", [](GgufFile* f) { f->texts("tokenizer.ggml.tokens", {}); }, {"1 to 2^24"}},
    {"token_types",
     [](GgufFile* f) {
       f->array<int32_t>("tokenizer.ggml.token_type", 5, {1, 2, 3});
     },
     {"token_type", "got 3"}},
    {"tokens_type",
     [](GgufFile* f) { f->text("tokenizer.ggml.tokens", "abc"); },
     {"tokens", "array of strings"}},
    {"utf8",
     [](GgufFile* f) { f->texts("tokenizer.ggml.tokens", std::vector<std::string>(300, "\xff")); },
     {"tokens", "UTF-8"}},
    {"merge_of_one",
     [](GgufFile* f) { f->texts("tokenizer.ggml.merges", {"he"}); },
     {"merge 0", "two tokens"}},
    {"merge_with_nothing",
     [](GgufFile* f) { f->texts("tokenizer.ggml.merges", {"h "}); },
     {"merge 0", "two tokens"}},
    {"nothing_with_merge",
     [](GgufFile* f) { f->texts("tokenizer.ggml.merges", {" h"}); },
     {"merge 0", "two tokens"}},
    {"unknown_merge",
     [](GgufFile* f) {
       f->texts("tokenizer.ggml.merges", {"h e", "he x"});
     },
     {"merge 1", "among the tokens"}},
};

TEST(Gguf, BadTokenizersAreRefused) {
  for (const Broken& broken : kBrokenTokenizers) {
    SCOPED_TRACE(broken.rule);
    GgufFile file = GgufFile::llama();
    broken.change(&file);
    Model model;
    const std::string bytes = file.build();
    ASSERT_TRUE(load_bytes(bytes, &model).ok());
    EXPECT_EQ(model.tokenizer, nullptr);
    expect_error(invalid(model.tokenizer_error), broken.message);
  }
  GgufFile file = GgufFile::sentencepiece();
  file.array<float>("tokenizer.ggml.scores", 6, {1, 2});
  Model model;
  ASSERT_TRUE(load_bytes(file.build(), &model).ok());
  expect_error(invalid(model.tokenizer_error), {"scores", "got 2"});
  file.array("tokenizer.ggml.scores", 6, std::vector<float>(300, 0.0f / 0.0f));
  ASSERT_TRUE(load_bytes(file.build(), &model).ok());
  expect_error(invalid(model.tokenizer_error), {"scores", "finite"});
}

TEST(Gguf, CutAnywhere) {
  for (const GgufFile& file : {GgufFile::llama(), GgufFile::gpt2(), GgufFile::sentencepiece()}) {
    const std::string bytes = file.build();
    for (size_t size = 0; size < bytes.size(); size += 97) {
      // A copy of that size, so that a read past its end is seen.
      const std::string cut(bytes.data(), size);
      EXPECT_FALSE(load_bytes(cut).ok()) << size;
    }
  }
}

TEST(Gguf, ScaledRope) {
  GgufFile file = GgufFile::llama();
  file.text("llama.rope.scaling.type", "linear");
  file.number("llama.rope.scaling.factor", 4);
  Model model;
  ASSERT_TRUE(load_bytes(file.build(), &model).ok());
  EXPECT_FLOAT_EQ(model.decoder.config.rope_frequencies[0], 0.25f);
}

}  // namespace
}  // namespace fk::model
