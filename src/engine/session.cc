// Generates text: runs the prompt, then chooses and runs one token at a time and turns them into
// text.
#include "engine/session.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace fk::engine {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

const char* name_of(Generated::End end) {
  switch (end) {
    case Generated::End::kLength:
      return "length";
    case Generated::End::kEndOfText:
      return "end of text";
    case Generated::End::kStop:
      return "stop";
    case Generated::End::kCancelled:
      return "cancelled";
    case Generated::End::kContext:
      return "context full";
  }
  return "";
}

std::string StopFilter::push(std::string_view text) {
  held_back_ += text;
  size_t found = std::string::npos;
  for (const std::string& stop : stops_) {
    if (!stop.empty()) found = std::min(found, held_back_.find(stop));
  }
  if (found != std::string::npos) {
    stopped_ = true;
    return held_back_.substr(0, found);
  }
  size_t keep = 0;
  for (const std::string& stop : stops_) {
    for (size_t n = std::min(stop.size(), held_back_.size()); n > keep; --n) {
      if (held_back_.compare(held_back_.size() - n, n, stop, 0, n) == 0) keep = n;
    }
  }
  std::string out = held_back_.substr(0, held_back_.size() - keep);
  held_back_.erase(0, out.size());
  return out;
}

std::string StopFilter::finish() {
  return stopped_ ? std::string() : std::exchange(held_back_, std::string());
}

Status Session::begin(const std::vector<int32_t>& prompt, const GenerateOptions& options) {
  result_ = {};
  going_ = false;
  if (prompt.empty()) return invalid("prompt: expected at least one token, got none");
  // Tokens already in the engine's cache need not run again, except the prompt's last one: its
  // logits are needed.
  size_t shared = 0;
  while (shared + 1 < prompt.size() && shared < history_.size() &&
         prompt[shared] == history_[shared]) {
    ++shared;
  }
  engine_.rewind(static_cast<int64_t>(shared));
  history_.resize(shared);

  options_ = options;
  sampler_ = std::make_unique<Sampler>(options.sampling, engine_.vocab());
  for (const int32_t token : prompt) sampler_->see(token);
  // If the prompt is only the token that begins a text, the first token chosen is the text's start,
  // and the stream treats its leading space as such.
  const bool continues = prompt.size() > 1 || prompt[0] != tokenizer_.bos;
  stream_ = std::make_unique<model::TokenStream>(tokenizer_, continues);
  filter_ = StopFilter(options.stop);
  logits_.resize(static_cast<size_t>(engine_.vocab()));

  const auto start = Clock::now();
  result_.prompt_tokens = static_cast<int64_t>(prompt.size() - shared);
  FK_RETURN_IF_ERROR(engine_.forward(prompt.data() + shared, result_.prompt_tokens,
                                     Engine::Logits::kLast, logits_.data()));
  history_ = prompt;
  result_.prompt_seconds = seconds_since(start);
  going_ = true;
  return {};
}

// Chooses one token. The first is chosen from the prompt's logits; for each later one, the model
// first runs the token before.
Status Session::step(std::string* text, bool* more) {
  *more = false;
  const auto chosen = static_cast<int64_t>(result_.tokens.size());
  if (chosen >= options_.max_tokens) return {};
  if (chosen > 0) {
    if (engine_.position() == engine_.context()) {
      result_.end = Generated::End::kContext;
      return {};
    }
    const int32_t last = result_.tokens.back();
    const auto start = Clock::now();
    FK_RETURN_IF_ERROR(engine_.forward(&last, 1, Engine::Logits::kLast, logits_.data()));
    history_.push_back(last);
    result_.seconds += seconds_since(start);
    result_.bytes_read +=
        static_cast<double>(engine_.weight_bytes()) + static_cast<double>(engine_.cache_bytes());
  }
  const auto start = Clock::now();
  const int32_t token = sampler_->sample(logits_.data());
  const auto& eos = tokenizer_.eos;
  if (!options_.ignore_eos && std::find(eos.begin(), eos.end(), token) != eos.end()) {
    result_.end = Generated::End::kEndOfText;
    return {};
  }
  result_.tokens.push_back(token);
  *text = filter_.push(stream_->push(token));
  if (chosen > 0) result_.seconds += seconds_since(start);
  *more = !filter_.stopped() && chosen + 1 < options_.max_tokens;
  return {};
}

Status Session::next(std::string* text, bool* more) {
  text->clear();
  *more = false;
  if (!going_) return {};
  going_ = false;  // so that it is false if the step fails or throws
  FK_RETURN_IF_ERROR(step(text, more));
  going_ = *more;
  if (!*more) {
    if (!filter_.stopped()) *text += filter_.push(stream_->finish());
    *text += filter_.finish();
    if (filter_.stopped()) result_.end = Generated::End::kStop;
  }
  result_.text += *text;
  return {};
}

Status Session::generate(const std::vector<int32_t>& prompt, const GenerateOptions& options,
                         const Piece& piece, Generated* result) {
  FK_RETURN_IF_ERROR(begin(prompt, options));
  std::string text;
  bool more = true;
  while (more) {
    FK_RETURN_IF_ERROR(next(&text, &more));
    // `piece` is called even where there is no text yet, since the user may want to stop.
    if (piece != nullptr && !piece(text) && more) {
      result_.end = Generated::End::kCancelled;
      break;
    }
  }
  *result = result_;
  return {};
}

}  // namespace fk::engine
