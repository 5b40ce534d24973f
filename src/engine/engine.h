// This file declares the interface of an engine, which runs a decoder-only model on one sequence at
// a time: a prompt in blocks of tokens, then token by token. Results do not depend on the number of
// threads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/status.h"
#include "model/decoder.h"

namespace fk::engine {

struct EngineOptions {
  int64_t context = 0;  // how many positions to hold; 0: as many as the model was made for
  enum class Cache : uint8_t { kAuto, kHalf, kFloat } cache = Cache::kAuto;
  // If `quantize`, float weights become `quantize_to` at load; a matrix whose rows are not whole
  // blocks of that type stays as it is.
  bool quantize = false;
  model::WeightType quantize_to = model::WeightType::kQ8_0;
};

class Engine {
 public:
  virtual ~Engine() = default;

  // Selects the tokens whose logits `forward` writes.
  enum class Logits : uint8_t { kNone, kLast, kAll };

  // Runs `count` tokens at the positions after those already run. `logits` is the caller's room for
  // vocab() floats (kLast) or for count rows of them (kAll); kNone does not touch it. After an
  // error the position may have moved: rewind before going on.
  virtual Status forward(const int32_t* tokens, int64_t count, Logits which, float* logits) = 0;

  // Returns how many tokens the cache holds, which is the position of the next one.
  virtual int64_t position() const = 0;
  // Forgets the tokens from `position` on, which is at most position().
  virtual void rewind(int64_t position) = 0;
  // Returns how many positions the cache can hold.
  virtual int64_t context() const = 0;
  // Returns how many logits a token has.
  virtual int64_t vocab() const = 0;
  // These return the bytes of weights that running one token reads, and those of the keys and
  // values that it would read at the present position.
  virtual int64_t weight_bytes() const = 0;
  virtual int64_t cache_bytes() const = 0;
  // Tells people the weights' types and sizes, such as "Q4_1 310.5 MB".
  virtual std::string description() const = 0;
};

// Sets `options` from the words that users write: `cache` is "auto", "f16" or "f32"; `quantize` is
// "" or a type such as "q4_0". An error names the argument.
Status parse_options(int64_t context, const std::string& cache, const std::string& quantize,
                     EngineOptions* options);

// Makes an engine for `decoder`. The decoder, and the file that its weights point into, must
// outlive the engine.
Status make_engine(const model::Decoder& decoder, const EngineOptions& options,
                   std::unique_ptr<Engine>* engine);

}  // namespace fk::engine
