#include "model/pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

namespace fk::model {
namespace {

// Steps a match may take, and bytes of heap (in KiB): far above what any split of a text needs.
constexpr uint32_t kMatchLimit = 10'000'000;
constexpr uint32_t kHeapLimit = 64 << 10;
constexpr size_t kMaxExpression = 64 << 10;

// Oniguruma's white space is Unicode's property; PCRE2's has U+180E beside it. Its words have marks
// and connectors, which PCRE2's have not before 10.43.
constexpr std::string_view kSpaces = "\\t-\\r\\x{85}\\p{Z}";
constexpr std::string_view kWords = "\\p{L}\\p{M}\\p{Nd}\\p{Pc}";

// The expression in PCRE2's words.
std::string translate(std::string_view expression) {
  std::string out;
  bool in_class = false;
  for (size_t i = 0; i < expression.size(); ++i) {
    const char c = expression[i];
    if (c == '\\' && i + 1 < expression.size()) {
      const char next = expression[++i];
      const bool space = next == 's' || next == 'S', word = next == 'w' || next == 'W';
      const bool negated = next == 'S' || next == 'W';
      if ((space || word) && !in_class) {
        out.append(negated ? "[^" : "[").append(space ? kSpaces : kWords).append("]");
      } else if ((space || word) && !negated) {
        out.append(space ? kSpaces : kWords);
      } else {
        out.append({c, next});
      }
      continue;
    }
    if (c == '[') in_class = true;
    if (c == ']') in_class = false;
    out += c;
  }
  return out;
}

std::string message_of(int code) {
  unsigned char text[256];
  pcre2_get_error_message(code, text, sizeof(text));
  return reinterpret_cast<const char*>(text);
}

struct Freed {
  void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
};

}  // namespace

struct Pattern::Code {
  pcre2_code* code = nullptr;
  pcre2_match_context* context = nullptr;
  ~Code() {
    pcre2_match_context_free(context);
    pcre2_code_free(code);
  }
};

Pattern::~Pattern() = default;

Status Pattern::compile(std::string_view expression, bool literal,
                        std::shared_ptr<const Pattern>* pattern) {
  if (expression.empty() || expression.size() > kMaxExpression) {
    return invalid("expected an expression of 1 to " + std::to_string(kMaxExpression) +
                   " bytes, got " + std::to_string(expression.size()));
  }
  const std::string text = literal ? std::string(expression) : translate(expression);
  // Without \C nothing matches half a character.
  const uint32_t options =
      literal ? PCRE2_LITERAL | PCRE2_UTF : PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C;
  int error;
  size_t offset;
  std::shared_ptr<Pattern> made(new Pattern);
  made->code_ = std::make_unique<Code>();
  made->code_->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), options,
                                    &error, &offset, nullptr);
  if (made->code_->code == nullptr) {
    return invalid("is not a regular expression: " + message_of(error) + " at byte " +
                   std::to_string(offset));
  }
  pcre2_jit_compile(made->code_->code, PCRE2_JIT_COMPLETE);  // where it cannot, it interprets
  made->code_->context = pcre2_match_context_create(nullptr);
  if (made->code_->context == nullptr) return {FK_INTERNAL, "out of memory"};
  pcre2_set_match_limit(made->code_->context, kMatchLimit);
  pcre2_set_heap_limit(made->code_->context, kHeapLimit);
  *pattern = std::move(made);
  return {};
}

Status Pattern::find_all(std::string_view text,
                         std::vector<std::pair<size_t, size_t>>* matches) const {
  const std::unique_ptr<pcre2_match_data, Freed> data(
      pcre2_match_data_create_from_pattern(code_->code, nullptr));
  if (data == nullptr) return {FK_INTERNAL, "out of memory"};
  const size_t* found = pcre2_get_ovector_pointer(data.get());
  const PCRE2_SPTR subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  size_t at = 0;
  while (at < text.size()) {
    const int result = pcre2_match(code_->code, subject, text.size(), at, PCRE2_NO_UTF_CHECK,
                                   data.get(), code_->context);
    if (result == PCRE2_ERROR_NOMATCH) return {};
    if (result < 0) return invalid("the tokenizer's split pattern gave up: " + message_of(result));
    // \K in a lookahead can end a match before it begins.
    const size_t begin = found[0], end = found[1];
    if (end > begin && begin >= at) {
      matches->emplace_back(begin, end);
      at = end;
      continue;
    }
    at = begin > at ? begin : at;
    do {
      ++at;
    } while (at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80);
  }
  return {};
}

}  // namespace fk::model
