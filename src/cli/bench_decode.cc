// fk bench decode: tokens a second, prompt and generation apart, beside the memory's bandwidth.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

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
  std::string json_file;
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
  CLI11_PARSE(app, count, arguments);

  options.open.need_tokenizer = false;
  const std::unique_ptr<engine::TextModel> model = open_model("bench decode", &options);
  if (model == nullptr) return 1;
  Measured measured;
  const Status status = measure(model->engine(), bench, &measured);
  if (!status.ok()) {
    std::fprintf(stderr, "fk bench decode: %s\n", status.message().c_str());
    return 1;
  }
  const double bandwidth = engine::read_bandwidth();
  const double prompt = static_cast<double>(bench.prompt) / median(measured.prompt_seconds);
  const double decode = 1 / median(measured.token_seconds);
  const double rate = measured.bytes * decode;
  if (options.json) {
    const nlohmann::json j = {{"model", model->path()},
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
    std::printf("%s\n", j.dump(2).c_str());
    return 0;
  }
  std::printf("%s\n%s; %d threads, %s\n", model->path().c_str(),
              model->engine().description().c_str(), num_threads(), cpu::active_target());
  std::printf("prompt of %lld: %10.1f tokens/s\n", static_cast<long long>(bench.prompt), prompt);
  std::printf("decode, %lld:   %10.1f tokens/s, %.1f GB/s, %.0f%% of the %.1f this machine reads\n",
              static_cast<long long>(bench.tokens), decode, rate * 1e-9, 100 * rate / bandwidth,
              bandwidth * 1e-9);
  return 0;
}

}  // namespace fk::cli
