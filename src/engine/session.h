// Generates text with an engine: takes a prompt's tokens and gives back the text piece by piece.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "engine/engine.h"
#include "engine/sampler.h"
#include "model/tokenizer.h"

namespace fk::engine {

struct GenerateOptions {
  int64_t max_tokens = 256;  // there are fewer where the context is full before
  SamplingOptions sampling;
  std::vector<std::string> stop;  // the text ends before the first of these
  bool ignore_eos = false;        // goes on after a token that ends a text
};

// Holds what a session has generated so far.
struct Generated {
  std::string text;
  std::vector<int32_t> tokens;
  // Says why the text ended: kCancelled where the caller's function wanted no more.
  enum class End : uint8_t { kLength, kEndOfText, kStop, kCancelled, kContext } end = End::kLength;
  int64_t prompt_tokens = 0;  // how many of the prompt's tokens had to run
  double prompt_seconds = 0;  // how long they took
  double seconds = 0;         // how long the tokens after the first took
  double bytes_read = 0;      // the bytes of weights and cache that those tokens read
};
// Names an end for users, such as "end of text".
const char* name_of(Generated::End end);

// Lets text through up to the first stop string. Text that may be the beginning of a stop string is
// held back until what follows decides it.
class StopFilter {
 public:
  explicit StopFilter(std::vector<std::string> stops = {}) : stops_(std::move(stops)) {}

  // Takes the next text and returns what may go out now. If a stop string is complete, stopped()
  // becomes true and nothing more may be pushed.
  std::string push(std::string_view text);
  // Returns what is still held back, once no more text will come.
  std::string finish();
  bool stopped() const { return stopped_; }

 private:
  std::vector<std::string> stops_;
  std::string held_back_;  // the text held back
  bool stopped_ = false;
};

// Generates texts one after the other on one engine. The engine and the tokenizer must outlive it.
class Session {
 public:
  Session(Engine& engine, const model::Tokenizer& tokenizer)
      : engine_(engine), tokenizer_(tokenizer) {}

  // Starts a text: runs `prompt`, except for the beginning that it shares with the tokens already
  // in the engine's cache.
  Status begin(const std::vector<int32_t>& prompt, const GenerateOptions& options);
  // Generates one more token. Sets `text` to what can be shown now, in whole characters and often
  // empty, and *more to whether there are tokens after this one.
  Status next(std::string* text, bool* more);
  const Generated& result() const { return result_; }

  // Does all of it: `begin`, then `next` until the end. `piece` is called with each text as it
  // comes and returns false to cancel; it may be empty.
  using Piece = std::function<bool(std::string_view)>;
  Status generate(const std::vector<int32_t>& prompt, const GenerateOptions& options,
                  const Piece& piece, Generated* result);

  // Makes the session forget which tokens the engine's cache holds. Whoever runs the engine
  // directly must call this, or the next prompt would reuse a cache that is not its own.
  void forget() { history_.clear(); }

 private:
  // Does the work of `next`: chooses a token, unless the text ends, and sets *more.
  Status step(std::string* text, bool* more);

  Engine& engine_;
  const model::Tokenizer& tokenizer_;
  std::vector<int32_t> history_;  // tokens in the engine's cache
  GenerateOptions options_;
  std::unique_ptr<Sampler> sampler_;
  std::unique_ptr<model::TokenStream> stream_;
  StopFilter filter_;
  std::vector<float> logits_;
  bool going_ = false;  // `next` has something to do
  Generated result_;
};

}  // namespace fk::engine
