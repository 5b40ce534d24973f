// `fk generate` continues a text with a model, and writes it while it is generated.
#include <unistd.h>

#include <cstdio>
#include <iostream>
#include <iterator>

#include "cli/terminal.h"
#include "cli/text_options.h"

namespace fk::cli {
namespace {

// Prints the text and the figures as one JSON object. `bandwidth` is in bytes per second, and 0
// where it is not known.
void print_json(const TextOptions& options, engine::TextModel& model,
                const engine::Generated& result, double bandwidth) {
  const auto steps = static_cast<double>(result.tokens.size()) - 1;
  const bool timed = steps >= 1 && result.seconds > 0;
  nlohmann::json j = {{"model", model.path()},
                      {"weights", model.engine().description()},
                      {"prompt", options.prompt},
                      {"text", result.text},
                      {"tokens", result.tokens},
                      {"end", engine::name_of(result.end)},
                      {"seed", options.generate.sampling.seed},
                      {"prompt_tokens", result.prompt_tokens},
                      {"prompt_seconds", result.prompt_seconds},
                      {"seconds", result.seconds},
                      {"tokens_per_second", timed ? steps / result.seconds : 0.0},
                      {"bytes_per_second", timed ? result.bytes_read / result.seconds : 0.0}};
  if (bandwidth > 0) {
    j["read_bandwidth"] = bandwidth;
    if (timed) j["share_of_bandwidth"] = result.bytes_read / result.seconds / bandwidth;
  }
  std::printf("%s\n", shown_json(stdout, j, 2).c_str());
}

}  // namespace

int generate(TextOptions& options) {
  if (options.prompt == "-") {
    options.prompt.assign(std::istreambuf_iterator<char>(std::cin), {});
  }
  const std::unique_ptr<engine::TextModel> model = open_model("generate", &options);
  if (model == nullptr) return 1;
  std::vector<int32_t> prompt;
  engine::Generated result;
  const CatchInterrupt catching;  // until the figures are printed
  Status status = model->encode_prompt(options.prompt, &prompt);
  if (status.ok()) {
    TextOut out;
    if (options.echo && !options.json) out.write(options.prompt);
    const auto piece = [&](std::string_view text) {
      return (options.json || out.write(text)) && !interrupted();
    };
    status = model->generate(prompt, options.generate, piece, &result);
    out.finish();
  }
  if (!status.ok()) {
    complain("generate", status.message());
    return 1;
  }
  if (std::ferror(stdout)) return 1;
  if (!options.json && isatty(STDOUT_FILENO)) TextOut().write("\n");
  const bool measured =
      (options.json || !options.quiet) && !interrupted() && reads_memory(model->engine());
  const double bandwidth = measured ? read_bandwidth(model->engine()) : 0;
  if (options.json) {
    print_json(options, *model, result, bandwidth);
  } else if (!options.quiet) {
    std::fprintf(stderr, "\n%s; seed %llu\n", figures(result, bandwidth).c_str(),
                 static_cast<unsigned long long>(options.generate.sampling.seed));
  }
  return 0;
}

}  // namespace fk::cli
