// `fk bench decode` measures a model's tokens per second, for the prompt and for generation, beside
// the memory's bandwidth and llama.cpp. Each round measures all of them one after the other, so
// that a machine that changes its pace changes it for all.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "cli/busy.h"
#include "cli/result_file.h"
#include "cli/terminal.h"
#include "cli/text_options.h"
#include "core/thread_pool.h"
#include "cpu/targets.h"
#include "engine/sampler.h"
#include "model/json.h"

namespace fk::cli {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct BenchOptions {
  int64_t prompt = 512;  // tokens in the prompt
  int64_t tokens = 64;   // tokens to generate
  int repeats = 5;       // rounds
  std::string peer;      // the path of llama.cpp's llama-bench; empty: none
  std::string json;      // the result file to write; empty: none
};

// Holds what was measured. The vectors have one entry per round.
struct Measured {
  std::vector<double> prompt_seconds;  // for the whole prompt
  std::vector<double> token_seconds;   // for one token, on average
  double bandwidth = 0;                // bytes per second, the best of those measured in all rounds
  std::vector<double> first_token;     // seconds from the start of a process of its own
  std::vector<double> peer_prompt_seconds, peer_token_seconds;
  std::string peer_version;
  double bytes = 0;  // that one token reads, on average
  BusyWatch::Seen busy;

  // Returns the share of the bandwidth that each round reached. Disturbances only ever lower a
  // measured bandwidth, so every round is compared with the best of the whole run.
  std::vector<double> shares() const {
    std::vector<double> result;
    for (const double seconds : token_seconds) {
      result.push_back(bandwidth > 0 ? bytes / seconds / bandwidth : 0);
    }
    return result;
  }
};

// Runs a prompt of `length` arbitrary tokens from an empty context.
Status run_prompt(engine::Engine& engine, int64_t length, double* seconds) {
  std::vector<int32_t> prompt(static_cast<size_t>(length));
  for (size_t i = 0; i < prompt.size(); ++i) {
    prompt[i] = static_cast<int32_t>((i * 7919 + 13) % static_cast<size_t>(engine.vocab()));
  }
  std::vector<float> logits(static_cast<size_t>(engine.vocab()));
  engine.rewind(0);
  const auto start = Clock::now();
  FK_RETURN_IF_ERROR(
      engine.forward(prompt.data(), length, engine::Engine::Logits::kLast, logits.data()));
  *seconds = seconds_since(start);
  return {};
}

// Generates `count` tokens from an empty context, always the likeliest. Sets *seconds and *bytes to
// what one token takes and reads on average.
Status run_tokens(engine::Engine& engine, int64_t count, double* seconds, double* bytes) {
  std::vector<float> logits(static_cast<size_t>(engine.vocab()));
  engine.rewind(0);
  int32_t token = 1;
  double all = 0;
  const auto start = Clock::now();
  for (int64_t i = 0; i < count; ++i) {
    FK_RETURN_IF_ERROR(engine.forward(&token, 1, engine::Engine::Logits::kLast, logits.data()));
    token = engine::likeliest(logits.data(), engine.vocab());
    all += static_cast<double>(engine.weight_bytes() + engine.cache_bytes());
  }
  *seconds = seconds_since(start) / static_cast<double>(count);
  *bytes = all / static_cast<double>(count);
  return {};
}

// Runs `fk generate` in a process of its own. Returns the seconds from its start to its first piece
// of text, or 0 if it wrote none.
double time_first_token(const TextOptions& options) {
  const std::string threads = std::to_string(num_threads());
  std::vector<const char*> line = {"fk",
                                   "generate",
                                   "-n",
                                   "1",
                                   "-q",
                                   "--temp",
                                   "0",
                                   "--threads",
                                   threads.c_str(),
                                   "--tokenizer",
                                   options.open.tokenizer.c_str()};
  if (options.open.tokenizer.empty()) line.resize(line.size() - 2);
  if (!options.open.model.empty()) line.push_back(options.open.model.c_str());
  line.push_back(nullptr);
  int ends[2];
  if (pipe(ends) != 0) return 0;
  const auto start = Clock::now();
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDOUT_FILENO);
    execv("/proc/self/exe", const_cast<char* const*>(line.data()));
    _exit(1);
  }
  close(ends[1]);
  char byte;
  const bool came = child > 0 && read(ends[0], &byte, 1) == 1;
  const double took = seconds_since(start);
  close(ends[0]);
  if (child > 0) waitpid(child, nullptr, 0);
  return came ? took : 0;
}

// Quotes a text for the shell.
std::string shell_word(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

// Runs one round of llama-bench, which warms up by itself, on the same file with as many threads,
// and adds its times to *out.
Status run_peer(const BenchOptions& bench, const std::string& model, Measured* out) {
  const std::string command = shell_word(bench.peer) + " -m " + shell_word(model) + " -t " +
                              std::to_string(num_threads()) + " -p " +
                              std::to_string(bench.prompt) + " -n " + std::to_string(bench.tokens) +
                              " -r 1 -o json 2>/dev/null";
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
  double prompt = 0, decode = 0;  // in tokens per second
  if (status == 0 && rows.is_array()) {
    for (const nlohmann::json& row : rows) {
      (row.value("n_prompt", 0) > 0 ? prompt : decode) = row.value("avg_ts", 0.0);
      out->peer_version = row.value("build_commit", "");
    }
  }
  if (prompt <= 0 || decode <= 0) {
    return invalid("peer: expected llama.cpp's llama-bench, and " + bench.peer +
                   " gave no figures for " + model);
  }
  out->peer_prompt_seconds.push_back(static_cast<double>(bench.prompt) / prompt);
  out->peer_token_seconds.push_back(1 / decode);
  return {};
}

// Runs all rounds. Fails if the model or the peer does.
Status measure(engine::TextModel& model, const TextOptions& options, const BenchOptions& bench,
               Measured* out) {
  engine::Engine& engine = model.engine();
  constexpr double kBandwidthSeconds = 0.1;
  const BusyWatch watch(num_threads());
  const bool terminal = isatty(STDERR_FILENO);
  for (int r = -1; r < bench.repeats; ++r) {  // the first round warms up
    if (terminal) std::fprintf(stderr, "\rround %d of %d\x1b[K", r + 1, bench.repeats);
    double prompt = 0, token = 0;
    FK_RETURN_IF_ERROR(run_prompt(engine, bench.prompt, &prompt));
    // The bandwidth is measured with as much in the cache as the tokens below read on average.
    engine.rewind(std::min(engine.position(), bench.tokens / 2));
    out->bandwidth = std::max(out->bandwidth, read_bandwidth(engine, kBandwidthSeconds));
    FK_RETURN_IF_ERROR(run_tokens(engine, bench.tokens, &token, &out->bytes));
    out->bandwidth = std::max(out->bandwidth, read_bandwidth(engine, kBandwidthSeconds));
    if (r < 0) continue;
    out->prompt_seconds.push_back(prompt);
    out->token_seconds.push_back(token);
    if (model.tokenizer() != nullptr) {
      if (const double first = time_first_token(options); first > 0) {
        out->first_token.push_back(first);
      }
    }
    if (!bench.peer.empty()) FK_RETURN_IF_ERROR(run_peer(bench, model.path(), out));
  }
  out->busy = watch.seen();
  if (terminal) std::fprintf(stderr, "\r\x1b[K");
  return {};
}

// Returns the value with six digits after the point.
nlohmann::json rounded(double value) { return std::stod(std::to_string(value)); }

// Returns the rows of a result file: one for the prompt, one for generation, and one for the first
// token if it was measured.
nlohmann::json rows_of(engine::TextModel& model, const BenchOptions& bench, const Measured& m) {
  std::string name = model.path();
  name = name.substr(name.rfind('/') + 1);  // the whole path if it has no slash
  const auto row = [&](const char* op, const char* unit, int64_t count,
                       const std::vector<double>& ours, const std::vector<double>& theirs) {
    nlohmann::json j = {{"op", op},
                        {"case",
                         {{"model", name},
                          {"dtype", model.engine().description()},
                          {"threads", num_threads()},
                          {"target", cpu::active_target()}}},
                        {"impl", "cpu"},
                        {"warmup", 1},
                        {"iterations", bench.repeats},
                        {"ms", milliseconds(ours)},
                        {"peers", nlohmann::json::object()}};
    if (unit != nullptr) j["case"][unit] = count;
    add_to(m.busy, &j);
    if (!theirs.empty()) {
      j["peers"]["llama.cpp"] = {{"ms", milliseconds(theirs)}, {"version", m.peer_version}};
      j["ratio_to_best_peer"] = rounded(median(theirs) / median(ours));
    }
    return j;
  };
  nlohmann::json rows;
  rows.push_back(row("prefill", "prompt", bench.prompt, m.prompt_seconds, m.peer_prompt_seconds));
  rows.back()["tokens_per_second"] =
      rounded(static_cast<double>(bench.prompt) / median(m.prompt_seconds));
  rows.push_back(row("decode", "tokens", bench.tokens, m.token_seconds, m.peer_token_seconds));
  const double rate = m.bytes / median(m.token_seconds);
  rows.back()["tokens_per_second"] = rounded(1 / median(m.token_seconds));
  rows.back()["tbps"] = rounded(rate * 1e-12);
  rows.back()["bytes_per_token"] = m.bytes;
  rows.back()["read_tbps"] = rounded(m.bandwidth * 1e-12);
  rows.back()["percent_of_ceiling"] = rounded(100 * median(m.shares()));
  if (!m.first_token.empty()) {
    rows.push_back(row("first_token", nullptr, 0, m.first_token, {}));
  }
  return rows;
}

// Prints one JSON object for programs.
void print_json(engine::TextModel& model, const BenchOptions& bench, const Measured& m) {
  const double prompt = static_cast<double>(bench.prompt) / median(m.prompt_seconds);
  const double decode = 1 / median(m.token_seconds);
  nlohmann::json j = {{"model", model.path()},
                      {"weights", model.engine().description()},
                      {"threads", num_threads()},
                      {"target", cpu::active_target()},
                      {"prompt_tokens", bench.prompt},
                      {"prompt_tokens_per_second", prompt},
                      {"tokens", bench.tokens},
                      {"tokens_per_second", decode},
                      {"prompt_seconds", m.prompt_seconds},
                      {"token_seconds", m.token_seconds},
                      {"bytes_per_token", m.bytes},
                      {"bytes_per_second", m.bytes * decode},
                      {"read_bandwidth", m.bandwidth},
                      {"share_of_bandwidth", median(m.shares())},
                      {"shares_of_bandwidth", m.shares()}};
  add_to(m.busy, &j);
  if (!m.first_token.empty()) j["first_token_seconds"] = median(m.first_token);
  if (!m.peer_token_seconds.empty()) {
    const double their_prompt = static_cast<double>(bench.prompt) / median(m.peer_prompt_seconds);
    const double their_decode = 1 / median(m.peer_token_seconds);
    j["peers"]["llama.cpp"] = {{"prompt_tokens_per_second", their_prompt},
                               {"tokens_per_second", their_decode},
                               {"version", m.peer_version}};
    j["ratio_to_best_peer"] = {{"prompt", prompt / their_prompt},
                               {"decode", decode / their_decode}};
  }
  std::printf("%s\n", shown_json(stdout, j, 2).c_str());
}

// Prints a few lines for people.
void print_text(engine::TextModel& model, const BenchOptions& bench, const Measured& m) {
  const double prompt = static_cast<double>(bench.prompt) / median(m.prompt_seconds);
  const double decode = 1 / median(m.token_seconds);
  std::printf("%s\n%s; %d threads, %s; medians of %d rounds after one to warm up\n",
              shown(stdout, model.path()).c_str(), model.engine().description().c_str(),
              num_threads(), cpu::active_target(), bench.repeats);
  const auto line = [&](const std::string& what, double rate) {
    std::printf("%-18s %10.1f tokens/s", what.c_str(), rate);
  };
  line("prompt of " + std::to_string(bench.prompt), prompt);
  std::printf("\n");
  line("decode, " + std::to_string(bench.tokens), decode);
  std::printf(", %.1f GB/s, %.0f%% of the %.1f this machine reads\n", m.bytes * decode * 1e-9,
              100 * median(m.shares()), m.bandwidth * 1e-9);
  if (!m.first_token.empty()) {
    std::printf("%-18s %10.3f s from the start of a process\n", "first token",
                median(m.first_token));
  }
  if (const std::string said = describe(m.busy); !said.empty()) std::printf("%s\n", said.c_str());
  if (m.peer_token_seconds.empty()) return;
  const double their_prompt = static_cast<double>(bench.prompt) / median(m.peer_prompt_seconds);
  const double their_decode = 1 / median(m.peer_token_seconds);
  line("llama.cpp, prompt", their_prompt);
  std::printf("; we are %.2fx as fast\n", prompt / their_prompt);
  line("llama.cpp, decode", their_decode);
  std::printf("; we are %.2fx as fast\n", decode / their_decode);
}

}  // namespace

int bench_decode(int count, char** arguments) {
  TextOptions options;
  BenchOptions bench;
  CLI::App app("Tokens a second of a model, and the share of the memory's bandwidth",
               "fk bench decode");
  add_model_options(&app, &options);
  app.remove_option(app.get_option("--json"));
  const CLI::Option* json =
      app.add_option("--json", bench.json,
                     "One JSON object instead of text; with a name that ends in .json: rows for "
                     "that result file")
          ->expected(0, 1)
          ->check(CLI::Validator(
              [](std::string& name) {
                const bool good =
                    name.empty() || (name.size() > 5 && name.substr(name.size() - 5) == ".json");
                return good ? std::string() : "expected a name that ends in .json, got " + name;
              },
              "FILE"));
  app.add_option("--prompt", bench.prompt, "Tokens of the prompt")
      ->check(whole_number(1))
      ->capture_default_str();
  app.add_option("-n,--tokens", bench.tokens, "Tokens to write")
      ->check(whole_number(1))
      ->capture_default_str();
  app.add_option("--repeats", bench.repeats, "Rounds; medians are reported")
      ->check(whole_number(1))
      ->capture_default_str();
  app.add_option("--peer", bench.peer,
                 "llama.cpp's llama-bench, to run on the same file in every round")
      ->check(CLI::Validator(
          [](std::string& name) {
            const std::string find = "command -v " + shell_word(name) + " >/dev/null 2>&1";
            return std::system(find.c_str()) == 0 ? std::string()
                                                  : "expected a program, found no " + name;
          },
          ""));
  app.get_option("MODEL")->description(
      "A model, or a Hugging Face config.json (weights are then made up)");
  int code = 0;
  if (!parse(&app, count, arguments, &code)) return code;

  options.open.need_tokenizer = false;
  options.open.make_up_weights = true;
  const std::unique_ptr<engine::TextModel> model = open_model("bench decode", &options);
  if (model == nullptr) return 1;
  bench.prompt = std::min(bench.prompt, model->engine().context());
  bench.tokens = std::min(bench.tokens, model->engine().context());
  Measured measured;
  Status status = measure(*model, options, bench, &measured);
  if (status.ok() && !bench.json.empty()) {
    const nlohmann::json method = {
        {"warmup", 1},
        {"iterations", bench.repeats},
        {"timer", "steady_clock, in turns with the peer and with passes over as much memory"}};
    status = write_results(bench.json, method, rows_of(*model, bench, measured));
  }
  if (!status.ok()) {
    complain("bench decode", status.message());
    return 1;
  }
  if (json->count() > 0 && bench.json.empty()) {
    print_json(*model, bench, measured);
  } else {
    print_text(*model, bench, measured);
  }
  return 0;
}

}  // namespace fk::cli
