// Running a model on the CPU, as FlashKernel's C ABI. An engine serves one thread at a time.
#ifndef FLASHKERNEL_ENGINE_H_
#define FLASHKERNEL_ENGINE_H_

#include "flashkernel/model.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fk_engine fk_engine;

// `model` must outlive the engine. context: tokens to hold, 0 for the model's own. cache: NULL,
// "f16" or "f32" keys and values. quantize: NULL, or the type that float weights become ("q8_0").
FK_API fk_status fk_engine_open(const fk_model* model, int64_t context, const char* cache,
                                const char* quantize, fk_engine** engine);
FK_API void fk_engine_close(fk_engine* engine);
// JSON: context, types and bytes of the weights. Valid until fk_engine_close.
FK_API const char* fk_engine_info(const fk_engine* engine);
// Floats in a row of logits; 0 where there is no engine.
FK_API int64_t fk_engine_vocab(const fk_engine* engine);

// The logits after each of `count` tokens of a new text: count rows of vocab floats.
FK_API fk_status fk_engine_logits(fk_engine* engine, const int32_t* ids, size_t count, float* out);
// The same as one more token of the text that fk_engine_logits or this has run: one row.
FK_API fk_status fk_engine_step(fk_engine* engine, int32_t id, float* out);

typedef struct fk_sampling {
  int64_t max_tokens;
  double temperature;         // 0: always the largest logit
  int64_t top_k;              // 0: all
  double top_p;               // 1: all
  double min_p;               // 0: all
  double repetition_penalty;  // 1: none
  uint64_t seed;
  const char* const* stop;  // the text ends before the first of these
  size_t stop_count;
  int32_t ignore_eos;
  int32_t reserved;
} fk_sampling;

// Runs a prompt; fk_engine_next then gives the text piece by piece. `text` is valid until the next
// call; *more is 0 with the last piece.
FK_API fk_status fk_engine_begin(fk_engine* engine, const int32_t* prompt, size_t count,
                                 const fk_sampling* sampling);
FK_API fk_status fk_engine_next(fk_engine* engine, const char** text, size_t* bytes, int32_t* more);
// JSON: what has been written since fk_engine_begin, how it ended, and how long it took. Valid
// until the next call.
FK_API const char* fk_engine_result(fk_engine* engine);

// The file that a path or a known model's name ("smollm2") stands for. Writes at most `capacity`
// bytes; *bytes is how many there are.
FK_API fk_status fk_find_model(const char* path_or_name, char* path, size_t capacity,
                               size_t* bytes);

#ifdef __cplusplus
}
#endif

#endif  // FLASHKERNEL_ENGINE_H_
