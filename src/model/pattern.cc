// Translates expressions to PCRE2, compiles them, and counts what matching costs.
#include "model/pattern.h"

#include <algorithm>
#include <cctype>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "model/unicode.h"

namespace fk::model {
namespace {

constexpr uint32_t kHeapLimit = 64 << 10;   // in KiB, for when PCRE2 interprets an expression
constexpr uint64_t kStepsPerCall = 4;       // what one call of PCRE2 costs
constexpr size_t kLiteralBytesPerStep = 8;  // how many bytes a literal search does in one step
constexpr uint64_t kMaxInRanges = 1 << 21;  // characters in all ranges; each takes 2 ns to compile
constexpr uint32_t kMaxNamedGroups = 4;     // named groups; each makes every step a little longer

// This is what \s and \w mean in Oniguruma. Its white space is Unicode's property, while PCRE2's
// also has U+180E. Its words have marks and connectors, which PCRE2's have only from 10.43 on.
constexpr std::string_view kSpaces = "\\t-\\r\\x{85}\\p{Z}";
constexpr std::string_view kWords = "\\p{L}\\p{M}\\p{Nd}\\p{Pc}";

// Translates an expression from Oniguruma's syntax to PCRE2's. Returns false for two things that
// mean something else in PCRE2: a verb, "(*...)", which would set PCRE2's options and which
// Oniguruma does not know, and \Q or \E, which quote in PCRE2 and are letters in Oniguruma.
bool translate(std::string_view expression, std::string* out) {
  bool in_class = false;
  for (size_t i = 0; i < expression.size(); ++i) {
    const char c = expression[i];
    if (c == '\\' && i + 1 < expression.size()) {
      const char next = expression[++i];
      if (next == 'Q' || next == 'E') return false;
      const bool space = next == 's' || next == 'S', word = next == 'w' || next == 'W';
      const bool negated = next == 'S' || next == 'W';
      if ((space || word) && !in_class) {
        out->append(negated ? "[^" : "[").append(space ? kSpaces : kWords).append("]");
      } else if ((space || word) && !negated) {
        out->append(space ? kSpaces : kWords);
      } else {
        out->append({c, next});
      }
      continue;
    }
    if (c == '(' && !in_class && expression.substr(i + 1, 1) == "*") return false;
    if (c == '[') in_class = true;
    if (c == ']') in_class = false;
    *out += c;
  }
  return true;
}

// escaped_character returns the first for an escape that may be any character, and the second for
// one that is no single character and so cannot be the end of a range.
constexpr uint32_t kAnyCharacter = UINT32_MAX, kNoCharacter = UINT32_MAX - 1;

// Returns the character that the escape at the front of `text` stands for, and sets *length to the
// escape's length in bytes.
uint32_t escaped_character(std::string_view text, size_t* length) {
  const char kind = text[1];
  *length = 1 + std::max<size_t>(1, utf8_length(text.substr(1)));
  if (std::string_view("dDwWsSpPbBRXhHvVKAzZGkg").find(kind) != std::string_view::npos) {
    return kNoCharacter;
  }
  if (std::string_view("aefnrtc").find(kind) != std::string_view::npos) return 0x1F;
  if (kind == 'x' && text.size() > 2) {
    const bool braces = text[2] == '{';
    const size_t begin = braces ? 3 : 2, end = begin + (braces ? 8 : 2);
    size_t at = begin;
    uint32_t number = 0;
    while (at < std::min(end, text.size()) && std::isxdigit(static_cast<unsigned char>(text[at]))) {
      const char digit = static_cast<char>(text[at++] | 0x20);
      number = number * 16 + static_cast<uint32_t>(digit <= '9' ? digit - '0' : digit - 'a' + 10);
    }
    if (braces && text.substr(at, 1) != "}") return kAnyCharacter;
    *length = at + (braces ? 1 : 0);
    return number;
  }
  const bool spells = std::isalnum(static_cast<unsigned char>(kind)) != 0;
  return spells ? kAnyCharacter : utf8_decode(text.substr(1, *length - 1));
}

// Returns how many characters all ranges of an expression, such as "a-z", have together; what looks
// like a range counts outside of a class too. Where case is ignored, PCRE2 goes over all of these
// characters while it compiles.
uint64_t characters_in_ranges(std::string_view expression) {
  uint64_t sum = 0;
  uint32_t before = kNoCharacter;
  bool range = false;
  for (size_t i = 0, length = 1; i < expression.size(); i += length) {
    const char c = expression[i];
    length = 1;
    if (c == ' ' || c == '\t') continue;  // after (?xx) these are ignored inside a range
    if (c == '-') {
      range = before != kNoCharacter;
      continue;
    }
    const std::string_view rest = expression.substr(i);
    uint32_t character;
    if (c == '\\' && rest.size() > 1) {
      character = escaped_character(rest, &length);
    } else {
      length = std::max<size_t>(1, utf8_length(rest));
      character = utf8_decode(rest.substr(0, length));
    }
    if (range && character != kNoCharacter) {
      const uint32_t first = before == kAnyCharacter ? 0 : before;
      const uint32_t last = std::min<uint32_t>(character, 0x10FFFF);
      sum += last > first ? last - first : 0;
    }
    range = false;
    before = character;
  }
  return sum;
}

// Returns PCRE2's text for an error code.
std::string message_of(int code) {
  unsigned char text[256];
  pcre2_get_error_message(code, text, sizeof(text));
  return reinterpret_cast<const char*>(text);
}

// Returns how often an item of an expression may repeat: the larger number of a "{2,5}" at its end,
// or 1 if there is none.
uint32_t repeats(std::string_view item) {
  const size_t open = item.rfind('{');
  if (open == std::string_view::npos) return 1;
  // In \p{Lu}, \x{2581} and the like, the braces hold a name and no number of repeats.
  constexpr std::string_view kNaming = "pPxoNkg";
  if (open >= 2 && item[open - 2] == '\\' && kNaming.find(item[open - 1]) != kNaming.npos) return 1;
  uint32_t most = 1, number = 0;
  for (const char c : item.substr(open + 1)) {
    const bool digit = c >= '0' && c <= '9';
    number = digit ? std::min(number * 10 + static_cast<uint32_t>(c - '0'), 65535u) : 0;
    most = std::max(most, number);
  }
  return most;
}

}  // namespace

struct Pattern::Code {
  // Holds the steps that it takes to try an item of the expression once, and to go over one
  // character with it. A class is searched from its front for every character, so a long one costs
  // more; and an item with many repeats may fail only at the last.
  struct Cost {
    uint32_t once = 1, each = 1;
  };

  pcre2_code* code = nullptr;
  std::string expression;
  std::vector<Cost> costs;  // indexed by an item's position in the expression
  ~Code() { pcre2_code_free(code); }

  // Sets the cost of one item; PCRE2 calls it for each item of the expression.
  static int add_cost(pcre2_callout_enumerate_block* block, void* data) {
    auto& self = *static_cast<Code*>(data);
    const size_t place = block->pattern_position;
    const std::string_view item =
        std::string_view(self.expression).substr(place, block->next_item_length);
    uint32_t lookbehind = 0;
    pcre2_pattern_info(self.code, PCRE2_INFO_MAXLOOKBEHIND, &lookbehind);
    Cost& cost = self.costs[place];
    cost.each = 1 + static_cast<uint32_t>(item.size() / 64);
    cost.once = cost.each * repeats(item) + lookbehind / 8;
    return 0;
  }
};

Pattern::~Pattern() = default;

Status Pattern::compile(std::string_view expression, bool literal, size_t* machine_code_left,
                        std::shared_ptr<const Pattern>* pattern) {
  if (expression.empty() || (!literal && expression.size() > kMaxExpression)) {
    return invalid("expected an expression of 1 to " + std::to_string(kMaxExpression) +
                   " bytes, got " + std::to_string(expression.size()));
  }
  std::shared_ptr<Pattern> made(new Pattern);
  if (literal) {
    made->literal_ = expression;
    made->fallback_.assign(expression.size(), 0);
    for (size_t i = 1, matched = 0; i < expression.size(); ++i) {
      while (matched > 0 && expression[i] != expression[matched]) {
        matched = made->fallback_[matched - 1];
      }
      if (expression[i] == expression[matched]) ++matched;
      made->fallback_[i] = static_cast<uint32_t>(matched);
    }
  } else {
    FK_RETURN_IF_ERROR(made->compile_expression(expression, machine_code_left));
  }
  *pattern = std::move(made);
  return {};
}

Status Pattern::compile_expression(std::string_view expression, size_t* machine_code_left) {
  if (const uint64_t many = characters_in_ranges(expression); many > kMaxInRanges) {
    return invalid("expected at most " + std::to_string(kMaxInRanges) +
                   " characters in all ranges together, got " + std::to_string(many));
  }
  code_ = std::make_unique<Code>();
  std::string& text = code_->expression;
  if (!translate(expression, &text)) {
    return invalid("is not a regular expression: (*, \\Q and \\E are not known");
  }
  // AUTO_CALLOUT makes PCRE2 call us at each item, to count it, which takes 4 to 8 ns.
  // NO_START_OPTIMIZE switches off searches for where a match may start, which would not be
  // counted. NEVER_BACKSLASH_C forbids \C, so that nothing matches half a character.
  const uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C | PCRE2_AUTO_CALLOUT |
                           PCRE2_NO_START_OPTIMIZE | PCRE2_NO_AUTO_CAPTURE;
  int error;
  size_t offset;
  code_->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), options,
                              &error, &offset, nullptr);
  if (error == PCRE2_ERROR_BAD_SUBPATTERN_REFERENCE) {
    return unsupported("back references and calls of groups by number are not supported");
  }
  if (code_->code == nullptr) {
    return invalid("is not a regular expression: " + message_of(error) + " at byte " +
                   std::to_string(offset));
  }
  // A back reference compares any length in one item, so it could not be counted.
  uint32_t back_references = 0;
  pcre2_pattern_info(code_->code, PCRE2_INFO_BACKREFMAX, &back_references);
  if (back_references > 0) return unsupported("back references are not supported");
  uint32_t groups = 0;
  pcre2_pattern_info(code_->code, PCRE2_INFO_CAPTURECOUNT, &groups);
  if (groups > kMaxNamedGroups) {
    return unsupported("more than " + std::to_string(kMaxNamedGroups) +
                       " named groups are not supported, got " + std::to_string(groups));
  }
  code_->costs.resize(text.size() + 1);
  pcre2_callout_enumerate(code_->code, &Code::add_cost, code_.get());
  size_t bytes = 0;
  pcre2_pattern_info(code_->code, PCRE2_INFO_SIZE, &bytes);
  if (bytes > *machine_code_left) return {};
  *machine_code_left -= bytes;
  pcre2_jit_compile(code_->code, PCRE2_JIT_COMPLETE);  // if this fails, PCRE2 interprets
  return {};
}

// Holds PCRE2's memory, and what the callout needs to count items.
struct Matcher::Memory {
  pcre2_match_context* context = nullptr;
  pcre2_match_data* data = nullptr;
  Work* work = nullptr;
  const std::vector<Pattern::Code::Cost>* costs = nullptr;  // of the pattern being matched
  size_t position = 0;                                      // where the last item was tried
  uint32_t each = 1;                                        // its steps for each character

  ~Memory() {
    pcre2_match_data_free(data);
    pcre2_match_context_free(context);
  }

  // Pays for an item; PCRE2 calls it before each item of the expression that it tries.
  static int count(pcre2_callout_block* block, void* data) {
    auto& self = *static_cast<Memory*>(data);
    const Pattern::Code::Cost cost = (*self.costs)[block->pattern_position];
    const size_t now = block->current_position;
    const size_t passed = now > self.position ? now - self.position : 0;
    const uint64_t steps = cost.once + passed * self.each;
    self.position = now;
    self.each = cost.each;
    return self.work->spend(steps) ? 0 : PCRE2_ERROR_CALLOUT;
  }
};

Matcher::Matcher(Work* work) : work_(*work) {}
Matcher::~Matcher() = default;

Matches::Matches(const Pattern& pattern, std::string_view text, Matcher* matcher)
    : pattern_(pattern), text_(text), matcher_(*matcher) {
  const bool literal = !pattern.literal_.empty();
  status_ =
      matcher_.work_.steps(kStepsPerCall + (literal ? text.size() / kLiteralBytesPerStep : 0));
  if (literal || matcher_.memory_ != nullptr || !status_.ok()) return;
  auto memory = std::make_unique<Matcher::Memory>();
  memory->context = pcre2_match_context_create(nullptr);
  memory->data = pcre2_match_data_create(1, nullptr);
  if (memory->context == nullptr || memory->data == nullptr) {
    status_ = {FK_INTERNAL, "out of memory"};
    return;
  }
  memory->work = &matcher_.work_;
  pcre2_set_callout(memory->context, &Matcher::Memory::count, memory.get());
  pcre2_set_match_limit(memory->context, UINT32_MAX);  // our own count replaces PCRE2's limit
  pcre2_set_heap_limit(memory->context, kHeapLimit);
  matcher_.memory_ = std::move(memory);
}

bool Matches::next(size_t* begin, size_t* end) {
  if (!status_.ok() || at_ >= text_.size()) return false;
  return pattern_.literal_.empty() ? next_expression(begin, end) : next_literal(begin, end);
}

// Searches by Knuth, Morris and Pratt's method, which looks at each byte of the text once.
bool Matches::next_literal(size_t* begin, size_t* end) {
  const std::string& literal = pattern_.literal_;
  if (literal.size() == 1) {
    *begin = text_.find(literal[0], at_);
    at_ = *end = *begin + 1;
    if (*begin != std::string_view::npos) return true;
    at_ = text_.size();
    return false;
  }
  size_t matched = 0;
  while (at_ < text_.size()) {
    const char c = text_[at_++];
    while (matched > 0 && c != literal[matched]) matched = pattern_.fallback_[matched - 1];
    if (c == literal[matched]) ++matched;
    if (matched == literal.size()) {
      *begin = at_ - matched;
      *end = at_;
      return true;
    }
  }
  return false;
}

bool Matches::next_expression(size_t* begin, size_t* end) {
  Matcher::Memory& memory = *matcher_.memory_;
  memory.costs = &pattern_.code_->costs;
  const size_t* found = pcre2_get_ovector_pointer(memory.data);
  const PCRE2_SPTR subject = reinterpret_cast<PCRE2_SPTR>(text_.data());
  while (at_ < text_.size()) {
    if (!matcher_.work_.spend(kStepsPerCall)) {
      status_ = matcher_.work_.error();
      return false;
    }
    const auto match = [&](uint32_t options) {
      memory.position = at_;
      return pcre2_match(pattern_.code_->code, subject, text_.size(), at_,
                         PCRE2_NO_UTF_CHECK | options, memory.data, memory.context);
    };
    int result = match(0);
    if (result == PCRE2_ERROR_JIT_STACKLIMIT) result = match(PCRE2_NO_JIT);
    if (result == PCRE2_ERROR_NOMATCH) {
      at_ = text_.size();
      return false;
    }
    if (result == PCRE2_ERROR_CALLOUT) {
      status_ = matcher_.work_.error();
      return false;
    }
    if (result < 0) {
      const bool heap = result == PCRE2_ERROR_HEAPLIMIT;
      status_ = invalid("the tokenizer's split pattern gave up: " + message_of(result) +
                        (heap ? " (" + std::to_string(kHeapLimit) + " KiB)" : ""));
      return false;
    }
    // With \K in a lookahead, a match can end before it begins. Such matches and empty ones are
    // left out, and the search goes on at the next character.
    *begin = found[0];
    *end = found[1];
    if (*end > *begin && *begin >= at_) {
      at_ = *end;
      return true;
    }
    at_ = std::max(at_, *begin);
    do {
      ++at_;
    } while (at_ < text_.size() && (static_cast<unsigned char>(text_[at_]) & 0xC0) == 0x80);
  }
  return false;
}

}  // namespace fk::model
