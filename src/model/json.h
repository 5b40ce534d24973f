// JSON from files that are not trusted: bounded depth, no key twice, valid UTF-8.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "core/status.h"

namespace fk::model {

using Json = nlohmann::json;

constexpr int kMaxJsonDepth = 64;

// A document of its own. Json's destructor takes memory for each array and object that is not
// empty, and where there is none the program would end: this one empties them from the inside out.
class JsonDocument : public Json {
 public:
  JsonDocument() = default;
  JsonDocument(const JsonDocument&) = delete;
  JsonDocument& operator=(const JsonDocument&) = delete;
  ~JsonDocument();
};

// `file` is what errors name. The document must be an object.
Status parse_json(const std::string& file, std::string_view text, Json* json);

// Fields of an object, with the file and field in the error. An absent field (or null) leaves
// *value as it is, so that defaults stand.
class JsonFields {
 public:
  JsonFields(std::string file, const Json& object, std::string prefix = "")
      : file_(std::move(file)), prefix_(std::move(prefix)), object_(object) {}

  bool has(const char* name) const;
  const Json* find(const char* name) const;  // null where absent or null
  Status get(const char* name, int64_t* value, int64_t low, int64_t high) const;
  Status get(const char* name, double* value) const;  // finite
  Status get(const char* name, bool* value) const;
  Status get(const char* name, std::string* value) const;
  Status error(const char* name, const std::string& what) const;
  const std::string& file() const { return file_; }

 private:
  std::string file_;
  std::string prefix_;
  const Json& object_;
};

// How a value is shown in an error, shortened.
std::string shown(const Json& json);
std::string shown_text(std::string_view text);

// On one line, or with an indent. Bytes that are not UTF-8, as files may have, become U+FFFD.
inline std::string dump(const Json& json, int indent = -1) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

}  // namespace fk::model
