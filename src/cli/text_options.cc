// This file adds the options of the commands that run a model, and checks their values.
#include "cli/text_options.h"

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <random>
#include <sstream>
#include <type_traits>

#include "cli/terminal.h"
#include "core/thread_pool.h"
#include "engine/ceilings.h"

namespace fk::cli {
namespace {

std::atomic<bool> interrupt_seen{false};
struct sigaction action_before;  // what CatchInterrupt restores

void note_interrupt(int) { interrupt_seen.store(true); }

// Returns a check that a text is a number of type T for which `fits` is true. A stream reads
// neither NaN nor a number too large for T, but it does read -1 as the largest unsigned number, so
// that is refused here.
template <class T, class Fits>
CLI::Validator number(const std::string& expected, Fits fits) {
  return CLI::Validator(
      [=](std::string& text) {
        T value{};
        std::istringstream stream(text);
        const bool negative = std::is_unsigned_v<T> && text[0] == '-';
        const bool good = !negative && stream >> value && stream.eof() && fits(value);
        return good ? std::string() : "expected " + expected + ", got " + text;
      },
      "");
}

}  // namespace

CLI::Validator whole_number(int64_t least) {
  return number<int64_t>("a whole number from " + std::to_string(least) + " up",
                         [=](int64_t n) { return n >= least; });
}

CLI::Validator seed_number() {
  return number<uint64_t>("a whole number from 0 to 18446744073709551615",
                          [](uint64_t) { return true; });
}

bool parse(CLI::App* app, int argc, char** argv, int* code) {
  try {
    app->parse(argc, argv);
    return true;
  } catch (const CLI::ParseError& error) {
    *code = error.get_exit_code() == 0 ? app->exit(error) : 2;
    if (*code == 0) return false;
    std::string name = app->get_name();
    for (const CLI::App* command : app->get_subcommands()) name += " " + command->get_name();
    const std::string line = name + ": " + CLI::FailureMessage::simple(app, error);
    std::fputs(shown(stderr, line).c_str(), stderr);
    return false;
  }
}

void add_model_options(CLI::App* command, TextOptions* options) {
  command
      ->add_option("MODEL", options->open.model,
                   "A Hugging Face folder, a .safetensors, .gguf or llama2.c .bin file, or a "
                   "name (default: the built-in model)")
      ->check(CLI::Validator(
          [](std::string& name) {
            return std::string(name.empty() ? "expected a path or a name, got an empty text" : "");
          },
          ""));
  command->add_option("--tokenizer", options->open.tokenizer,
                      "tokenizer.json, tokenizer.bin or .gguf, where the model has none beside it");
  command->add_option("--device", options->open.device, "Where to run; only cpu runs models")
      ->check(CLI::Validator(
          [](std::string& name) {
            return name == "cpu" ? std::string()
                                 : "expected cpu, the only one that runs models, got " + name;
          },
          ""))
      ->capture_default_str();
  command->add_option("--mode", options->mode, "How to run; auto chooses")
      ->check(CLI::IsMember({"auto"}))
      ->capture_default_str();
  command->add_option("--quantize", options->open.quantize,
                      "Float weights as f16, bf16, q8_0, q5_1, q5_0, q4_1 or q4_0");
  command->add_option("--context", options->open.context, "Tokens to remember (0: the model's own)")
      ->check(whole_number(0));
  command->add_option("--cache", options->open.cache, "Keys and values: auto, f16 or f32")
      ->check(CLI::IsMember({"auto", "f16", "f32"}))
      ->capture_default_str();
  command->add_option("--threads", options->threads, "Threads (0: one per core)")
      ->check(whole_number(0));
  command->add_flag("--json", options->json, "One JSON object instead of text");
  command->add_flag("-q,--quiet", options->quiet, "No figures on stderr");
}

void add_sampling_options(CLI::App* command, TextOptions* options) {
  engine::SamplingOptions& s = options->generate.sampling;
  command->add_option("-n,--max-tokens", options->generate.max_tokens, "Tokens to write at most")
      ->check(whole_number(0))
      ->capture_default_str();
  command->add_option("--temp,--temperature", s.temperature, "0: always the likeliest token")
      ->check(number<float>("a number from 0 up", [](float x) { return x >= 0; }))
      ->capture_default_str();
  command->add_option("--top-k", s.top_k, "Choose among so many of the likeliest (0: all)")
      ->check(whole_number(0))
      ->capture_default_str();
  command->add_option("--top-p", s.top_p, "Choose among the likeliest that hold this probability")
      ->check(number<float>("a number above 0, at most 1", [](float x) { return x > 0 && x <= 1; }))
      ->capture_default_str();
  command->add_option("--min-p", s.min_p, "Least probability, as a share of the likeliest's")
      ->check(number<float>("a number from 0 to 1", [](float x) { return x >= 0 && x <= 1; }))
      ->capture_default_str();
  command->add_option("--repetition-penalty", s.repetition_penalty, "1: none")
      ->check(number<float>("a number above 0", [](float x) { return x > 0; }))
      ->capture_default_str();
  command->add_option("--seed", s.seed, "The same seed gives the same text (default: a new one)")
      ->check(seed_number())
      ->each([options](const std::string&) { options->seeded = true; });
  command->add_option("--stop", options->generate.stop, "End before this text; may be repeated")
      ->allow_extra_args(false);
}

std::unique_ptr<engine::TextModel> open_model(const char* command, TextOptions* options) {
  if (options->threads > 0) set_num_threads(options->threads);
  if (!options->seeded) {
    std::random_device device;
    options->generate.sampling.seed = device();
  }
  std::unique_ptr<engine::TextModel> model;
  const Status status = engine::TextModel::open(options->open, &model);
  if (!status.ok()) complain(command, status.message());
  return model;
}

CatchInterrupt::CatchInterrupt() {
  interrupt_seen.store(false);
  struct sigaction action {};
  action.sa_handler = note_interrupt;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, &action_before);
}

CatchInterrupt::~CatchInterrupt() { sigaction(SIGINT, &action_before, nullptr); }

bool interrupted() { return interrupt_seen.load(); }

bool reads_memory(engine::Engine& engine) {
  constexpr int64_t kCaches = int64_t{64} << 20;
  return engine.weight_bytes() > kCaches;
}

double read_bandwidth(engine::Engine& engine, double seconds) {
  constexpr int64_t kEnough = int64_t{512} << 20;  // no cache holds a large part of this
  const int64_t bytes = std::min(engine.weight_bytes() + engine.cache_bytes(), kEnough);
  return engine::bytes_per_second(engine::Traffic::kRead, bytes, num_threads(), seconds);
}

std::string figures(const engine::Generated& result, double bandwidth) {
  char text[256];
  int n = std::snprintf(text, sizeof text, "prompt %lld tokens in %.2f s",
                        static_cast<long long>(result.prompt_tokens), result.prompt_seconds);
  // The first token is chosen from the prompt's logits, so it is not in `seconds`.
  const auto steps = static_cast<double>(result.tokens.size()) - 1;
  std::string line(text, static_cast<size_t>(n));
  if (steps < 1 || result.seconds <= 0) return line;
  n = std::snprintf(text, sizeof text, "; %zu tokens, %.1f tokens/s", result.tokens.size(),
                    steps / result.seconds);
  line.append(text, static_cast<size_t>(n));
  if (bandwidth > 0) {
    const double rate = result.bytes_read / result.seconds;
    n = std::snprintf(text, sizeof text, ", %.1f GB/s (%.0f%% of the %.1f this machine reads)",
                      rate * 1e-9, 100 * rate / bandwidth, bandwidth * 1e-9);
    line.append(text, static_cast<size_t>(n));
  }
  return line;
}

}  // namespace fk::cli
