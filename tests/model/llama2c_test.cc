// llama2.c's files: the three forms, and one bad file per rule.
#include "files.h"

namespace fk::model {
namespace {

// The header's fields by their place.
enum Field { kDim, kHidden, kLayers, kHeads, kKeyHeads, kVocab, kContext };

std::string with(std::string bytes, int version, Field field, int32_t value) {
  std::memcpy(&bytes[(version > 0 ? 8u : 0u) + 4u * field], &value, 4);
  return bytes;
}

TEST(Llama2c, GoodFilesLoad) {
  for (int version : {0, 1, 2}) {
    for (bool shared : {true, false}) {
      SCOPED_TRACE(version);
      Model model;
      const std::string bytes = llama2c(version, shared);
      const Status status = load_bytes(bytes, &model, llama2c_tokenizer());
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(model.decoder.config.tied, shared);
      EXPECT_EQ(model.decoder.config.vocab, 300);
      EXPECT_EQ(model.decoder.layers[1].down.columns, 64);
      EXPECT_EQ(model.decoder.layers[1].q.type,
                version == 2 ? WeightType::kInt8Grouped : WeightType::kF32);
      std::vector<int32_t> ids;
      ASSERT_TRUE(model.tokenizer->encode("hi hi", {}, &ids).ok());
      EXPECT_EQ(decoded(*model.tokenizer, ids), "hi hi");
    }
  }
}

TEST(Llama2c, UnknownTokenIsSpecial) {
  Model model;
  ASSERT_TRUE(load_bytes(llama2c(0), &model, llama2c_tokenizer()).ok());
  const Tokenizer& tokenizer = *model.tokenizer;
  EXPECT_TRUE(tokenizer.is_special(0));
  std::vector<int32_t> ids;
  ASSERT_TRUE(tokenizer.encode("hi<unk>", {}, &ids).ok());
  EXPECT_EQ(ids.back(), 0);
  EXPECT_EQ(decoded(tokenizer, ids), "hi");
  ids.clear();
  ASSERT_TRUE(tokenizer.encode("hi<unk>", {true, false}, &ids).ok());
  EXPECT_EQ(decoded(tokenizer, ids), "hi<unk>");
}

TEST(Llama2c, BadFilesAreRefused) {
  for (int version : {0, 1, 2}) {
    SCOPED_TRACE(version);
    const std::string good = llama2c(version);
    expect_error(load_bytes(good + "x"), {"expected", "bytes for these sizes"});
    expect_error(load_bytes(good.substr(0, good.size() - 4)), {"in the middle of its weights"});
    expect_error(load_bytes(with(good, version, kDim, 0)), {"embedding size"});
    expect_error(load_bytes(with(good, version, kDim, -32)), {"embedding size"});
    expect_error(load_bytes(with(good, version, kDim, INT32_MAX)), {"embedding size"});
    expect_error(load_bytes(with(good, version, kDim, 36)), {""});
    expect_error(load_bytes(with(good, version, kHidden, -1)), {"hidden size"});
    expect_error(load_bytes(with(good, version, kLayers, 0)), {"layers"});
    expect_error(load_bytes(with(good, version, kLayers, 1 << 20)), {"layers"});
    expect_error(load_bytes(with(good, version, kHeads, 0)), {"heads"});
    expect_error(load_bytes(with(good, version, kHeads, 6)), {""});
    expect_error(load_bytes(with(good, version, kKeyHeads, 3)), {"key heads"});
    expect_error(load_bytes(with(good, version, kKeyHeads, 8)), {"key heads"});
    expect_error(load_bytes(with(good, version, kVocab, 0)), {"vocabulary"});
    expect_error(load_bytes(with(good, version, kVocab, INT32_MIN)), {"vocabulary"});
    expect_error(load_bytes(with(good, version, kVocab, 1 << 23)), {"in the middle"});
    expect_error(load_bytes(with(good, version, kContext, 0)), {"context length"});
  }
  std::string other = llama2c(1);
  other[4] = 3;
  expect_error(load_bytes(other), {"version", "got 3"});
  std::string grouped = llama2c(2);
  for (int32_t group : {0, -4, 3, 24}) {
    std::memcpy(&grouped[8 + 28 + 1], &group, 4);
    expect_error(load_bytes(grouped), {"group size"});
  }
}

TEST(Llama2c, CutAnywhere) {
  for (int version : {0, 1, 2}) {
    const std::string bytes = llama2c(version);
    for (size_t size = 1; size < bytes.size(); size += 97) {
      const std::string cut(bytes.data(), size);
      EXPECT_FALSE(load_bytes(cut).ok()) << size;
    }
  }
}

TEST(Llama2c, BadTokenizersAreRefused) {
  const std::string model = llama2c(0), good = llama2c_tokenizer();
  const auto open = [&](const std::string& tokenizer) {
    Model made;
    return load_bytes(model, &made, tokenizer);
  };
  const auto patched = [&](size_t at, auto value) {
    std::string bytes = good;
    std::memcpy(&bytes[at], &value, sizeof(value));
    return bytes;
  };
  ASSERT_TRUE(open(good).ok());
  expect_error(open("abc"), {"too short"});
  expect_error(open(llama2c_tokenizer(299)), {"300 tokens", "got 299"});
  expect_error(open(llama2c_tokenizer(301)), {"300 tokens", "got 301"});
  expect_error(open(patched(0, int32_t{0})), {"longest token"});
  expect_error(open(patched(0, int32_t{2})), {"token 0", "length"});
  expect_error(open(patched(4, 0.0f / 0.0f)), {"token 0", "score"});
  expect_error(open(patched(8, int32_t{-1})), {"token 0", "length", "-1"});
  expect_error(open(patched(12, '\xff')), {"token 0", "UTF-8"});
  for (size_t size = 1; size < good.size(); size += 7) {
    EXPECT_FALSE(open(good.substr(0, size)).ok()) << size;
  }
}

}  // namespace
}  // namespace fk::model
