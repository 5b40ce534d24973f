// `fk generate`, `fk chat` and `fk bench decode` share this: options, Ctrl-C, the line of figures.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <string_view>

#include "engine/text_model.h"

namespace fk::cli {

struct TextOptions {
  engine::OpenOptions open;
  engine::GenerateOptions generate;
  std::string prompt;
  std::string system;  // chat: what the model is told first
  std::string mode = "auto";
  int threads = 0;  // 0: as many as the machine has
  bool seeded = false;
  bool json = false;
  bool echo = false;
  bool quiet = false;
};

// Checks what options with numbers are given. CLI11's own checks let NaN pass, take an integer that
// is too large for the largest there is, and spell a missing bound in 300 digits.
CLI::Validator whole_number(int64_t least);
CLI::Validator seed_number();

// Returns false where `argv` asked for help, which was written, or is wrong, which was said. *code
// is the exit code then.
bool parse(CLI::App* app, int argc, char** argv, int* code);

void add_model_options(CLI::App* command, TextOptions* options);
void add_sampling_options(CLI::App* command, TextOptions* options);

// Sets the threads and the seed, and opens the model; says on stderr what went wrong.
std::unique_ptr<engine::TextModel> open_model(const char* command, TextOptions* options);

// Ctrl-C while one of these lives sets interrupted() and does nothing else.
class CatchInterrupt {
 public:
  CatchInterrupt();
  ~CatchInterrupt();
};
bool interrupted();

// Writes "prompt 12 tokens in 0.01 s; 64 tokens, 281.9 tokens/s, 31.0 GB/s (91% of 34.0)".
// `bandwidth` is what the machine reads a second, or 0 where that is not known.
std::string figures(const engine::Generated& result, double bandwidth);
// Tells whether weights fit the caches, and so say nothing about memory.
bool reads_memory(engine::Engine& engine);
// Measures the bytes a second that this machine's threads read of as much memory as a token reads,
// for about so many seconds. Of what partly fits the caches they read more.
double read_bandwidth(engine::Engine& engine, double seconds = 0.2);

int generate(TextOptions& options);
int chat(TextOptions& options);
// `arguments` are what stands after "bench decode" on the command line, ended by NULL.
int bench_decode(int count, char** arguments);
// `arguments` are what stands after "pull" on the command line, ended by NULL.
int pull(char** arguments);

}  // namespace fk::cli
