// This file holds the C functions of flashkernel/engine.h: they check arguments, call the engine
// and the session, and turn errors and exceptions into status codes.
#include "model/c_api.h"

#include <algorithm>
#include <limits>
#include <sstream>

#include "core/json_text.h"
#include "core/last_error.h"
#include "engine/known_models.h"
#include "engine/session.h"
#include "flashkernel/engine.h"

struct fk_engine {
  std::unique_ptr<fk::engine::Engine> engine;
  std::unique_ptr<fk::engine::Session> session;  // null where the model has no tokenizer
  // These are the texts that fk_engine_info, fk_engine_next and fk_engine_result return pointers
  // to.
  std::string info, piece, result;
};

namespace {

using fk::guarded;
using fk::invalid;
using fk::null;
using fk::Status;
using fk::engine::Engine;
using fk::engine::EngineOptions;

constexpr double kMostFloat = std::numeric_limits<float>::max();

// Returns an error that names the first field of `s` whose value is out of range. The comparisons
// are written so that NaN fails them.
Status check_sampling(const fk_sampling& s) {
  const auto fail = [](const char* name, const char* expected, auto got) {
    std::ostringstream text;
    text << name << ": expected " << expected << ", got " << got;
    return invalid(text.str());
  };
  if (s.max_tokens < 0) return fail("max_tokens", "0 or more", s.max_tokens);
  if (!(s.temperature >= 0 && s.temperature <= kMostFloat)) {
    return fail("temperature", "0 or more", s.temperature);
  }
  if (s.top_k < 0) return fail("top_k", "0 or more", s.top_k);
  if (!(s.top_p > 0 && s.top_p <= 1)) return fail("top_p", "above 0, at most 1", s.top_p);
  if (!(s.min_p >= 0 && s.min_p <= 1)) return fail("min_p", "from 0 to 1", s.min_p);
  if (!(s.repetition_penalty > 0 && s.repetition_penalty <= kMostFloat)) {
    return fail("repetition_penalty", "more than 0", s.repetition_penalty);
  }
  if (s.stop_count > 0 && s.stop == nullptr) return null("stop");
  for (size_t i = 0; i < s.stop_count; ++i) {
    if (s.stop[i] == nullptr) return null(("stop " + std::to_string(i)).c_str());
  }
  return {};
}

// Checks the ids' pointer and their number. A count above the context cannot succeed, and is
// refused before any id is read: `ids` may not have that many. `name` is the parameter in the
// message.
Status check_tokens(const fk_engine* engine, const char* name, const int32_t* ids, size_t count) {
  if (engine == nullptr) return null("engine");
  if (count > 0 && ids == nullptr) return null(name);
  if (count <= static_cast<size_t>(engine->engine->context())) return {};
  return invalid(std::string(name) + ": expected at most " +
                 std::to_string(engine->engine->context()) +
                 " tokens, as many as the context holds, got " + std::to_string(count));
}

}  // namespace

extern "C" {

fk_status fk_engine_open(const fk_model* model, int64_t context, const char* cache,
                         const char* quantize, fk_engine** engine) {
  return guarded("load", [&]() -> Status {
    if (model == nullptr) return null("model");
    if (engine == nullptr) return null("engine");
    EngineOptions options;
    FK_RETURN_IF_ERROR(fk::engine::parse_options(context, cache == nullptr ? "auto" : cache,
                                                 quantize == nullptr ? "" : quantize, &options));
    auto made = std::make_unique<fk_engine>();
    FK_RETURN_IF_ERROR(fk::engine::make_engine(model->model.decoder, options, &made->engine));
    if (model->model.tokenizer != nullptr) {
      made->session = std::make_unique<fk::engine::Session>(*made->engine, *model->model.tokenizer);
    }
    made->info = fk::JsonObject()
                     .add("context", made->engine->context())
                     .add("weights", made->engine->description())
                     .add("weight_bytes", made->engine->weight_bytes())
                     .text();
    *engine = made.release();
    return {};
  });
}

void fk_engine_close(fk_engine* engine) { delete engine; }

const char* fk_engine_info(const fk_engine* engine) {
  return engine == nullptr ? "" : engine->info.c_str();
}

int64_t fk_engine_vocab(const fk_engine* engine) {
  return engine == nullptr ? 0 : engine->engine->vocab();
}

fk_status fk_engine_logits(fk_engine* engine, const int32_t* ids, size_t count, float* out) {
  return guarded("logits", [&]() -> Status {
    FK_RETURN_IF_ERROR(check_tokens(engine, "token_ids", ids, count));
    if (count > 0 && out == nullptr) return null("out");
    if (engine->session != nullptr) engine->session->forget();
    engine->engine->rewind(0);
    return engine->engine->forward(ids, static_cast<int64_t>(count), Engine::Logits::kAll, out);
  });
}

fk_status fk_engine_step(fk_engine* engine, int32_t id, float* out) {
  return guarded("step", [&]() -> Status {
    if (engine == nullptr) return null("engine");
    if (out == nullptr) return null("out");
    if (engine->session != nullptr) engine->session->forget();
    return engine->engine->forward(&id, 1, Engine::Logits::kLast, out);
  });
}

fk_status fk_engine_begin(fk_engine* engine, const int32_t* prompt, size_t count,
                          const fk_sampling* sampling) {
  return guarded("generate", [&]() -> Status {
    FK_RETURN_IF_ERROR(check_tokens(engine, "prompt", prompt, count));
    if (sampling == nullptr) return null("sampling");
    if (engine->session == nullptr) return invalid("the model has no tokenizer");
    FK_RETURN_IF_ERROR(check_sampling(*sampling));
    fk::engine::GenerateOptions options;
    options.max_tokens = sampling->max_tokens;
    options.ignore_eos = sampling->ignore_eos != 0;
    options.sampling.temperature = static_cast<float>(sampling->temperature);
    options.sampling.top_k = sampling->top_k;
    options.sampling.top_p = static_cast<float>(sampling->top_p);
    options.sampling.min_p = static_cast<float>(sampling->min_p);
    options.sampling.repetition_penalty = static_cast<float>(sampling->repetition_penalty);
    options.sampling.seed = sampling->seed;
    for (size_t i = 0; i < sampling->stop_count; ++i) options.stop.push_back(sampling->stop[i]);
    return engine->session->begin({prompt, prompt + count}, options);
  });
}

fk_status fk_engine_next(fk_engine* engine, const char** text, size_t* bytes, int32_t* more) {
  return guarded("generate", [&]() -> Status {
    if (engine == nullptr) return null("engine");
    if (engine->session == nullptr) return invalid("the model has no tokenizer");
    if (text == nullptr || bytes == nullptr || more == nullptr) return null("output");
    bool going = false;
    FK_RETURN_IF_ERROR(engine->session->next(&engine->piece, &going));
    *text = engine->piece.data();
    *bytes = engine->piece.size();
    *more = going ? 1 : 0;
    return {};
  });
}

const char* fk_engine_result(fk_engine* engine) {
  if (engine == nullptr || engine->session == nullptr) return "";
  return fk::guarded_or("generate", "", [&] {
    const fk::engine::Generated& r = engine->session->result();
    engine->result = fk::JsonObject()
                         .add("text", r.text)
                         .add("tokens", r.tokens)
                         .add("end", fk::engine::name_of(r.end))
                         .add("prompt_tokens", r.prompt_tokens)
                         .add("prompt_seconds", r.prompt_seconds)
                         .add("seconds", r.seconds)
                         .add("bytes_read", r.bytes_read)
                         .text();
    return engine->result.c_str();
  });
}

fk_status fk_find_model(const char* path_or_name, char* path, size_t capacity, size_t* bytes) {
  return guarded("load", [&]() -> Status {
    if (path_or_name == nullptr) return null("path_or_name");
    std::string found;
    FK_RETURN_IF_ERROR(fk::engine::find_model(path_or_name, &found));
    if (path != nullptr) std::copy_n(found.data(), std::min(capacity, found.size()), path);
    if (bytes != nullptr) *bytes = found.size();
    return {};
  });
}

}  // extern "C"
