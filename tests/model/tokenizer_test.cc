// tokenizer.json: one bad file per rule; streams, chats, and Unicode.
#include "model/tokenizer.h"

#include "files.h"
#include "model/added_tokens.h"
#include "model/formats.h"
#include "model/pattern.h"
#include "model/text_tokenizer.h"
#include "model/unicode.h"

namespace fk::model {
namespace {

const std::string kTokenizerJson = "tokenizer.json";

Status read_tokenizer(const std::string& text, std::unique_ptr<Tokenizer>* tokenizer) {
  Json json;
  FK_RETURN_IF_ERROR(parse_json(kTokenizerJson, text, &json));
  return tokenizer_from_json(kTokenizerJson, json, nullptr, tokenizer);
}

Status read_tokenizer(const std::string& text) {
  std::unique_ptr<Tokenizer> tokenizer;
  return read_tokenizer(text, &tokenizer);
}

std::unique_ptr<Tokenizer> chat(const std::string& chat_template) {
  Json json, config = {{"chat_template", chat_template}};
  EXPECT_TRUE(parse_json(kTokenizerJson, tokenizer_json(), &json).ok());
  std::unique_ptr<Tokenizer> tokenizer;
  EXPECT_TRUE(tokenizer_from_json(kTokenizerJson, json, &config, &tokenizer).ok());
  return tokenizer;
}

TEST(TokenizerJson, GoodFileIsRead) {
  std::unique_ptr<Tokenizer> tokenizer;
  const Status status = read_tokenizer(tokenizer_json(), &tokenizer);
  ASSERT_TRUE(status.ok()) << status.message();
  std::vector<int32_t> ids;
  ASSERT_TRUE(tokenizer->encode("aba11 ab<s>", {}, &ids).ok());
  EXPECT_EQ(ids, (std::vector<int32_t>{6, 5, 3, 3, 4, 2, 6}));
  EXPECT_EQ(decoded(*tokenizer, ids), "aba11 ab");
  EXPECT_EQ(decoded(*tokenizer, ids, false), "<s>aba11 ab<s>");
  EXPECT_EQ(decoded(*tokenizer, {-1, 7, 1 << 30, 0}), "a");
  ids.clear();
  ASSERT_TRUE(tokenizer->encode("a<s>", {false, false}, &ids).ok());
  EXPECT_EQ(ids, std::vector<int32_t>{0});  // the vocabulary has no < and no s
}

TEST(TokenizerJson, BadFilesAreRefused) {
  struct Broken {
    std::string from, to;
    std::vector<std::string> message;
  };
  const Broken broken[] = {
      {R"("type": "NFC")", R"("type": "Lowercase")", {"normalizer", "Lowercase"}},
      {R"({"type": "NFC"})", R"({"type": "Sequence", "normalizers": 1})", {"normalizers"}},
      {R"({"type": "NFC"})", R"({"type": "Replace", "pattern": 1, "content": ""})", {"pattern"}},
      {R"("Regex": "\\d")", R"("Regex": "(")", {"pattern", "regular expression"}},
      {R"("Regex": "\\d")", R"("Regex": "\\C")", {"pattern", "regular expression"}},
      {R"("Regex": "\\d")", R"("Glob": "x")", {"pattern"}},
      {R"("Regex": "\\d")", R"("Regex": "")", {"pattern"}},
      {"Isolated", "Sideways", {"behavior", "Sideways"}},
      {R"("invert": false)", R"("invert": 1)", {"invert"}},
      {R"("type": "Split")", R"("type": "BertPreTokenizer")", {"BertPreTokenizer"}},
      {R"("use_regex": true})", R"("use_regex": true}, {"type": "Digits"})", {"ByteLevel", "last"}},
      {R"("decoder": {"type": "ByteLevel"})", R"("decoder": {"type": "CTC"})", {"decoder", "CTC"}},
      {"TemplateProcessing", "BertProcessing", {"post_processor", "BertProcessing"}},
      {R"("ids": [6])", R"("ids": [7])", {"special_tokens", "below 7"}},
      {R"("ids": [6])", R"("ids": [-1])", {"special_tokens"}},
      {R"({"SpecialToken": {"id": "<s>")", R"({"SpecialToken": {"id": "<x>")", {"single"}},
      {R"("model": {"type": "BPE")", R"("model": {"type": "Unigram")", {"model", "Unigram"}},
      {R"("model":)", R"("modem":)", {"model", "missing"}},
      {R"("a": 0, )", R"("a": 0, "a": 7, )", {"\"a\"", "twice"}},
      {R"("a": 0, )", R"("a": 0, "c": 0, )", {"one token for each id"}},
      {R"("a": 0, )", R"("a": 99999999, )", {"vocab", "99999999"}},
      {R"("a": 0, )", R"("a": -1, )", {"vocab", "-1"}},
      {R"("a": 0, )", R"("a": "0", )", {"vocab"}},
      {R"(["a b", ["ab", "a"]])", R"(1)", {"merges", "array"}},
      {R"("a b")", R"("ab")", {"merge 0", "two tokens"}},
      {R"("a b")", R"("a  b")", {"merge 0", "two tokens"}},
      {R"("a b")", R"(" a")", {"merge 0"}},
      {R"(["ab", "a"])", R"(["ab", ""])", {"merge 1", "a character or more"}},
      {R"(["ab", "a"])", R"(["", "ab"])", {"merge 1", "a character or more"}},
      {R"(["ab", "a"])", R"(["b", "a"])", {"merge 1", "among the tokens"}},
      {R"(["ab", "a"])", R"(["ab", "x"])", {"merge 1", "among the tokens"}},
      {R"(["ab", "a"])", R"(["ab", "a", "b"])", {"merge 1"}},
      {R"("unk_token": null)", R"("unk_token": "?")", {"unk_token", "?"}},
      {R"("unk_token": null)", R"("dropout": 0.5)", {"dropout"}},
      {R"("unk_token": null)", R"("end_of_word_suffix": "</w>")", {"end_of_word_suffix"}},
      {R"({"id": 6, )", R"({)", {"added_tokens", "id"}},
      {R"({"id": 6, )", R"({"id": 1, )", {"added_tokens", "one token for each id"}},
      {R"("content": "<s>")", R"("content": "")", {"added_tokens", "content"}},
      {R"("added_tokens": [)", R"("added_tokens": 1, "x": [)", {"added_tokens", "array"}},
  };
  for (const Broken& b : broken) {
    SCOPED_TRACE(b.to);
    std::string text = tokenizer_json();
    const size_t at = text.find(b.from);
    ASSERT_NE(at, std::string::npos);
    text.replace(at, b.from.size(), b.to);
    std::vector<std::string> message = b.message;
    message.push_back(kTokenizerJson);
    expect_error(read_tokenizer(text), message);
  }
}

TEST(TokenizerJson, CutAnywhere) {
  const std::string text = tokenizer_json();
  for (size_t size = 0; size < text.size(); size += 7) {
    EXPECT_FALSE(read_tokenizer(text.substr(0, size)).ok()) << size;
  }
}

TEST(TokenStream, CharactersAreWhole) {
  GgufFile file = GgufFile::sentencepiece();
  Model model;
  ASSERT_TRUE(load_bytes(file.build(), &model).ok());
  const Tokenizer& tokenizer = *model.tokenizer;
  std::vector<int32_t> ids;
  const std::string text = "hi \xE2\x82\xAC \xF0\x9F\x98\x80 hi";
  ASSERT_TRUE(tokenizer.encode(text, {}, &ids).ok());
  TokenStream stream(tokenizer, /*continues=*/false);
  std::string joined;
  for (int32_t id : ids) {
    const std::string part = stream.push(id);
    EXPECT_TRUE(is_utf8(part));
    joined += part;
  }
  EXPECT_EQ(joined + stream.finish(), text);
  // A beginning that nothing completes, and bytes that begin nothing.
  TokenStream broken(tokenizer);
  EXPECT_EQ(broken.push(3 + 0xE2), "");
  EXPECT_EQ(broken.push(3 + 0x82), "");
  EXPECT_EQ(broken.push(tokenizer.find("h")), "\xEF\xBF\xBDh");
  EXPECT_EQ(broken.push(3 + 0xFF), "\xEF\xBF\xBD");
  EXPECT_EQ(broken.push(3 + 0xF0), "");
  EXPECT_EQ(broken.finish(), "\xEF\xBF\xBD");
}

TEST(Chat, Formats) {
  const std::vector<ChatMessage> talk = {
      {"system", "S"}, {"user", "A"}, {"assistant", "B"}, {"user", "C"}};
  const auto written = [&](const std::string& chat_template, size_t skip = 0) {
    std::string text;
    const auto tokenizer = chat(chat_template);
    const std::vector<ChatMessage> messages(talk.begin() + static_cast<long>(skip), talk.end());
    EXPECT_TRUE(format_chat(*tokenizer, messages, true, &text).ok());
    return text;
  };
  EXPECT_EQ(written("<|im_start|>"),
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nA<|im_end|>\n"
            "<|im_start|>assistant\nB<|im_end|>\n<|im_start|>user\nC<|im_end|>\n"
            "<|im_start|>assistant\n");
  EXPECT_EQ(written("'<|im_start|>system\\nHi.<|im_end|>\\n'", 3),
            "<|im_start|>system\nHi.<|im_end|>\n<|im_start|>user\nC<|im_end|>\n"
            "<|im_start|>assistant\n");
  EXPECT_EQ(written("'<|im_start|>system\\n' + x + '<|im_end|>\\n'", 3),
            "<|im_start|>user\nC<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(written("[INST] <<SYS>>"),
            "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nA [/INST] B </s><s>[INST] C [/INST]");
  EXPECT_EQ(written("'[INST] ' + x + ' [/INST]'"), "<s>[INST] S\n\nA [/INST]B</s>[INST] C [/INST]");
  EXPECT_EQ(written("<|start_header_id|>", 3),
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nC<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n");
  std::string text;
  expect_error(format_chat(*chat(""), talk, true, &text), {"no chat template"});
  expect_error(format_chat(*chat("x"), talk, true, &text), {"no supported family"});
  expect_error(format_chat(*chat("[INST]"), {{"tool", ""}}, true, &text), {"role", "tool"});
  expect_error(format_chat(*chat("[INST]"), {{"user", ""}, {"system", ""}}, true, &text),
               {"system message first"});
}

TEST(Chat, MistralVersions) {
  const std::vector<ChatMessage> talk = {
      {"system", "S"}, {"user", "A"}, {"assistant", " B "}, {"user", "C"}};
  const auto written = [&](const std::string& chat_template) {
    std::string text;
    EXPECT_TRUE(format_chat(*chat(chat_template), talk, true, &text).ok());
    return text;
  };
  EXPECT_EQ(written(R"(loop.first and system_message " [INST] " " [/INST]" " " + message)"),
            "<s> [INST] S\n\nA [/INST]  B </s> [INST] C [/INST]");
  EXPECT_EQ(written(R"(loop.last and system_message "[INST] " "[/INST]" )"
                    R"(" " + message["content"]|trim + eos_token)"),
            "<s>[INST] A[/INST] B</s>[INST] S\n\nC[/INST]");
  EXPECT_EQ(written(R"(loop.last and system_message "[INST]" "[/INST]")"),
            "<s>[INST]A[/INST] B </s>[INST]S\n\nC[/INST]");
}

TEST(Chat, OnlyTheLastAnswerKeepsItsThoughts) {
  const auto tokenizer = chat("<|im_start|> </think>");
  const std::vector<ChatMessage> talk = {{"user", "A"},
                                         {"assistant", "<think>\nhm\n</think>\n\nB"},
                                         {"user", "C"},
                                         {"assistant", "<think>so</think>D"}};
  std::string text;
  ASSERT_TRUE(format_chat(*tokenizer, talk, false, &text).ok());
  EXPECT_EQ(text,
            "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n"
            "<|im_start|>user\nC<|im_end|>\n"
            "<|im_start|>assistant\n<think>\nso\n</think>\n\nD<|im_end|>\n");
}

TEST(Chat, ContentsAreNeverSpecial) {
  const auto tokenizer = chat("[INST]");
  std::vector<int32_t> ids;
  ASSERT_TRUE(encode_chat(*tokenizer, {{"user", "a<s>b"}}, true, &ids).ok());
  EXPECT_EQ(ids, (std::vector<int32_t>{6, 0, 1}));  // one <s>, the template's
}

// All matches of an expression.
Status find_all(const std::string& expression, const std::string& text, size_t* machine_code_left,
                Ranges* found) {
  std::shared_ptr<const Pattern> pattern;
  FK_RETURN_IF_ERROR(Pattern::compile(expression, false, machine_code_left, &pattern));
  Work work(text.size());
  Matcher matcher(&work);
  Matches matches(*pattern, text, &matcher);
  size_t begin, end;
  while (matches.next(&begin, &end)) found->emplace_back(begin, end);
  return matches.status();
}
Status find_all(const std::string& expression, const std::string& text, Ranges* found) {
  size_t machine_code_left = kMachineCode;
  return find_all(expression, text, &machine_code_left, found);
}

TEST(Pattern, MachineCodeAndTheInterpreterFindTheSame) {
  for (const char* expression : {kGpt2Pattern, kLlama3Pattern, kQwen2Pattern, kTekkenPattern}) {
    Ranges by_machine_code, interpreted;
    size_t left = kMachineCode, none = 0;
    const std::string text = "He's 12345 \xC3\xA4hnlich,  wie\r\n\n\tdu: \xE4\xB8\x80!? ";
    ASSERT_TRUE(find_all(expression, text, &left, &by_machine_code).ok());
    ASSERT_TRUE(find_all(expression, text, &none, &interpreted).ok());
    EXPECT_LT(left, kMachineCode);
    EXPECT_GT(left, kMachineCode - 4000) << "what known tokenizers need";
    EXPECT_EQ(none, 0u);
    EXPECT_EQ(by_machine_code, interpreted);
    EXPECT_GT(interpreted.size(), 8u);
  }
}

TEST(Pattern, GivesUp) {
  Ranges found;
  expect_error(find_all("(a+)+$", std::string(64, 'a') + "b", &found), {"steps", "65 bytes"});
  expect_error(find_all(std::string(100000, 'a'), "a", &found), {"expected", "8192", "100000"});
  expect_error(find_all("(a)\\1", "a", &found), {"back references"});
  expect_error(find_all("(*LIMIT_MATCH=1)a", "a", &found), {"(*"});
}

TEST(Pattern, EmptyMatches) {
  Ranges found;
  ASSERT_TRUE(find_all("b*", "\xC3\xA4\x62\x62\xC3\xA4", &found).ok());
  EXPECT_EQ(found, (Ranges{{2, 4}}));
}

TEST(Pattern, LiteralsAreFoundFromTheLeft) {
  std::shared_ptr<const Pattern> pattern;
  uint32_t state = 1;
  for (int i = 0; i < 2000; ++i) {
    const auto draw = [&](uint32_t most) {
      std::string text;
      state = state * 1664525 + 1013904223;
      for (uint32_t n = 1 + (state >> 16) % most; n > 0; --n) {
        state = state * 1664525 + 1013904223;
        text += state >> 30 == 0 ? 'b' : 'a';
      }
      return text;
    };
    const std::string literal = draw(6), text = draw(60);
    ASSERT_TRUE(Pattern::compile(literal, true, nullptr, &pattern).ok());
    Work work(text.size());
    Matcher matcher(&work);
    Matches matches(*pattern, text, &matcher);
    size_t begin, end, at = 0;
    while (matches.next(&begin, &end)) {
      EXPECT_EQ(begin, text.find(literal, at));
      EXPECT_EQ(end, begin + literal.size());
      at = end;
    }
    EXPECT_EQ(text.find(literal, at), std::string::npos);
  }
}

TEST(Unicode, Invalid) {
  EXPECT_EQ(to_utf8("a\xC0\x80\xED\xA0\x80\xF4\x90\x80\x80\xE2\x82z"),
            "a\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"
            "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBDz");
  EXPECT_FALSE(is_utf8("\xE2\x82"));
  EXPECT_TRUE(utf8_incomplete("\xF0\x9F\x98"));
  EXPECT_FALSE(utf8_incomplete("\xF0\x9Fz"));
}

TEST(Unicode, Composition) {
  EXPECT_EQ(nfc("e\xCC\x81"), "\xC3\xA9");
  EXPECT_EQ(nfc("\xE1\x84\x80\xE1\x85\xA1\xE1\x86\xA8"), "\xEA\xB0\x81");  // Hangul
  EXPECT_EQ(nfc("q\xCC\x87\xCC\xA3"), "q\xCC\xA3\xCC\x87");                // reordered
  EXPECT_EQ(nfc("\xE2\x84\xAB"), "\xC3\x85");                              // Angstrom
  EXPECT_EQ(nfc("\xE0\xA5\x98"), "\xE0\xA4\x95\xE0\xA4\xBC");              // excluded
}

}  // namespace
}  // namespace fk::model
