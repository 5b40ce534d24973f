// Writes conversations in the chat formats of the supported model families. A template is
// recognised by the tokens that it writes; where models of a family differ in detail, the
// template's text tells how.
#include "model/chat.h"

#include <algorithm>
#include <utility>

namespace fk::model {
namespace {

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// Returns `text` without the characters of `what` at both ends.
std::string_view trim(std::string_view text, std::string_view what = " \t\n\r\v\f") {
  const size_t begin = text.find_first_not_of(what);
  if (begin == std::string_view::npos) return "";
  return text.substr(begin, text.find_last_not_of(what) - begin + 1);
}

std::string_view without_leading_newlines(std::string_view text) {
  return text.substr(std::min(text.find_first_not_of('\n'), text.size()));
}

// Returns the default system message that a ChatML template has in it, as in
// '<|im_start|>system\nText<|im_end|>', or "". Each stretch of the template is searched once,
// however many times the beginning comes.
std::string written_system(std::string_view chat_template) {
  static constexpr std::string_view kBegin = "<|im_start|>system", kEnd = "<|im_end|>";
  size_t end = 0, quote = 0;
  for (size_t at = 0; (at = chat_template.find(kBegin, at)) != std::string_view::npos;) {
    at += kBegin.size();
    if (chat_template.substr(at, 2) == "\\n") {
      at += 2;
    } else if (chat_template.substr(at, 1) == "\n") {
      at += 1;
    } else {
      continue;
    }
    if (end < at) end = chat_template.find(kEnd, at);
    if (end == std::string_view::npos) return "";
    // A quote ends the template's literal, and an expression follows: that is no default message.
    if (quote < at) quote = chat_template.find_first_of("'\"{}", at);
    if (at < end && quote > end) return std::string(chat_template.substr(at, end - at));
  }
  return "";
}

// Collects the text of a conversation in parts: stretches of the template's own, in which special
// tokens count, and the contents of messages, in which they do not. A part's bool says which it is.
class Writer {
 public:
  Writer& own(std::string_view text) { return add(text, true); }
  Writer& content(std::string_view text) { return add(text, false); }

  std::vector<std::pair<std::string, bool>> parts;

 private:
  Writer& add(std::string_view text, bool own) {
    if (!text.empty()) parts.emplace_back(text, own);
    return *this;
  }
};

// Checks that the roles are known and that only the first message is the system's.
Status check_roles(const std::vector<ChatMessage>& messages) {
  for (size_t i = 0; i < messages.size(); ++i) {
    const std::string& role = messages[i].role;
    if (role == "system" && i > 0) {
      return invalid("messages: expected the system message first, got it at " + std::to_string(i));
    }
    if (role != "system" && role != "user" && role != "assistant") {
      return invalid("messages: expected the role system, user or assistant, got " + role);
    }
  }
  return {};
}

void write_chatml(const Tokenizer& tokenizer, const std::vector<ChatMessage>& messages, bool prompt,
                  Writer* writer) {
  const bool thinks = contains(tokenizer.chat_template, "</think>");
  if (!messages.empty() && messages[0].role != "system" && !tokenizer.default_system.empty()) {
    writer->own("<|im_start|>system\n" + tokenizer.default_system + "<|im_end|>\n");
  }
  size_t last_user = messages.size();  // unless a user spoke: then no answer keeps its thoughts
  for (size_t i = 0; i < messages.size(); ++i) {
    if (messages[i].role == "user") last_user = i;
  }
  for (size_t i = 0; i < messages.size(); ++i) {
    const ChatMessage& message = messages[i];
    std::string_view content = message.content;
    writer->own("<|im_start|>" + message.role + "\n");
    if (thinks && message.role == "assistant") {
      // Only the answer to the last question keeps its thoughts.
      std::string_view thought;
      if (const size_t end = content.find("</think>"); end != std::string_view::npos) {
        thought = content.substr(0, end);
        const size_t begin = thought.rfind("<think>");
        if (begin != std::string_view::npos) thought.remove_prefix(begin + 7);
        thought = trim(thought, "\n");
        content = without_leading_newlines(content.substr(content.rfind("</think>") + 8));
      }
      if (i > last_user && (i + 1 == messages.size() || !thought.empty())) {
        writer->own("<think>\n").content(thought).own("\n</think>\n\n");
        content = without_leading_newlines(content);
      }
    }
    writer->content(content).own("<|im_end|>\n");
  }
  if (prompt) writer->own("<|im_start|>assistant\n");
}

void write_llama3(const Tokenizer& tokenizer, const std::vector<ChatMessage>& messages, bool prompt,
                  Writer* writer) {
  const auto header = [&](const std::string& role) {
    writer->own("<|start_header_id|>" + role + "<|end_header_id|>\n\n");
  };
  writer->own("<|begin_of_text|>");
  size_t first = 0;
  if (contains(tokenizer.chat_template, "Cutting Knowledge Date")) {
    // Llama 3.1 and later always have a system message, and give this date when they know no other.
    header("system");
    writer->own("Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n");
    if (!messages.empty() && messages[0].role == "system") {
      writer->content(trim(messages[0].content));
      first = 1;
    }
    writer->own("<|eot_id|>");
  }
  for (size_t i = first; i < messages.size(); ++i) {
    header(messages[i].role);
    writer->content(trim(messages[i].content)).own("<|eot_id|>");
  }
  if (prompt) header("assistant");
}

void write_llama2(const std::vector<ChatMessage>& messages, Writer* writer) {
  std::string_view system;
  for (const ChatMessage& message : messages) {
    if (message.role == "system") {
      system = message.content;
    } else if (message.role == "user") {
      writer->own("<s>[INST] ");
      if (!system.empty()) writer->own("<<SYS>>\n").content(system).own("\n<</SYS>>\n\n");
      system = "";
      writer->content(trim(message.content)).own(" [/INST]");
    } else {
      writer->own(" ").content(trim(message.content)).own(" </s>");
    }
  }
}

// The versions of Mistral's template differ in the spaces around their marks, and in whether the
// system text joins the first or the last message of the user.
void write_mistral(const Tokenizer& tokenizer, const std::vector<ChatMessage>& messages,
                   Writer* writer) {
  std::string text = tokenizer.chat_template;
  std::replace(text.begin(), text.end(), '"', '\'');
  const std::string open = std::string(contains(text, "' [INST]") ? " " : "") +
                           (contains(text, "[INST] ") ? "[INST] " : "[INST]");
  const std::string close = contains(text, " [/INST]") ? " [/INST]" : "[/INST]";
  const bool space = contains(text, "' ' + message");
  const bool trims = contains(text, "message['content']|trim + eos_token");
  const std::string end = contains(text, "eos_token + ' '") ? "</s> " : "</s>";
  const bool joins_last = contains(text, "loop.last and system_message");
  const bool system = !messages.empty() && messages[0].role == "system";
  const size_t joined = joins_last ? messages.size() - 1 : 1;
  writer->own("<s>");
  for (size_t i = system ? 1 : 0; i < messages.size(); ++i) {
    const std::string_view content = messages[i].content;
    if (messages[i].role == "user") {
      writer->own(open);
      if (system && i == joined) writer->content(messages[0].content).own("\n\n");
      writer->content(content).own(close);
    } else {
      writer->own(space ? " " : "").content(trims ? trim(content) : content).own(end);
    }
  }
}

// Writes a conversation in the tokenizer's format.
Status write_chat(const Tokenizer& tokenizer, const std::vector<ChatMessage>& messages, bool prompt,
                  Writer* writer) {
  FK_RETURN_IF_ERROR(check_roles(messages));
  switch (tokenizer.chat_format) {
    case ChatFormat::kNone:
      return unsupported(tokenizer.chat_template.empty()
                             ? "the model has no chat template"
                             : "the model's chat template is of no supported family");
    case ChatFormat::kChatMl:
      write_chatml(tokenizer, messages, prompt, writer);
      return {};
    case ChatFormat::kLlama3:
      write_llama3(tokenizer, messages, prompt, writer);
      return {};
    case ChatFormat::kLlama2:
      write_llama2(messages, writer);
      return {};
    case ChatFormat::kMistral:
      write_mistral(tokenizer, messages, writer);
      return {};
  }
  return {};
}

}  // namespace

void set_chat(Tokenizer* tokenizer) {
  const std::string& text = tokenizer->chat_template;
  if (contains(text, "<|im_start|>")) {
    tokenizer->chat_format = ChatFormat::kChatMl;
    tokenizer->default_system = written_system(text);
  } else if (contains(text, "<|start_header_id|>")) {
    tokenizer->chat_format = ChatFormat::kLlama3;
  } else if (contains(text, "[INST]")) {
    tokenizer->chat_format = contains(text, "<<SYS>>") ? ChatFormat::kLlama2 : ChatFormat::kMistral;
  }
  for (const char* name :
       {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>"}) {
    const int32_t id = tokenizer->find(name);
    auto& eos = tokenizer->eos;
    if (id >= 0 && tokenizer->is_special(id) &&
        std::find(eos.begin(), eos.end(), id) == eos.end()) {
      eos.push_back(id);
    }
  }
}

Status format_chat(const Tokenizer& tokenizer, const std::vector<ChatMessage>& messages,
                   bool prompt, std::string* text) {
  Writer writer;
  FK_RETURN_IF_ERROR(write_chat(tokenizer, messages, prompt, &writer));
  text->clear();
  for (const auto& [part, own] : writer.parts) *text += part;
  return {};
}

Status encode_chat(const Tokenizer& tokenizer, const std::vector<ChatMessage>& messages,
                   bool prompt, std::vector<int32_t>* ids) {
  Writer writer;
  FK_RETURN_IF_ERROR(write_chat(tokenizer, messages, prompt, &writer));
  std::vector<TextPart> parts;
  for (const auto& [part, own] : writer.parts) parts.push_back({part, own});
  return tokenizer.encode_parts(parts, /*add_special=*/false, ids);
}

}  // namespace fk::model
