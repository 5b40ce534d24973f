// Writes text with a model: prompt in, pieces of text out.
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
  int64_t max_tokens = 256;  // fewer where the context ends
  SamplingOptions sampling;
  std::vector<std::string> stop;  // the text ends before the first of these
  bool ignore_eos = false;
};

struct Generated {
  std::string text;
  std::vector<int32_t> tokens;
  enum class End : uint8_t { kLength, kEndOfText, kStop, kCancelled, kContext } end = End::kLength;
  int64_t prompt_tokens = 0;  // those that had to be run
  double prompt_seconds = 0;
  double seconds = 0;     // of the tokens after the first
  double bytes_read = 0;  // weights and cache, by the tokens after the first
};
const char* name_of(Generated::End end);

// Text on its way out. What may be the beginning of a stop string waits until that is decided.
class StopFilter {
 public:
  explicit StopFilter(std::vector<std::string> stops = {}) : stops_(std::move(stops)) {}

  // The text that may go out now; sets stopped() where a stop string is complete.
  std::string push(std::string_view text);
  std::string finish();
  bool stopped() const { return stopped_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  bool stopped_ = false;
};

class Session {
 public:
  Session(Engine& engine, const model::Tokenizer& tokenizer)
      : engine_(engine), tokenizer_(tokenizer) {}

  // Runs `prompt`. What it shares with the tokens already run is not run again.
  Status begin(const std::vector<int32_t>& prompt, const GenerateOptions& options);
  // One more token; `text` is what can be said now, whole characters, often nothing. *more: false
  // after the last.
  Status next(std::string* text, bool* more);
  const Generated& result() const { return result_; }

  // Both of the above. `piece` takes text as it comes; false: that is enough.
  using Piece = std::function<bool(std::string_view)>;
  Status generate(const std::vector<int32_t>& prompt, const GenerateOptions& options,
                  const Piece& piece, Generated* result);

  // To be called when others have used the engine.
  void forget() { history_.clear(); }

 private:
  Status step(std::string* text, bool* more);

  Engine& engine_;
  const model::Tokenizer& tokenizer_;
  std::vector<int32_t> history_;  // tokens in the engine's cache
  GenerateOptions options_;
  std::unique_ptr<Sampler> sampler_;
  std::unique_ptr<model::TokenStream> stream_;
  StopFilter filter_;
  std::vector<float> logits_;
  bool going_ = false;
  Generated result_;
};

}  // namespace fk::engine
