// Fuzz targets for every reader of files, one entry point for libFuzzer, and a driver of our own
// for compilers that have none:
//   fk_fuzz TARGET|all [SECONDS [SEED]]: mutates good files, with what sanitizers the build has;
//   fk_fuzz TARGET FILE...: runs a target on files.
// For libFuzzer compile with -DFK_LIBFUZZER -fsanitize=fuzzer and set FK_FUZZ_TARGET.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>

#include "files.h"
#include "fuzz_limits.h"
#include "model/formats.h"
#include "model/safetensors.h"
#include "model/unicode.h"
#include "tokenizer_mutations.h"

namespace fk::model {
namespace {

void require(bool condition, const char* what) {
  if (!condition) report_finding(what);
}

// Everything that a tokenizer can be asked for; a stream must give what decoding gives.
void use(const Tokenizer& tokenizer, std::string_view text) {
  std::vector<int32_t> ids;
  std::string chat, whole;
  const std::vector<ChatMessage> messages = {
      {"system", "a"}, {"user", std::string(text)}, {"assistant", "<think>\nb</think>a"}};
  (void)format_chat(tokenizer, messages, true, &chat).ok();
  (void)limited("a chat", [&] { return encode_chat(tokenizer, messages, true, &ids); }).ok();
  ids.clear();
  if (!limited("encoding", [&] { return tokenizer.encode(text, {}, &ids); }).ok()) return;
  for (int32_t id : ids) require(id >= 0 && id < tokenizer.size(), "an id is out of range");
  ids.insert(ids.end(), {-1, 0, 1, tokenizer.size() - 1, tokenizer.size()});
  if (!limited("decoding", [&] { return tokenizer.decode(ids, true, &whole); }).ok()) return;
  TokenStream stream(tokenizer, /*continues=*/false);
  std::string joined;
  for (int32_t id : ids) {
    const std::string part = stream.push(id);
    require(is_utf8(part), "a stream cut a character");
    joined += part;
  }
  joined += stream.finish();
  require(joined == whole, "a stream differs from decoding");
}

// A text that the file draws, so that the file alone is what a finding takes.
void use_with_odd_text(const Tokenizer& tokenizer, const std::string& file) {
  std::mt19937_64 random(std::hash<std::string>()(file));
  use(tokenizer, odd_text(&random));
}

// Touches the first and last byte of every weight.
void use(const Model& model) {
  std::vector<float> row;
  for (const auto& [name, weight] : named_weights(model.decoder)) {
    require(weight->rows > 0 && weight->columns > 0, "a weight is empty");
    row.resize(static_cast<size_t>(weight->columns));
    read_row(*weight, 0, row.data());
    read_row(*weight, weight->rows - 1, row.data());
  }
  if (model.tokenizer != nullptr) use(*model.tokenizer, "hello <|im_end|> 123\n\xC3\xA4 hi");
}

void fuzz_model(const std::string& bytes) {
  Model model;
  const Status status = limited("loading", [&] { return load_memory(bytes, "", "file", &model); });
  if (status.ok()) use(model);
  if (status.ok() && model.tokenizer != nullptr) use_with_odd_text(*model.tokenizer, bytes);
  require(status.ok() || !status.message().empty(), "an error says nothing");
}

void fuzz_safetensors(const std::string& bytes) {
  const std::string file = "file";
  TensorTable table(file);
  if (!limited("loading", [&] { return read_safetensors(file, bytes, &table); }).ok()) return;
  Weight weight;
  if (table.matrix("a", 2, 3, &weight).ok()) {
    float row[3];
    read_row(weight, 1, row);
  }
}

// A config.json over tensors that fit its first form.
void fuzz_config(const std::string& bytes) {
  static const std::string* file = new std::string("file");
  static const std::vector<float>* data = new std::vector<float>(4096);
  TensorTable table(*file);
  const auto add = [&](const std::string& name, std::vector<int64_t> shape) {
    StoredTensor tensor;
    tensor.file = file;
    tensor.data = reinterpret_cast<const char*>(data->data());
    tensor.shape = std::move(shape);
    table.add(name, tensor);
  };
  add("model.embed_tokens.weight", {16, 8});
  add("model.norm.weight", {8});
  for (const char* name : {"q_proj", "k_proj", "v_proj", "o_proj"}) {
    add(std::string("model.layers.0.self_attn.") + name + ".weight", {8, 8});
  }
  add("model.layers.0.input_layernorm.weight", {8});
  add("model.layers.0.post_attention_layernorm.weight", {8});
  add("model.layers.0.mlp.gate_proj.weight", {12, 8});
  add("model.layers.0.mlp.up_proj.weight", {12, 8});
  add("model.layers.0.mlp.down_proj.weight", {8, 12});
  Json json;
  if (!parse_json(*file, bytes, &json).ok()) return;
  Model model;
  const Status status = limited("loading", [&] {
    return decoder_from_huggingface(*file, json, &json, table, &model.decoder);
  });
  if (status.ok()) use(model);
}

void fuzz_tokenizer_json(const std::string& bytes) {
  const std::string file = "file";
  std::unique_ptr<Tokenizer> tokenizer;
  const Status status = limited("loading", [&] {
    Json json;
    FK_RETURN_IF_ERROR(parse_json(file, bytes, &json));
    return tokenizer_from_json(file, json, &json, &tokenizer);
  });
  require(is_utf8(status.message()), "an error is no text");
  if (!status.ok()) return;
  use(*tokenizer, "aba 11<s>\xC3\xA4");
  use_with_odd_text(*tokenizer, bytes);
}

void fuzz_tokenizer_bin(const std::string& bytes) {
  const std::string file = "file";
  std::unique_ptr<Tokenizer> tokenizer;
  const Status status =
      limited("loading", [&] { return tokenizer_from_llama2c(file, bytes, 0, &tokenizer); });
  if (!status.ok()) return;
  use(*tokenizer, "hi hi\xC3\xA4");
  use_with_odd_text(*tokenizer, bytes);
}

void fuzz_text(const std::string& bytes) {
  static const std::vector<std::unique_ptr<Tokenizer>>* all = [] {
    auto* made = new std::vector<std::unique_ptr<Tokenizer>>;
    for (const char* pre : {"gpt-2", "llama-bpe", "qwen2", "tekken", "smollm"}) {
      GgufFile file = GgufFile::llama();
      file.text("tokenizer.ggml.pre", pre);
      Model model;
      require(load_bytes(file.build(), &model).ok() && model.tokenizer, "a good file is bad");
      made->push_back(std::move(model.tokenizer));
    }
    Model model;
    require(load_bytes(GgufFile::sentencepiece().build(), &model).ok(), "a good file is bad");
    made->push_back(std::move(model.tokenizer));
    return made;
  }();
  for (const auto& tokenizer : *all) use(*tokenizer, bytes);
}

const char kConfig[] =
    R"({"model_type": "qwen2", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4,
    "max_position_embeddings": 32, "vocab_size": 16, "eos_token_id": [1, 2], "sliding_window": 4,
    "use_sliding_window": true, "max_window_layers": 0, "layer_types": ["sliding_attention"],
    "tie_word_embeddings": true, "rope_theta": 1e4, "rms_norm_eps": 1e-6,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32,
                     "original_max_position_embeddings": 16}})";

std::string mutate(const std::vector<std::string>& seeds, std::mt19937_64* random);

// A good file with other parts, at times with a few bytes changed too.
std::string mutate_parts(const std::vector<std::string>& seeds, std::mt19937_64* random) {
  Json json;
  require(parse_json("file", seeds[0], &json).ok(), "a good file is bad");
  mutate_tokenizer(random, &json);
  std::string bytes = dump(json);
  bytes.resize(std::min<size_t>(bytes.size(), 1 << 20));
  return (*random)() % 8 == 0 ? mutate({bytes}, random) : bytes;
}

struct Target {
  const char* name;
  void (*run)(const std::string& bytes);
  std::function<std::vector<std::string>()> seeds;
  std::string (*change)(const std::vector<std::string>& seeds, std::mt19937_64* random) = mutate;
};

const std::vector<Target>& targets() {
  static const auto* all = new std::vector<Target>{
      {"gguf", fuzz_model,
       [] {
         return std::vector<std::string>{GgufFile::llama().build(), GgufFile::gpt2().build(),
                                         GgufFile::sentencepiece().build()};
       }},
      {"llama2c", fuzz_model,
       [] {
         return std::vector<std::string>{llama2c(0),        llama2c(0, false), llama2c(1),
                                         llama2c(1, false), llama2c(2),        llama2c(2, false)};
       }},
      {"safetensors", fuzz_safetensors,
       [] {
         return std::vector<std::string>{safetensors(
             R"({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}} )", 24)};
       }},
      {"config", fuzz_config, [] { return std::vector<std::string>{kConfig}; }},
      {"tokenizer_json", fuzz_tokenizer_json,
       [] { return std::vector<std::string>{tokenizer_json()}; }},
      {"tokenizer_parts", fuzz_tokenizer_json,
       [] { return std::vector<std::string>{tokenizer_json()}; }, mutate_parts},
      {"tokenizer_bin", fuzz_tokenizer_bin,
       [] { return std::vector<std::string>{llama2c_tokenizer()}; }},
      {"text", fuzz_text,
       [] {
         return std::vector<std::string>{"hello <|im_end|> 123\n", "\xC3\xA4\xE2\x82\xAC he'll",
                                         std::string(40, ' ')};
       }},
  };
  return *all;
}

// Changes a file in a few places, mostly in its first part, where the structure is.
std::string mutate(const std::vector<std::string>& seeds, std::mt19937_64* random) {
  const auto below = [&](size_t n) { return n == 0 ? 0 : static_cast<size_t>((*random)() % n); };
  std::string bytes = seeds[below(seeds.size())];
  static constexpr uint64_t kValues[] = {0,
                                         1,
                                         2,
                                         0x7f,
                                         0x80,
                                         0xff,
                                         0x7fff,
                                         0xffff,
                                         0x7fffffff,
                                         0x80000000,
                                         0xffffffff,
                                         uint64_t{1} << 40,
                                         INT64_MAX,
                                         INT64_MAX,
                                         ~uint64_t{0},
                                         ~uint64_t{0} - 31};
  for (size_t change = 0, count = 1 + below(4); change < count && !bytes.empty(); ++change) {
    const size_t reach = below(3) == 0 ? bytes.size() : std::min<size_t>(bytes.size(), 1024);
    const size_t at = below(reach);
    switch (below(7)) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ 1 << below(8));
        break;
      case 1:
        bytes[at] = static_cast<char>(below(256));
        break;
      case 2: {  // a number of 1, 2, 4 or 8 bytes
        const uint64_t value = kValues[below(std::size(kValues))];
        const size_t size = std::min<size_t>(size_t{1} << below(4), bytes.size() - at);
        std::memcpy(&bytes[at], &value, size);
        break;
      }
      case 3:
        bytes.erase(at, 1 + below(16));
        break;
      case 4:
        bytes.insert(at, bytes.substr(below(bytes.size()), 1 + below(32)));
        break;
      case 5: {
        static constexpr std::string_view kSigns = "0123456789-.,:[]{}\"\\ eE+<>\xff\xc3";
        bytes[at] = kSigns[below(kSigns.size())];
        break;
      }
      default:
        bytes.resize(below(2) == 0 ? at : bytes.size() - below(16) % bytes.size());
    }
  }
  return bytes;
}

const Target* find_target(const std::string& name) {
  for (const Target& target : targets()) {
    if (name == target.name) return &target;
  }
  return nullptr;
}

void run(const Target& target, const std::string& bytes) {
  begin_input(&bytes);
  target.run(bytes);
  begin_input(nullptr);
}

#ifndef FK_LIBFUZZER
void fuzz(const Target& target, double seconds, uint64_t seed) {
  std::printf("%s: seed %llu", target.name, static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  extremes() = {};
  const std::vector<std::string> seeds = target.seeds();
  for (const std::string& bytes : seeds) run(target, bytes);
  std::mt19937_64 random(seed);
  const auto begin = std::chrono::steady_clock::now();
  const auto spent = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  int64_t runs = 0;
  for (; spent() < seconds; ++runs) run(target, target.change(seeds, &random));
  std::printf(", %lld files in %.1f s, a step at most %.2f s and %zu MiB\n",
              static_cast<long long>(runs), spent(), extremes().seconds, extremes().bytes >> 20);
}

int main_of(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "all";
  const Target* target = find_target(name);
  if (target == nullptr && name != "all") {
    std::fprintf(stderr, "fk_fuzz: expected a target or all, got %s\n", name.c_str());
    return 2;
  }
  char* end = nullptr;
  const double seconds = argc > 2 ? std::strtod(argv[2], &end) : 1;
  if (argc > 2 && *end != '\0') {
    if (target == nullptr) return 2;
    for (int i = 2; i < argc; ++i) {
      std::ifstream file(argv[i], std::ios::binary);
      run(*target, {std::istreambuf_iterator<char>(file), {}});
    }
    return 0;
  }
  const uint64_t seed = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : std::random_device()();
  for (const Target& t : targets()) {
    if (target == nullptr || target == &t) fuzz(t, seconds, seed);
  }
  return 0;
}
#endif

}  // namespace
}  // namespace fk::model

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const fk::model::Target* target = [] {
    const char* name = std::getenv("FK_FUZZ_TARGET");
    return fk::model::find_target(name == nullptr ? "gguf" : name);
  }();
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  if (target != nullptr) fk::model::run(*target, bytes);
  return 0;
}

#ifdef FK_LIBFUZZER
// libFuzzer's own mutations, and from time to time one of a good file.
extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned int seed) {
  std::mt19937_64 random(seed);
  const char* name = std::getenv("FK_FUZZ_TARGET");
  const fk::model::Target* target = fk::model::find_target(name == nullptr ? "gguf" : name);
  if (target != nullptr && (size < 8 || seed % 16 == 0)) {
    static const std::vector<std::string>* seeds = new std::vector<std::string>(target->seeds());
    const std::string bytes = target->change(*seeds, &random);
    size = std::min(bytes.size(), max_size);
    std::memcpy(data, bytes.data(), size);
    return size;
  }
  return LLVMFuzzerMutate(data, size, max_size);
}
#else
int main(int argc, char** argv) { return fk::model::main_of(argc, argv); }
#endif
