// fk: what this build is, whether it is right, how fast it is.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstring>

#include "cli/commands.h"
#include "flashkernel/abi.h"

int main(int argc, char** argv) {
  // `fk bench` has its options, --help too, from the Python module it starts.
  if (argc > 1 && std::strcmp(argv[1], "bench") == 0) return fk::cli::bench(argv + 2);

  CLI::App app("Fused kernels for sequence models, on any CPU and on NVIDIA GPUs.", "fk");
  app.set_version_flag("--version", std::string("fk ") + fk_version());
  app.require_subcommand(1);
  app.failure_message(CLI::FailureMessage::simple);

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
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  check->add_option("--seed", options.seed, "Seed of the random calls")->capture_default_str();

  app.add_subcommand("bench",
                     "Measures the ops beside the peers that are installed (needs Python)");

  if (argc > 1 && argv[1][0] != '-') {
    const auto named = [&](const CLI::App* command) { return command->check_name(argv[1]); };
    if (app.get_subcommands(named).empty()) {
      std::fprintf(stderr, "fk: expected info, check or bench, got %s; fk --help says more\n",
                   argv[1]);
      return 2;
    }
  }
  CLI11_PARSE(app, argc, argv);
  return info->parsed() ? fk::cli::info(json) : fk::cli::check(options);
}
