// `fk chat` holds a conversation with a model, in the form of the model's own chat template. Ctrl-C
// stops an answer; at the prompt it ends the program, as Ctrl-D does.
#include <unistd.h>

#include <cstdio>
#include <iostream>

#include "cli/line_editor.h"
#include "cli/terminal.h"
#include "cli/text_options.h"
#include "engine/known_models.h"

namespace fk::cli {
namespace {

// Holds the messages so far, and the model that answers them.
class Conversation {
 public:
  Conversation(engine::TextModel& model, const TextOptions& options)
      : model_(model), options_(options) {
    if (reads_memory(model.engine()) && !options.quiet) bandwidth_ = read_bandwidth(model.engine());
    reset();
  }

  // Begins again, with nothing but the system message if there is one.
  void reset() {
    messages_.clear();
    if (!options_.system.empty()) messages_.push_back({"system", options_.system});
  }

  // Asks the model a question, writes its answer to stdout, and keeps both for the next question.
  // Returns false if that failed; then the question is not kept.
  bool ask(const std::string& question) {
    messages_.push_back({"user", question});
    std::vector<int32_t> prompt;
    engine::Generated result;
    Status status = model::encode_chat(*model_.tokenizer(), messages_, true, &prompt);
    if (status.ok()) {
      const CatchInterrupt catching;
      TextOut out;
      const auto piece = [&](std::string_view text) {
        return (options_.json || out.write(text)) && !interrupted();
      };
      status = model_.generate(prompt, options_.generate, piece, &result);
      out.finish();
    }
    if (!status.ok()) {
      complain("chat", status.message());
      messages_.pop_back();
      return false;
    }
    messages_.push_back({"assistant", result.text});
    if (options_.json) {
      const nlohmann::json j = {{"answer", result.text},
                                {"end", engine::name_of(result.end)},
                                {"prompt_tokens", result.prompt_tokens},
                                {"prompt_seconds", result.prompt_seconds},
                                {"tokens", result.tokens.size()},
                                {"seconds", result.seconds}};
      return TextOut().write(shown_json(stdout, j) + "\n");
    }
    if (!TextOut().write("\n")) return false;
    if (!options_.quiet) std::fprintf(stderr, "[%s]\n", figures(result, bandwidth_).c_str());
    return true;
  }

 private:
  engine::TextModel& model_;
  const TextOptions& options_;
  std::vector<model::ChatMessage> messages_;
  double bandwidth_ = 0;
};

}  // namespace

int chat(TextOptions& options) {
  if (options.open.model.empty()) {
    complain("chat",
             "MODEL: expected one with a chat template, which the built-in model has not: "
             "`fk pull smollm2 && fk chat smollm2`");
    return 2;
  }
  const std::unique_ptr<engine::TextModel> model = open_model("chat", &options);
  if (model == nullptr) return 1;
  if (model->tokenizer()->chat_format == model::ChatFormat::kNone) {
    complain("chat", model->path() +
                         " has no chat template that we know; `fk generate` continues " +
                         "a text with it");
    return 1;
  }
  Conversation conversation(*model, options);
  if (!options.prompt.empty()) return conversation.ask(options.prompt) ? 0 : 1;

  const bool terminal = isatty(STDIN_FILENO) && isatty(STDOUT_FILENO);
  if (terminal) {
    std::fprintf(stderr, "%s (%s). /reset begins again, /exit or Ctrl-D ends.\n",
                 shown(stderr, model->path()).c_str(), model->engine().description().c_str());
  }
  LineEditor editor(engine::cache_folder() + "/chat_history");
  std::string line;
  for (;;) {
    const LineEditor::Outcome outcome = editor.read("> ", &line);
    if (outcome != LineEditor::Outcome::kLine || line == "/exit") return 0;
    if (line == "/reset") {
      conversation.reset();
      continue;
    }
    if (line.find_first_not_of(" \t") == std::string::npos) continue;
    if (!conversation.ask(line) && !terminal) return 1;
  }
}

}  // namespace fk::cli
