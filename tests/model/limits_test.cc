// Small files that ask for much work or memory: each is refused, or takes time and memory in
// proportion to the file and the text.
#include "hostile_tokenizers.h"
#include "model/pattern.h"
#include "model/token_search.h"
#include "model/work.h"

namespace fk::model {
namespace {

constexpr size_t kText = 100'000;

Status encode(const Json& json, const std::string& text, std::vector<int32_t>* ids) {
  std::unique_ptr<Tokenizer> tokenizer;
  FK_RETURN_IF_ERROR(read(json, &tokenizer));
  return tokenizer->encode(text, {}, ids);
}

void expect_refused(const Json& json, const std::string& text,
                    const std::vector<std::string>& message) {
  std::vector<int32_t> ids;
  expect_error(encode(json, text, &ids), message);
  EXPECT_LE(ids.size(), kLengthPerByte * text.size() + kFreeLength);
}

TEST(Limits, WorkIsCounted) {
  Work work(10);
  EXPECT_TRUE(work.spend(10 * kStepsPerByte + kFreeSteps));
  EXPECT_FALSE(work.spend(1));
  expect_error(work.error(),
               {"steps", std::to_string(10 * kStepsPerByte + kFreeSteps), "10 bytes"});
  EXPECT_EQ(work.longest(), 10 * kLengthPerByte + kFreeLength);
  EXPECT_TRUE(work.write(work.longest()).ok());
  expect_error(work.write(work.longest() + 1), {"after each", std::to_string(work.longest())});
  for (int i = 0; i < 15; ++i) EXPECT_TRUE(work.write(kFreeLength).ok());
  expect_error(work.write(kFreeLength), {"from all", "1048896"});
  Work words(10);
  EXPECT_TRUE(words.word(words.longest() / 2).ok());
  expect_error(words.word(words.longest()), {"in all words"});
  EXPECT_LE(Work(size_t{1} << 30).longest(), size_t{INT32_MAX});
}

TEST(Limits, NormalizersThatMultiply) {
  Json json = plain_tokenizer();
  json["normalizer"] = sequence("normalizers", replace("a", "aaaaaaaaaa"), 12);
  expect_refused(json, repeated("a"), {"after each normalizer", "465536"});
  // At load, from what is looked for after normalisation.
  json["added_tokens"] = {{{"id", 9}, {"content", repeated("a", 1000)}, {"normalized", true}}};
  std::unique_ptr<Tokenizer> tokenizer;
  expect_error(read(json, &tokenizer), {"added_tokens", "after each normalizer"});
  json = plain_tokenizer();
  json["normalizer"] = {{"type", "Prepend"}, {"prepend", repeated("x", 60000)}};
  json["added_tokens"] = {added(9, "<s>")};
  expect_refused(json, repeated("<s>a"), {"expected at most", "bytes"});
  json = plain_tokenizer();
  json["normalizer"] = sequence("normalizers", replace("a", "b"), 33);
  expect_error(read(json, &tokenizer), {"normalizer", "at most 32"});
}

TEST(Limits, SplitsThatMultiply) {
  Json json = plain_tokenizer();
  const Json metaspace = {
      {"type", "Metaspace"}, {"replacement", "\xE2\x96\x81"}, {"prepend_scheme", "always"}};
  json["pre_tokenizer"] = sequence("pretokenizers", metaspace, 32);
  expect_refused(json, repeated(" a"), {"expected at most"});
  json["pre_tokenizer"] = sequence("pretokenizers", splits_at("."), 32);
  expect_refused(json, repeated("a"), {"steps"});
  std::unique_ptr<Tokenizer> tokenizer;
  json["pre_tokenizer"] = sequence("pretokenizers", splits_at("."), 33);
  expect_error(read(json, &tokenizer), {"pre_tokenizer", "at most 32"});
  json["pre_tokenizer"] = metaspace;
  json["pre_tokenizer"]["replacement"] = "ab";
  expect_error(read(json, &tokenizer), {"replacement", "one character", "ab"});
}

// What a known tokenizer does at most with a text: a sign of three bytes for each space.
TEST(Limits, TextsOfSpacesAreEncoded) {
  Json json = plain_tokenizer();
  json["normalizer"] = {
      {"type", "Sequence"},
      {"normalizers",
       {{{"type", "Prepend"}, {"prepend", "\xE2\x96\x81"}}, replace(" ", "\xE2\x96\x81")}}};
  std::vector<int32_t> ids;
  ASSERT_TRUE(encode(json, repeated(" "), &ids).ok());
  EXPECT_EQ(ids.size(), kText + 1);
  json = plain_tokenizer();
  json["pre_tokenizer"] = {{"type", "Metaspace"}, {"replacement", "\xE2\x96\x81"}};
  ids.clear();
  ASSERT_TRUE(encode(json, repeated("a "), &ids).ok());
}

TEST(Limits, PatternsThatTakeLong) {
  std::string alternatives = "a", groups, optional_groups;
  for (int i = 0; i < 200; ++i) groups = "(" + groups + (i == 0 ? "a" : "") + ")";
  for (int i = 0; i < 300; ++i) optional_groups += "(a)?";
  for (int i = 0; i < 700; ++i) alternatives = "a{0,3}" + std::to_string(i) + "|" + alternatives;
  const std::string hostile[] = {
      "(?:(?:a|a){22}b)?a", "(a+)+$",      "a(?!(?s).*+b)", "a(?=(?s).*b)|a",
      "(?:.*b|.*c)|a",      "a{60000}b|a", "a*+b|a",        "(?<=.{60000}b)a|a",
      "(?=(?s).*)",         alternatives,  groups,          optional_groups + "b|a"};
  for (const std::string& expression : hostile) {
    SCOPED_TRACE(expression.substr(0, 40));
    Json json = plain_tokenizer();
    json["pre_tokenizer"] = splits_at(expression);
    const double begin = seconds();
    std::vector<int32_t> ids;
    const Status status = encode(json, repeated("a"), &ids);
    EXPECT_LT(seconds() - begin, 1);  // a tenth, where the machine is quick
    if (!status.ok()) expect_error(status, {"expected at most"});
  }
  Json json = plain_tokenizer();
  json["pre_tokenizer"] = splits_at("(?:(?:a|a){22}b)?a");
  expect_refused(json, repeated("a"),
                 {"steps", std::to_string(kText * kStepsPerByte + kFreeSteps)});
}

// Machine code of PCRE2 for all of them would be 20 MB, through which a processor crawls.
TEST(Limits, ManyLongPatterns) {
  for (const std::string& expression : {repeated("(?:a)?", 7800), repeated("a*", 4000) + "b|a",
                                        repeated("(?>a|b)", 7000), repeated("\\b", 8000) + "a"}) {
    SCOPED_TRACE(expression.substr(0, 20));
    Json json = plain_tokenizer();
    json["pre_tokenizer"] = sequence("pretokenizers", splits_at(expression), 32);
    const double begin = seconds();
    std::vector<int32_t> ids;
    expect_error(encode(json, repeated("a "), &ids), {"steps"});
    EXPECT_LT(seconds() - begin, 0.5);  // a fifth, where the machine is quick; or 1 to 2
  }
}

// What a group matched is copied with every step, and nobody asks for it.
TEST(Limits, NamedGroups) {
  std::string expression;
  for (int i = 0; i < 5; ++i) expression += "(?<n" + std::to_string(i) + ">a)?";
  Json json = plain_tokenizer();
  json["pre_tokenizer"] = splits_at(expression);
  std::unique_ptr<Tokenizer> tokenizer;
  expect_error(read(json, &tokenizer), {"more than 4 named groups", "got 5"});
  json["pre_tokenizer"] = splits_at("(?<n>a)(b)|(?<m>.)");
  std::vector<int32_t> ids;
  ASSERT_TRUE(encode(json, "abba", &ids).ok());
  EXPECT_EQ(ids.size(), 4u);
}

// Where case is nothing, PCRE2 looks at each character of a range for others of its kind.
TEST(Limits, WideRanges) {
  const auto compiles = [](const std::string& expression) {
    std::shared_ptr<const Pattern> pattern;
    size_t machine_code_left = kMachineCode;
    return Pattern::compile(expression, false, &machine_code_left, &pattern);
  };
  for (const char* range :
       {"\xC4\x80-\xF4\x8F\xBF\xBF", "\\x{100}-\\x{10ffff}", "\\x{ 100 }-\\x{ 10ffff }",
        "!-\\o{4177777}", "--\xF4\x8F\xBF\xBF", "\xC4\x80 -\t\xF4\x8F\xBF\xBF",
        "]\xC4\x80-\\\xF4\x8F\xBF\xBF", "\\x80-\\N{U+10ffff}"}) {
    SCOPED_TRACE(range);
    expect_error(compiles("(?ixx)" + repeated("[" + std::string(range) + "]", 100)),
                 {"at most 2097152 characters in all ranges"});
  }
  expect_error(compiles("[\\Q\xC4\x80\\E-a]"), {"\\Q"});
  for (const char* usual : {"[A-Za-z\xC2\xB5\xC3\x80-\xC3\x96\xE4\xB8\x80-\xE9\xBE\xA5]+",
                            "(?:\\d+-\\d+-\\d+-\\d+-\\d+)", "[\\t-\\r][\\t-\\r][\\t-\\r]",
                            "[^\\x00-\\x{10ffff}]|[\\x80-\\xff\\-a]", "[\\w\\-.]+-[\\s-]"}) {
    const Status status = compiles(usual);
    EXPECT_TRUE(status.ok()) << status.message();
  }
}

TEST(Limits, TemplatesOfManyIds) {
  Json json = plain_tokenizer();
  const Json special = {{"SpecialToken", {{"id", "x"}, {"type_id", 0}}}};
  json["post_processor"] = {{"type", "TemplateProcessing"},
                            {"single", Json(20000, special)},
                            {"special_tokens", {{"x", {{"ids", Json(200000, 0)}}}}}};
  std::unique_ptr<Tokenizer> tokenizer;
  expect_error(read(json, &tokenizer), {"post_processor.single", "at most 1024 ids"});
}

TEST(Limits, DecodingIsBounded) {
  Json json = plain_tokenizer();
  const std::string name = repeated("x", 500'000);
  json["model"]["vocab"][name] = 9;
  json["model"]["unk_token"] = name;
  std::unique_ptr<Tokenizer> tokenizer;
  ASSERT_TRUE(read(json, &tokenizer).ok());
  std::string text;
  expect_error(tokenizer->decode(std::vector<int32_t>(1000, 9), true, &text), {"ids", "16841216"});
  EXPECT_TRUE(tokenizer->decode(std::vector<int32_t>(20, 9), true, &text).ok());
  EXPECT_EQ(text.size(), 10'000'000u);
}

// The longest token at each place, by trying every one.
std::vector<std::pair<size_t, size_t>> tried(const std::vector<std::string>& tokens,
                                             const std::string& text) {
  std::vector<std::pair<size_t, size_t>> all;
  for (size_t at = text.size(); at-- > 0;) {
    size_t best = tokens.size();
    for (size_t i = 0; i < tokens.size(); ++i) {
      const bool matches = !tokens[i].empty() && text.compare(at, tokens[i].size(), tokens[i]) == 0;
      if (matches && (best == tokens.size() || tokens[i].size() > tokens[best].size())) best = i;
    }
    if (best < tokens.size()) all.emplace_back(at, best);
  }
  return all;
}

TEST(TokenSearch, FindsTheLongestEverywhere) {
  uint32_t state = 1;
  const auto draw = [&](uint32_t least, uint32_t most, uint32_t letters) {
    const auto next = [&] { return (state = state * 1664525 + 1013904223) >> 16; };
    std::string text(least + next() % (most - least + 1), ' ');
    for (char& c : text) c = static_cast<char>('a' + next() % letters);
    return text;
  };
  for (uint32_t round = 0; round < 3000; ++round) {
    const uint32_t letters = 1 + round % 4;
    std::vector<std::string> tokens(1 + round % 12);
    for (std::string& token : tokens) token = draw(0, 7, letters);
    TokenSearch search;
    search.build(tokens);
    const std::string text = draw(0, 50, letters);
    std::vector<TokenSearch::Found> found;
    search.find(text, &found);
    std::vector<std::pair<size_t, size_t>> places;
    for (const auto& f : found) places.emplace_back(f.begin, f.token);
    ASSERT_EQ(places, tried(tokens, text));
  }
}

// Tokens that begin alike for long, in texts that are all beginning.
TEST(TokenSearch, TakesTimeInProportion) {
  const double begin = seconds();
  TokenSearch search;
  std::vector<TokenSearch::Found> found;
  search.build({std::string(1'000'000, 'a') + "b", "aa"});
  search.find(std::string(2'000'000, 'a'), &found);
  EXPECT_EQ(found.size(), 1'999'999u);
  std::vector<std::string> ladder, alike;
  for (size_t i = 1; i < 1400; ++i) ladder.emplace_back(i, 'a');
  search.build(ladder);
  search.find(std::string(1'000'000, 'a'), &found);
  EXPECT_EQ(found[500'000].token, 1398u);
  for (int i = 0; i < 60'000; ++i) alike.push_back("pppppppp" + std::to_string(i));
  search.build(alike);
  search.find(std::string(1'000'000, 'p'), &found);
  EXPECT_TRUE(found.empty());
  EXPECT_LT(seconds() - begin, 5);  // 23 s where each token is tried at each place
}

TEST(Limits, AddedTokensOfWhiteSpace) {
  for (const char* flag : {"lstrip", "rstrip", "single_word"}) {
    SCOPED_TRACE(flag);
    Json json = plain_tokenizer();
    json["added_tokens"] = {added(9, " ")};
    json["added_tokens"][0][flag] = true;
    const double begin = seconds();
    std::vector<int32_t> ids;
    ASSERT_TRUE(encode(json, repeated(" ", 1'000'000), &ids).ok());
    EXPECT_EQ(ids, std::vector<int32_t>(1'000'000, 9));
    EXPECT_LT(seconds() - begin, 5);
  }
}

// One word of the whole text, which merges again and again.
TEST(Limits, OneLongWord) {
  Json json = plain_tokenizer();
  std::string token = "a";
  for (int i = 0; i < 16; ++i) {
    json["model"]["merges"].push_back({token, token});
    token += token;
    json["model"]["vocab"][token] = 10 + i;
  }
  const double begin = seconds();
  std::vector<int32_t> ids;
  ASSERT_TRUE(encode(json, std::string(1 << 20, 'a'), &ids).ok());
  EXPECT_EQ(ids, std::vector<int32_t>(16, 25));
  EXPECT_LT(seconds() - begin, 10);
}

TEST(Limits, ChatTemplatesOfManyBeginnings) {
  Json json = plain_tokenizer();
  for (const char* end : {"<|im_end|>", "'<|im_end|>"}) {
    json["chat_template"] = repeated("<|im_start|>system\n", 1'000'000) + end;
    const double begin = seconds();
    std::unique_ptr<Tokenizer> tokenizer;
    ASSERT_TRUE(read(json, &tokenizer).ok());
    EXPECT_LT(seconds() - begin, 3);
  }
}

TEST(Limits, EndsOfText) {
  Json ids = Json::array();
  for (int i = 0; i < 1025; ++i) ids.push_back(0);
  const Json config = {
      {"model_type", "llama"},        {"vocab_size", 16},       {"hidden_size", 8},
      {"intermediate_size", 12},      {"num_hidden_layers", 1}, {"num_attention_heads", 2},
      {"max_position_embeddings", 8}, {"eos_token_id", ids}};
  Decoder decoder;
  const std::string file = "config.json";
  expect_error(decoder_from_huggingface(file, config, nullptr, TensorTable(file), &decoder),
               {"eos_token_id", "at most 1024", "1025"});
}

}  // namespace
}  // namespace fk::model
