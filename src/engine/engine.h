// Runs a decoder on the CPU, one sequence at a time: prompts in blocks of tokens, then token by
// token. The same results whatever the number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/status.h"
#include "model/decoder.h"

namespace fk::engine {

struct EngineOptions {
  int64_t context = 0;  // positions to hold; 0: as many as the model was made for
  enum class Cache : uint8_t { kAuto, kHalf, kFloat } cache = Cache::kAuto;
  // Float weights become this type at load (rows that are no whole blocks stay as they are).
  bool quantize = false;
  model::WeightType quantize_to = model::WeightType::kQ8_0;
};

class Engine {
 public:
  virtual ~Engine() = default;

  // Which tokens' logits `forward` writes.
  enum class Logits : uint8_t { kNone, kLast, kAll };

  // Runs `count` tokens at the positions after those already run. `logits`: vocab() floats, or
  // count rows of them.
  virtual Status forward(const int32_t* tokens, int64_t count, Logits which, float* logits) = 0;

  virtual int64_t position() const = 0;
  // Forgets what came after; position <= position().
  virtual void rewind(int64_t position) = 0;
  virtual int64_t context() const = 0;
  virtual int64_t vocab() const = 0;
  // Bytes of weights that one token reads, and of keys and values at the present position.
  virtual int64_t weight_bytes() const = 0;
  virtual int64_t cache_bytes() const = 0;
  // For people: "Q4_1 310.5 MB" and the like.
  virtual std::string description() const = 0;
};

// From the words users write: cache "auto", "f16", "f32"; quantize "" or a type ("q4_0").
Status parse_options(int64_t context, const std::string& cache, const std::string& quantize,
                     EngineOptions* options);

// The decoder (and the file behind it) must outlive the engine.
Status make_engine(const model::Decoder& decoder, const EngineOptions& options,
                   std::unique_ptr<Engine>* engine);

}  // namespace fk::engine
