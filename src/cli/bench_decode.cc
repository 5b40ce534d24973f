// fk bench decode: tokens a second, prompt and generation apart, beside the memory's bandwidth.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "cli/text_options.h"
#include "core/thread_pool.h"
#include "cpu/targets.h"

namespace fk::cli {
namespace {

using Clock = std::chrono::steady_clock;

struct BenchOptions {
  int64_t prompt = 512;
  int64_t tokens = 64;
  int repeats = 5;
  std::string peer;  // llama.cpp's llama-bench
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Measured {
  std::vector<double> prompt_seconds, token_seconds;  // per repeat; per token, a repeat's mean
  double bytes = 0;                                   // read by one token, on average
};

Status measure(engine::Engine& engine, const BenchOptions& bench, Measured* out) {
  std::vector<int32_t> prompt(static_cast<size_t>(bench.prompt));
  for (size_t i = 0; i < prompt.size(); ++i) {
    prompt[i] = static_cast<int32_t>((i * 7919 + 13) % static_cast<size_t>(engine.vocab()));
  }
  std::vector<float> logits(static_cast<size_t>(engine.vocab()));
  const auto last = engine::Engine::Logits::kLast;
  const auto seconds = [](Clock::time_point from) {
    return std::chrono::duration<double>(Clock::now() - from).count();
  };
  for (int r = -1; r < bench.repeats; ++r) {  // the first round warms up
    engine.rewind(0);
    auto start = Clock::now();
    FK_RETURN_IF_ERROR(engine.forward(prompt.data(), bench.prompt, last, logits.data()));
    const double prompt_seconds = seconds(start);
    engine.rewind(0);
    int32_t token = 1;
    double bytes = 0;
    start = Clock::now();
    for (int64_t i = 0; i < bench.tokens; ++i) {
      FK_RETURN_IF_ERROR(engine.forward(&token, 1, last, logits.data()));
      token = static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
      bytes += static_cast<double>(engine.weight_bytes() + engine.cache_bytes());
    }
    if (r < 0) continue;
    out->prompt_seconds.push_back(prompt_seconds);
    out->token_seconds.push_back(seconds(start) / static_cast<double>(bench.tokens));
    out->bytes = bytes / static_cast<double>(bench.tokens);
  }
  return {};
}

struct Peer {
  double prompt = 0, decode = 0;  // tokens a second; 0: not known
};

// A word for the shell.
std::string quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

// Runs llama-bench on the same file with the same threads, right after us.
Status measure_peer(const BenchOptions& bench, const std::string& model, Peer* peer) {
  const std::string command = quoted(bench.peer) + " -m " + quoted(model) + " -t " +
                              std::to_string(num_threads()) + " -p " +
                              std::to_string(bench.prompt) + " -n " + std::to_string(bench.tokens) +
                              " -r " + std::to_string(bench.repeats) + " -o json 2>/dev/null";
  FILE* pipe = popen(command.c_str(), "r");
  std::string text;
  char buffer[4096];
  while (pipe != nullptr) {
    const size_t n = std::fread(buffer, 1, sizeof buffer, pipe);
    if (n == 0) break;
    text.append(buffer, n);
  }
  const int status = pipe == nullptr ? -1 : pclose(pipe);
  const nlohmann::json rows = nlohmann::json::parse(text, nullptr, false);
  if (status != 0 || !rows.is_array()) {
    return invalid("peer: expected llama.cpp's llama-bench, and " + bench.peer +
                   " gave no figures");
  }
  for (const nlohmann::json& row : rows) {
    const bool is_prompt = row.value("n_prompt", 0) > 0;
    (is_prompt ? peer->prompt : peer->decode) = row.value("avg_ts", 0.0);
  }
  return {};
}

}  // namespace

int bench_decode(int count, char** arguments) {
  TextOptions options;
  BenchOptions bench;
  CLI::App app("Tokens a second of a model, and the share of the memory's bandwidth",
               "fk bench decode");
  add_model_options(&app, &options);
  app.add_option("--prompt", bench.prompt, "Tokens of the prompt")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("-n,--tokens", bench.tokens, "Tokens to write")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--repeats", bench.repeats, "Rounds; medians are reported")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--peer", bench.peer, "llama.cpp's llama-bench, to run on the same file");
  CLI11_PARSE(app, count, arguments);

  options.open.need_tokenizer = false;
  const std::unique_ptr<engine::TextModel> model = open_model("bench decode", &options);
  if (model == nullptr) return 1;
  Measured measured;
  Peer peer;
  Status status = measure(model->engine(), bench, &measured);
  if (status.ok() && !bench.peer.empty()) status = measure_peer(bench, model->path(), &peer);
  if (!status.ok()) {
    std::fprintf(stderr, "fk bench decode: %s\n", status.message().c_str());
    return 1;
  }
  const double bandwidth = engine::read_bandwidth();
  const double prompt = static_cast<double>(bench.prompt) / median(measured.prompt_seconds);
  const double decode = 1 / median(measured.token_seconds);
  const double rate = measured.bytes * decode;
  if (options.json) {
    nlohmann::json j = {{"model", model->path()},
                        {"weights", model->engine().description()},
                        {"threads", num_threads()},
                        {"target", cpu::active_target()},
                        {"prompt_tokens", bench.prompt},
                        {"prompt_tokens_per_second", prompt},
                        {"tokens", bench.tokens},
                        {"tokens_per_second", decode},
                        {"prompt_seconds", measured.prompt_seconds},
                        {"token_seconds", measured.token_seconds},
                        {"bytes_per_token", measured.bytes},
                        {"bytes_per_second", rate},
                        {"read_bandwidth", bandwidth},
                        {"share_of_bandwidth", rate / bandwidth}};
    if (peer.decode > 0) {
      j["peers"]["llama.cpp"] = {{"prompt_tokens_per_second", peer.prompt},
                                 {"tokens_per_second", peer.decode}};
      j["ratio_to_best_peer"] = {{"prompt", prompt / peer.prompt},
                                 {"decode", decode / peer.decode}};
    }
    std::printf("%s\n", j.dump(2).c_str());
    return 0;
  }
  std::printf("%s\n%s; %d threads, %s\n", model->path().c_str(),
              model->engine().description().c_str(), num_threads(), cpu::active_target());
  std::printf("prompt of %lld: %10.1f tokens/s\n", static_cast<long long>(bench.prompt), prompt);
  std::printf("decode, %lld:   %10.1f tokens/s, %.1f GB/s, %.0f%% of the %.1f this machine reads\n",
              static_cast<long long>(bench.tokens), decode, rate * 1e-9, 100 * rate / bandwidth,
              bandwidth * 1e-9);
  if (peer.decode > 0) {
    std::printf("llama.cpp:     %10.1f and %.1f tokens/s; we are %.2fx and %.2fx as fast\n",
                peer.prompt, peer.decode, prompt / peer.prompt, decode / peer.decode);
  }
  return 0;
}

}  // namespace fk::cli
