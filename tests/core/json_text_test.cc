// What is written as JSON, as another reader of JSON finds it.
#include "core/json_text.h"

#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

namespace fk {
namespace {

TEST(JsonText, ReadsBackAsWhatWasWritten) {
  const std::string text = "quotes \" and \\, a line\n, a bell\a, \xC3\xA9, \xE2\x96\x81";
  const std::vector<int32_t> none, some = {1, -2, std::numeric_limits<int32_t>::min()};
  const auto json = nlohmann::json::parse(JsonObject()
                                              .add("text", text)
                                              .add("literal", "x")
                                              .add("yes", true)
                                              .add("large", std::numeric_limits<int64_t>::max())
                                              .add("tenth", 0.1)
                                              .add("whole", 3.0)
                                              .add("small", 1e-300)
                                              .add("none", none)
                                              .add("some", some)
                                              .add("unknown", 0.0 / 0.0)
                                              .text());
  EXPECT_EQ(json["text"], text);
  EXPECT_EQ(json["literal"], "x");
  EXPECT_EQ(json["yes"], true);
  EXPECT_EQ(json["large"], std::numeric_limits<int64_t>::max());
  EXPECT_EQ(json["tenth"], 0.1);
  EXPECT_TRUE(json["whole"].is_number_float());
  EXPECT_EQ(json["small"], 1e-300);
  EXPECT_TRUE(json["none"].is_array() && json["none"].empty());
  EXPECT_EQ(json["some"].get<std::vector<int32_t>>(), some);
  EXPECT_TRUE(json["unknown"].is_null());
  EXPECT_EQ(JsonObject().text(), "{}");
}

TEST(JsonText, BytesThatAreNoTextAreReplaced) {
  const auto json = nlohmann::json::parse(JsonObject().add("text", "a\xFF\xE2\x96").text());
  EXPECT_EQ(json["text"], "a\xEF\xBF\xBD\xEF\xBF\xBD");
}

}  // namespace
}  // namespace fk
