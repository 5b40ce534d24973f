// Tokenizer files of less than 1 MB that ask for all the work and memory they can get, and 1 MB of
// text: loading and encoding take at most 2 seconds and 512 MB, whether they succeed or not. What
// makes each of them hostile has a test of its own in limits_test.cc.
#include <sys/resource.h>

#include <fstream>
#include <new>

#include "hostile_tokenizers.h"

namespace fk::model {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kIsWatched = true;
#else
constexpr bool kIsWatched = false;
#endif
constexpr size_t kMegabyte = 1'000'000;
constexpr size_t kTextBytes = kIsWatched ? 100'000 : kMegabyte;
constexpr double kMostSeconds = kIsWatched ? 20 : 2;
constexpr size_t kMostBytes = 512 * kMegabyte;

// Memory that the process may still ask for, of `new`, malloc and the system alike. Where a
// sanitizer watches, which itself asks for more than there is, nothing is limited; texts are
// shorter, too.
class AddressSpaceLimit {
 public:
  explicit AddressSpaceLimit(size_t more) {
    getrlimit(RLIMIT_AS, &before_);
    size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    rlimit limit = before_;
    limit.rlim_cur = pages * 4096 + more;
    if (!kIsWatched) setrlimit(RLIMIT_AS, &limit);
  }
  ~AddressSpaceLimit() { setrlimit(RLIMIT_AS, &before_); }
  AddressSpaceLimit(const AddressSpaceLimit&) = delete;

 private:
  rlimit before_{};
};

struct Hostile {
  const char* name;
  Json json;
  std::string text;  // over and over again
};

Json with_normalizer(Json normalizer) {
  Json json = plain_tokenizer();
  json["normalizer"] = std::move(normalizer);
  return json;
}

Json with_splits(Json splits) {
  Json json = plain_tokenizer();
  json["pre_tokenizer"] = std::move(splits);
  return json;
}

Json with_added(const std::vector<std::string>& tokens) {
  Json json = plain_tokenizer();
  json["added_tokens"] = Json::array();
  for (const std::string& token : tokens) {
    json["added_tokens"].push_back(added(9 + static_cast<int>(json["added_tokens"].size()), token));
  }
  return json;
}

Json with_merges() {
  Json json = plain_tokenizer();
  std::string token = "a";
  for (int i = 0; i < 16; ++i) {
    json["model"]["merges"].push_back({token, token});
    token += token;
    json["model"]["vocab"][token] = 10 + i;
  }
  return json;
}

std::vector<std::string> with_one_beginning(size_t count) {
  std::vector<std::string> tokens;
  for (size_t i = 0; i < count; ++i) tokens.push_back("pppppppp" + std::to_string(i));
  return tokens;
}

std::vector<std::string> ladder(size_t count) {
  std::vector<std::string> tokens;
  for (size_t i = 1; i <= count; ++i) tokens.emplace_back(i, 'a');
  return tokens;
}

std::vector<Hostile> all_hostile() {
  const Json metaspace = {
      {"type", "Metaspace"}, {"replacement", "\xE2\x96\x81"}, {"prepend_scheme", "always"}};
  std::string optional_groups;
  for (int i = 0; i < 300; ++i) optional_groups += "(a)?";
  Json stripped = with_added({" "});
  stripped["added_tokens"][0]["lstrip"] = stripped["added_tokens"][0]["rstrip"] = true;
  Json long_unknown = plain_tokenizer();
  long_unknown["model"]["vocab"][std::string(450'000, 'x')] = 9;
  long_unknown["model"]["unk_token"] = std::string(450'000, 'x');
  return {
      {"multiplying normalizers",
       with_normalizer(sequence("normalizers", replace("a", "aaaaaaaaaa"), 12)), "a"},
      {"a normalizer that doubles", with_normalizer(replace("a", "aa")), "a"},
      {"normalizers that copy", with_normalizer(sequence("normalizers", replace("q", "a"), 32)),
       "a"},
      {"normalizers that compose", with_normalizer(sequence("normalizers", {{"type", "NFKD"}}, 32)),
       "\xEF\xB7\xBA"},
      {"a long prefix",
       with_normalizer({{"type", "Prepend"}, {"prepend", std::string(900'000, 'x')}}), "a"},
      {"Metaspace again and again", with_splits(sequence("pretokenizers", metaspace, 32)), " a"},
      {"Metaspace", with_splits(metaspace), " "},
      {"every character apart", with_splits(sequence("pretokenizers", splits_at("."), 32)), "a"},
      {"every character apart, once", with_splits(splits_at(".")), "a"},
      {"alternatives", with_splits(splits_at("(?:(?:a|a){22}b)?a")), "a"},
      {"nested repetition", with_splits(splits_at("(a+)+$")), "a"},
      {"a look to the end", with_splits(splits_at("a(?=(?s).*b)|a")), "a"},
      {"a look behind", with_splits(splits_at("(?<=.{60000}b)a|a")), "a"},
      {"groups", with_splits(splits_at(optional_groups + "b|a")), "a"},
      {"long patterns",
       with_splits(sequence("pretokenizers", splits_at(repeated("(?:a)?", 7800)), 32)), "a "},
      {"a long added token", with_added({std::string(900'000, 'a') + "b", "aa"}), "a"},
      {"tokens that begin alike", with_added(with_one_beginning(15'000)), "p"},
      {"tokens that begin each other", with_added(ladder(1'300)), "a"},
      {"added white space", std::move(stripped), " "},
      {"one long word", with_merges(), "a"},
      {"a long unknown token", std::move(long_unknown), "q"},
      {"characters of four bytes", plain_tokenizer(), "\xF0\x9F\x98\x80"},
  };
}

TEST(Bars, OfHostileTokenizersAtOneMegabyte) {
  for (const Hostile& hostile : all_hostile()) {
    SCOPED_TRACE(hostile.name);
    ASSERT_LT(dump(hostile.json).size(), kMegabyte);
    const std::string text = repeated(hostile.text, kTextBytes);
    const AddressSpaceLimit limit(kMostBytes);
    try {
      std::unique_ptr<Tokenizer> tokenizer;
      const double begin = seconds();
      const Status status = read(hostile.json, &tokenizer);
      const double loaded = seconds();
      EXPECT_LT(loaded - begin, kMostSeconds);
      if (!status.ok()) continue;
      std::vector<int32_t> ids;
      (void)tokenizer->encode(text, {}, &ids).ok();
      EXPECT_LT(seconds() - loaded, kMostSeconds);
    } catch (const std::bad_alloc&) {
      ADD_FAILURE() << "more than 512 MB";
    }
  }
}

}  // namespace
}  // namespace fk::model
