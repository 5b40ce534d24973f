// Opens a model by path or name and puts its parts together.
#include "engine/text_model.h"

#include "engine/known_models.h"

namespace fk::engine {

Status TextModel::open(const OpenOptions& options, std::unique_ptr<TextModel>* out) {
  if (options.device != "cpu") return unsupported("device: expected cpu, got " + options.device);
  EngineOptions engine;
  FK_RETURN_IF_ERROR(parse_options(options.context, options.cache, options.quantize, &engine));
  std::unique_ptr<TextModel> text(new TextModel);
  std::string path;
  FK_RETURN_IF_ERROR(find_model(options.model, &path));
  model::LoadOptions load;
  load.tokenizer = options.tokenizer;
  load.need_tokenizer = options.need_tokenizer;
  load.make_up_weights = options.make_up_weights;
  FK_RETURN_IF_ERROR(model::load(path, load, &text->model_));
  const Status made = make_engine(text->model_.decoder, engine, &text->engine_);
  if (!made.ok()) return {made.code(), text->path() + ": " + made.message()};
  if (text->model_.tokenizer != nullptr) {
    text->session_ = std::make_unique<Session>(*text->engine_, *text->model_.tokenizer);
  }
  *out = std::move(text);
  return {};
}

Status TextModel::encode_prompt(std::string_view text, std::vector<int32_t>* ids) const {
  ids->clear();
  if (tokenizer() == nullptr) return invalid("the model has no tokenizer: " + tokenizer_error());
  FK_RETURN_IF_ERROR(tokenizer()->encode(text, {}, ids));
  if (!ids->empty()) return {};
  if (tokenizer()->bos >= 0) {
    ids->push_back(tokenizer()->bos);
  } else if (!tokenizer()->eos.empty()) {  // in training, the end of one text stood before the next
    ids->push_back(tokenizer()->eos.front());
  } else {
    return invalid("the prompt has no tokens, and the model has no token that begins a text");
  }
  return {};
}

Status TextModel::generate(const std::vector<int32_t>& prompt, const GenerateOptions& options,
                           const Session::Piece& piece, Generated* result) {
  if (session_ == nullptr) return invalid("the model has no tokenizer: " + tokenizer_error());
  return session_->generate(prompt, options, piece, result);
}

}  // namespace fk::engine
