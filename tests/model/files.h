// Model files made in memory: good ones, to be broken one rule at a time.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "model/load.h"
#include "model/quantized.h"

namespace fk::model {

class Bytes {
 public:
  template <class T>
  Bytes& put(T value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof(T));
    return *this;
  }
  Bytes& raw(const std::string& text) {
    text_ += text;
    return *this;
  }
  Bytes& string(const std::string& text) { return put<uint64_t>(text.size()).raw(text); }
  Bytes& align(size_t to) {
    text_.resize((text_.size() + to - 1) / to * to);
    return *this;
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

// A GGUF file with a tokenizer of bytes and a few merges. Its fields may be changed before `build`.
struct GgufFile {
  struct Tensor {
    std::string name;
    std::vector<uint64_t> shape;  // innermost first, as in the file
    uint32_t type = 0;            // F32
    uint64_t offset = 0;
    uint64_t bytes = 0;
  };

  uint32_t version = 3;
  std::vector<std::pair<std::string, std::string>> keys;  // with the value's type and bytes
  std::vector<Tensor> tensors;
  uint64_t extra_tensors = 0, extra_keys = 0;  // in the header only

  void integer(const std::string& key, uint32_t value) {
    set(key, Bytes().put<uint32_t>(4).put(value).text());
  }
  void number(const std::string& key, float value) {
    set(key, Bytes().put<uint32_t>(6).put(value).text());
  }
  void text(const std::string& key, const std::string& value) {
    set(key, Bytes().put<uint32_t>(8).string(value).text());
  }
  void texts(const std::string& key, const std::vector<std::string>& values) {
    Bytes bytes;
    bytes.put<uint32_t>(9).put<uint32_t>(8).put<uint64_t>(values.size());
    for (const std::string& value : values) bytes.string(value);
    set(key, bytes.text());
  }
  template <class T>
  void array(const std::string& key, uint32_t type, const std::vector<T>& values) {
    Bytes bytes;
    bytes.put<uint32_t>(9).put(type).put<uint64_t>(values.size());
    for (T value : values) bytes.put(value);
    set(key, bytes.text());
  }
  void set(const std::string& key, const std::string& value) {
    erase(key);
    keys.emplace_back(key, value);
  }
  void erase(const std::string& key);
  Tensor& tensor(const std::string& name);
  void add(const std::string& name, std::vector<uint64_t> shape);

  static GgufFile llama();
  static GgufFile gpt2();
  static GgufFile sentencepiece();  // llama with a tokenizer of scores
  std::string build() const;
};

// A safetensors file: a header and as many bytes of data.
std::string safetensors(const std::string& header, size_t bytes);

// llama2.c's three forms of one small model, and a tokenizer for it.
std::string llama2c(int version, bool shared = true);
std::string llama2c_tokenizer(int tokens = 300);

// A small tokenizer.json.
std::string tokenizer_json();

// The text of `ids`, which must have one.
std::string decoded(const Tokenizer& tokenizer, const std::vector<int32_t>& ids,
                    bool skip_special = true);

// Expects an error that has all of these in it.
void expect_error(const Status& status, const std::vector<std::string>& parts);
Status load_bytes(const std::string& bytes, Model* model, const std::string& tokenizer = "");
Status load_bytes(const std::string& bytes);

}  // namespace fk::model
