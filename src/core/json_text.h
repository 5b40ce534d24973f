// Writes JSON as text, piece by piece. No document is held in memory on the way: nlohmann's takes
// memory even to be destroyed, and a program that has none left would end there.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace fk {

// Appends a string with its quotes. Bytes that are not UTF-8, as files may have, become U+FFFD.
void append_json(std::string& json, std::string_view text);
// Appends a number that reads back as the same one; null where it is not finite, but 1e999, which
// readers take for infinity, where it is infinite.
void append_json(std::string& json, double number);

inline void append_json(std::string& json, const char* text) {
  append_json(json, std::string_view(text));
}
inline void append_json(std::string& json, bool value) { json += value ? "true" : "false"; }
template <class Integer, std::enable_if_t<std::is_integral_v<Integer>, int> = 0>
void append_json(std::string& json, Integer value) {
  json += std::to_string(value);
}
template <class T>
void append_json(std::string& json, const std::vector<T>& values) {
  json += '[';
  for (size_t i = 0; i < values.size(); ++i) {
    if (i > 0) json += ", ";
    append_json(json, values[i]);
  }
  json += ']';
}

// Writes an object, whose members are added one after the other.
class JsonObject {
 public:
  template <class Value>
  JsonObject& add(std::string_view key, const Value& value) {
    text_ += text_.empty() ? "{" : ", ";
    append_json(text_, key);
    text_ += ": ";
    append_json(text_, value);
    return *this;
  }
  std::string text() const { return text_.empty() ? "{}" : text_ + "}"; }

 private:
  std::string text_;
};

}  // namespace fk
