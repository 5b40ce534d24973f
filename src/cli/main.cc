// This is the `fk` program: it tells what this build is, checks that its results are right,
// measures how fast it is, and generates text with models. This file reads the command line and
// calls the command.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstring>

#include "cli/commands.h"
#include "cli/terminal.h"
#include "cli/text_options.h"
#include "flashkernel/abi.h"

namespace {

int run(int argc, char** argv) {
  const auto is = [&](int i, const char* word) {
    return argc > i && std::strcmp(argv[i], word) == 0;
  };
  if (is(1, "bench") && is(2, "decode")) return fk::cli::bench_decode(argc - 2, argv + 2);
  // The Python modules behind these two read the options themselves, --help among them.
  if (is(1, "bench")) return fk::cli::bench(argv + 2);
  if (is(1, "pull")) return fk::cli::pull(argv + 2);

  CLI::App app("Fused kernels for sequence models, on any CPU and on NVIDIA GPUs.", "fk");
  app.set_version_flag("--version", std::string("fk ") + fk_version());
  app.require_subcommand(1);

  bool json = false;
  CLI::App* info = app.add_subcommand(
      "info", "Version, build, CPU, GPUs, and which implementation each op takes");
  info->add_flag("--json", json, "The build and the machine as JSON");

  fk::cli::CheckOptions options;
  CLI::App* check = app.add_subcommand(
      "check", "Runs every op against its reference; exit code 1 where one is wrong");
  check->add_option("OP", options.op, "One op, such as softmax or softmax_bwd (default: every op)");
  check->add_option("--device", options.device, "cpu or cuda (default: each that is here)")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  check->add_option("--samples", options.samples, "Random calls per op and dtype")
      ->check(fk::cli::whole_number(1))
      ->capture_default_str();
  check->add_option("--seed", options.seed, "Seed of the random calls")
      ->check(fk::cli::seed_number())
      ->capture_default_str();

  fk::cli::TextOptions text;
  CLI::App* generate = app.add_subcommand("generate", "Writes text with a model");
  fk::cli::add_model_options(generate, &text);
  fk::cli::add_sampling_options(generate, &text);
  generate->add_option("-p,--prompt", text.prompt, "The text to continue; - reads it from stdin");
  generate->add_flag("--echo", text.echo, "Write the prompt, too");
  CLI::App* chat = app.add_subcommand("chat", "A conversation with a model");
  fk::cli::add_model_options(chat, &text);
  chat->get_option("MODEL")->description(
      "A Hugging Face folder, a .safetensors or .gguf file, or a name; with a chat template: "
      "fk pull smollm2 && fk chat smollm2");
  fk::cli::add_sampling_options(chat, &text);
  chat->add_option("-p,--prompt", text.prompt, "One question; then end");
  chat->add_option("--system", text.system, "What the model is told first");

  app.add_subcommand("bench",
                     "Measures the ops beside the peers that are installed (needs Python); "
                     "`fk bench decode MODEL` a model");
  app.add_subcommand("pull", "Fetches a known model into the cache: smollm2 (needs Python)");

  if (argc < 2) {
    std::fputs(app.help().c_str(), stderr);
    return 2;
  }
  if (argv[1][0] != '-') {
    const auto named = [&](const CLI::App* command) { return command->check_name(argv[1]); };
    if (app.get_subcommands(named).empty()) {
      const std::string got = fk::cli::shown(stderr, argv[1]);
      std::fprintf(stderr,
                   "fk: expected info, check, generate, chat, bench or pull, got %s; fk --help "
                   "says more\n",
                   got.c_str());
      return 2;
    }
  }
  int code = 0;
  if (!fk::cli::parse(&app, argc, argv, &code)) return code;
  if (generate->parsed()) return fk::cli::generate(text);
  if (chat->parsed()) return fk::cli::chat(text);
  return info->parsed() ? fk::cli::info(json) : fk::cli::check(options);
}

}  // namespace

int main(int argc, char** argv) {
  const int code = fk::cli::to_the_end([&] { return run(argc, argv); });
  const bool written = std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
  if (written) return code;
  std::fputs("fk: the output could not be written in full\n", stderr);
  return code == 0 ? 1 : code;
}
