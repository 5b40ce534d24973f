#include "tokenizer_mutations.h"

#include <algorithm>
#include <initializer_list>

namespace fk::model {
namespace {

class Mutator {
 public:
  explicit Mutator(std::mt19937_64* random) : random_(*random) {}

  size_t below(size_t n) { return n == 0 ? 0 : static_cast<size_t>(random_() % n); }
  bool one_in(size_t n) { return below(n) == 0; }
  const char* one_of(std::initializer_list<const char*> all) {
    return all.begin()[below(all.size())];
  }

  // Mostly 1 to 3, seldom many.
  size_t count(size_t most) {
    return one_in(12) ? 1 + below(most) : 1 + below(std::min<size_t>(most, 3));
  }

  std::string piece() {
    return one_of({"a",
                   "b",
                   "ab",
                   "aba",
                   " ",
                   "  ",
                   "\n",
                   "1",
                   "11",
                   "\xC3\xA4",
                   "e\xCC\x81",
                   "\xE2\x96\x81",
                   "\xCD\x84",
                   "<s>",
                   "</s>",
                   "<unk>",
                   "<|im_end|>",
                   "<0x41>",
                   "\xC4\xA0",
                   "\xED\x95\x9C",
                   "\xF0\x9F\x98\x80",
                   "A",
                   "_",
                   "x"});
  }

  std::string string(size_t most = 20000) {
    std::string text;
    const std::string unit = piece();
    const size_t times = count(one_in(20) ? most : 40);
    for (size_t i = 0; i < times && text.size() < most; ++i) text += one_in(8) ? piece() : unit;
    return one_in(40) ? "" : text;
  }

  std::string expression(int depth = 0) {
    const auto inner = [&] { return expression(depth + 1); };
    const auto number = [&] { return std::to_string(one_in(6) ? below(70000) : below(30)); };
    if (depth > 4 || one_in(3)) {
      if (one_in(60)) return string(3000);
      return one_of({"a",      "b",     " ",    "\\s",         "\\S",      "\\w", "\\p{L}",
                     "\\p{N}", ".",     "[^a]", "[a-z\\s]",    "\xC3\xA4", "\\X", "\\R",
                     "\\b",    "$",     "^",    "\\1",         "(?R)",     "\\K", "[^\\s\\p{L}]",
                     "\\z",    "(?C1)", "\\G",  "[[:alpha:]]", "\\h",      "\\d", ""});
    }
    switch (below(14)) {
      case 0:
        return inner() + inner();
      case 1:
        return inner() + "|" + inner();
      case 2:
        return "(?:" + inner() + ")" + one_of({"*", "+", "?", "*+", "++", "+?", "*?", ""});
      case 3:
        return "(" + inner() + ")" + one_of({"*", "+", "?", "*+", ""});
      case 4:
        return "(?:" + inner() + "){" + number() + "}";
      case 5:
        return "(?:" + inner() + "){" + number() + "," + number() + "}";
      case 6:
        return one_of({"(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:", "(?s:", "(*", "(?|"}) +
               inner() + ")";
      case 7:
        return inner() + one_of({"*", "+", "?", "*+", "{3}", "{1,3}", "{0,60000}", "{200}"});
      case 8: {
        std::string all;
        for (size_t i = count(400); i > 0; --i) all += piece() + "|";
        return "(?:" + all + inner() + ")";
      }
      case 9: {
        std::string all = one_in(2) ? "[" : "[^";
        for (size_t i = count(600); i > 0; --i)
          all += one_of({"a", "b-z", "\xC3\xA4", "\\p{Lu}", "\xE4\xB8\x80",
                         "\xC4\x80-\xF4\x8F\xBF\xBF", "\\x{100}-\\x{10ffff}"});
        return all + "]" + one_of({"", "+", "*"});
      }
      case 10:
        return ".*" + inner();
      case 11: {  // groups in groups
        std::string all = inner();
        const std::string open = one_of({"(", "(?:", "(?<n>", "(?i:", "(?="});
        for (size_t i = count(240); i > 0; --i) all = open + all + ")";
        return all;
      }
      case 12: {  // groups in a row
        const std::string unit = "(" + inner() + ")" + one_of({"?", "*", "", "{0,9}"});
        std::string all;
        for (size_t i = count(600); i > 0 && all.size() < 9000; --i) all += unit;
        return all;
      }
      default:
        return inner() + inner() + inner();
    }
  }

  Json pattern() {
    if (one_in(3)) return {{"String", string(one_in(50) ? 300000 : 2000)}};
    return {{"Regex", expression()}};
  }

  Json part(const char* list, Json (Mutator::*make)(), int depth = 0) {
    if (depth < 5 && one_in(3)) {
      Json parts = Json::array();
      const Json same = one_in(6) ? part(list, make, depth + 1) : Json();
      for (size_t i = same.is_null() ? count(34) : below(34); i > 0; --i) {
        parts.push_back(same.is_null() ? part(list, make, depth + 1) : same);
      }
      return {{"type", "Sequence"}, {list, parts}};
    }
    return (this->*make)();
  }

  Json normalizer() {
    switch (below(3)) {
      case 0:
        return {{"type", "NFC"}};
      case 1:
        return {{"type", "Prepend"}, {"prepend", string()}};
      default:
        return {{"type", "Replace"}, {"pattern", pattern()}, {"content", string()}};
    }
  }

  Json pre_tokenizer() {
    switch (below(5)) {
      case 0:
        return {{"type", "Metaspace"},
                {"replacement", one_in(10) ? string() : "\xE2\x96\x81"},
                {"prepend_scheme", one_of({"always", "first", "never"})},
                {"split", one_in(2)}};
      case 1:
        return {{"type", "Digits"}, {"individual_digits", one_in(2)}};
      default:
        return {{"type", "Split"},
                {"pattern", pattern()},
                {"behavior", one_of({"Isolated", "Removed", "MergedWithPrevious", "MergedWithNext",
                                     "Contiguous"})},
                {"invert", one_in(2)}};
    }
  }

  Json byte_level() {
    return {{"type", "ByteLevel"}, {"add_prefix_space", one_in(2)}, {"use_regex", one_in(2)}};
  }

  Json decoder() {
    switch (below(6)) {
      case 0:
        return {{"type", "ByteLevel"}};
      case 1:
        return {{"type", "ByteFallback"}};
      case 2:
        return {{"type", "Metaspace"},
                {"replacement", one_in(10) ? string() : "\xE2\x96\x81"},
                {"prepend_scheme", one_of({"always", "first", "never"})}};
      case 3:
        return {{"type", "Replace"}, {"pattern", {{"String", "\xE2\x96\x81"}}}, {"content", " "}};
      case 4:
        return {{"type", "Strip"}, {"content", " "}, {"start", below(2)}, {"stop", 0}};
      default:
        return {{"type", "Fuse"}};
    }
  }

  Json post_processor(size_t ids) {
    Json template_of = Json::array();
    const auto special = [&] {
      for (size_t i = count(2000); i > 0; --i) {
        template_of.push_back({{"SpecialToken", {{"id", "x"}, {"type_id", 0}}}});
      }
    };
    if (one_in(2)) special();
    template_of.push_back({{"Sequence", {{"id", "A"}, {"type_id", 0}}}});
    if (one_in(2)) special();
    Json all = Json::array();
    for (size_t i = count(2000); i > 0; --i) all.push_back(below(ids));
    return {{"type", "TemplateProcessing"},
            {"single", template_of},
            {"special_tokens", {{"x", {{"id", "x"}, {"ids", all}}}}}};
  }

  void add_tokens(Json* tokenizer, size_t first) {
    Json& all = (*tokenizer)["added_tokens"];
    all = Json::array();
    const std::string prefix = string();
    const bool alike = one_in(3);
    for (size_t i = 0, n = one_in(30) ? 1 + below(5000) : count(40); i < n; ++i) {
      std::string content = alike ? prefix + std::to_string(i) : string(one_in(50) ? 300000 : 300);
      if (one_in(6)) content = piece();
      if (content.empty()) content = "x";
      all.push_back({{"id", first + i},
                     {"content", std::move(content)},
                     {"special", one_in(2)},
                     {"normalized", one_in(2)},
                     {"lstrip", one_in(3)},
                     {"rstrip", one_in(3)},
                     {"single_word", one_in(3)}});
    }
  }

  // A vocabulary, and merges that it has both sides and the results of.
  size_t model(Json* tokenizer) {
    std::vector<std::string> tokens;
    Json vocab = Json::object(), merges = Json::array();
    const auto add = [&](const std::string& token) {
      if (token.empty() || vocab.contains(token)) return;
      vocab[token] = tokens.size();
      tokens.push_back(token);
    };
    for (const char* token : {"a", "b", "1", "\xC4\xA0", "\xE2\x96\x81", " ", "<0xC3>", "<0xA4>"}) {
      if (!one_in(8)) add(token);
    }
    for (size_t i = count(60); i > 0; --i) add(one_in(4) ? string(3000) : piece());
    for (size_t i = 0, n = count(200); i < n && !tokens.empty(); ++i) {
      const std::string left = tokens[below(tokens.size())], right = tokens[below(tokens.size())];
      if (left.size() + right.size() > 2000) continue;
      add(left + right);
      if (one_in(2)) {
        merges.push_back({left, right});
      } else if ((left + right).find(' ') == std::string::npos) {
        merges.push_back(left + " " + right);
      }
    }
    Json& made = (*tokenizer)["model"];
    made = {{"type", "BPE"}, {"vocab", vocab}, {"merges", merges}};
    for (const char* flag : {"fuse_unk", "byte_fallback", "ignore_merges"}) made[flag] = one_in(2);
    if (one_in(2) && !tokens.empty()) made["unk_token"] = tokens[below(tokens.size())];
    return tokens.size();
  }

  std::string chat_template() {
    std::string text;
    for (size_t i = count(3000); i > 0; --i) {
      text += one_of({"<|im_start|>", "<|im_start|>system\\n", "<|im_start|>system\n", "<|im_end|>",
                      "[INST]", "<<SYS>>", " [/INST]", "' ' + message", "'", "\"", "{{", "}}", "x",
                      "</think>", "<|start_header_id|>", "Cutting Knowledge Date",
                      "eos_token + ' '", "loop.last and system_message"});
    }
    return text;
  }

 private:
  std::mt19937_64& random_;
};

}  // namespace

std::string odd_expression(std::mt19937_64* random) { return Mutator(random).expression(); }

std::string odd_text(std::mt19937_64* random) {
  Mutator mutator(random);
  const size_t size = mutator.one_in(100) ? 1'000'000 : mutator.one_in(3) ? 30'000 : 300;
  std::string unit, text;
  for (size_t i = mutator.count(60); i > 0; --i) unit += mutator.piece();
  while (text.size() < size) text += mutator.one_in(100) ? mutator.piece() : unit;
  return text;
}

void mutate_tokenizer(std::mt19937_64* random, Json* tokenizer) {
  Mutator m(random);
  size_t ids = 7;  // the good file's
  for (size_t i = m.count(8); i > 0; --i) {
    switch (m.below(7)) {
      case 0:
        (*tokenizer)["normalizer"] = m.part("normalizers", &Mutator::normalizer);
        break;
      case 1: {
        const Json splits = m.part("pretokenizers", &Mutator::pre_tokenizer);
        Json& all = (*tokenizer)["pre_tokenizer"];
        all = {{"type", "Sequence"}, {"pretokenizers", {splits}}};
        if (m.one_in(2)) all["pretokenizers"].push_back(m.byte_level());
        break;
      }
      case 2:
        (*tokenizer)["decoder"] = m.part("decoders", &Mutator::decoder);
        break;
      case 3:
        (*tokenizer)["post_processor"] = m.post_processor(ids + m.below(3));
        break;
      case 4:
        (*tokenizer)["post_processor"] = nullptr;  // the good file's names its ids
        ids = m.model(tokenizer);
        m.add_tokens(tokenizer, ids);
        break;
      case 5:
        m.add_tokens(tokenizer, ids);
        break;
      default:
        (*tokenizer)["chat_template"] = m.chat_template();
    }
  }
}

}  // namespace fk::model
