// This file declares what `fk generate`, `fk chat` and `fk bench decode` have in common: their
// options, Ctrl-C, and the line of figures.
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
  std::string system;  // of chat: the system message
  std::string mode = "auto";
  int threads = 0;      // 0: as many as the machine has
  bool seeded = false;  // the user gave a seed
  bool json = false;    // write JSON instead of text
  bool echo = false;    // of generate: write the prompt too
  bool quiet = false;   // write no figures to stderr
};

// Checks for options with numbers: a whole number from `least` up, and any 64-bit seed. CLI11's own
// checks let NaN pass, turn an integer that is too large into the largest there is, and write a
// missing bound with 300 digits.
CLI::Validator whole_number(int64_t least);
CLI::Validator seed_number();

// Reads the arguments into the options. Returns false if the program should end with *code: the
// arguments asked for help, which was written, or were wrong, which was said on stderr.
bool parse(CLI::App* app, int argc, char** argv, int* code);

// These give a command the options that select a model, and those that say how text is generated.
void add_model_options(CLI::App* command, TextOptions* options);
void add_sampling_options(CLI::App* command, TextOptions* options);

// Sets the number of threads and the seed, and opens the model. Returns null if that failed, after
// saying why on stderr; `command` is named there.
std::unique_ptr<engine::TextModel> open_model(const char* command, TextOptions* options);

// While an object of this class lives, Ctrl-C makes interrupted() true and does nothing else. There
// may be one at a time.
class CatchInterrupt {
 public:
  CatchInterrupt();
  ~CatchInterrupt();
};
bool interrupted();

// Describes a generated text's figures, such as "prompt 12 tokens in 0.01 s; 64 tokens, 281.9
// tokens/s, 31.0 GB/s (91% of the 34.0 this machine reads)". `bandwidth` is what the machine reads
// in bytes per second; 0: not known.
std::string figures(const engine::Generated& result, double bandwidth);
// Returns whether the weights are too large for the caches, so that each token reads them from
// memory and the bandwidth means something.
bool reads_memory(engine::Engine& engine);
// Measures, for about `seconds`, how many bytes per second this machine's threads read from as much
// memory as a token reads. The amount matters, because memory that partly fits the caches is read
// faster.
double read_bandwidth(engine::Engine& engine, double seconds = 0.2);

// These are the commands; each returns the exit code.
int generate(TextOptions& options);
int chat(TextOptions& options);
// `arguments` begin with "decode"; a null ends them.
int bench_decode(int count, char** arguments);
// `fk pull` fetches a model. `arguments` are those after "pull"; a null ends them.
int pull(char** arguments);

}  // namespace fk::cli
