// Reads JSON from files that are not trusted: the depth is bounded, no key comes twice, and the
// text is valid UTF-8.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "core/status.h"

namespace fk::model {

using Json = nlohmann::json;

constexpr int kMaxJsonDepth = 64;

// Holds a whole document. Json's own destructor allocates memory for each array and object that is
// not empty, and if there is none left, it ends the program; this destructor empties them first,
// from the inside out.
class JsonDocument : public Json {
 public:
  JsonDocument() = default;
  JsonDocument(const JsonDocument&) = delete;
  JsonDocument& operator=(const JsonDocument&) = delete;
  ~JsonDocument();
};

// Parses a document, which must be an object. `file` is the name in errors.
Status parse_json(const std::string& file, std::string_view text, Json* json);

// Reads the fields of an object; errors name the file and the field, with `prefix` in front. `get`
// fails if a field has another type, if an integer is outside [low, high], or if a number is not
// finite. An absent field, or null, leaves *value as it is, so that it keeps its default. The
// object must outlive this.
class JsonFields {
 public:
  JsonFields(std::string file, const Json& object, std::string prefix = "")
      : file_(std::move(file)), prefix_(std::move(prefix)), object_(object) {}

  bool has(const char* name) const;
  // Returns the field's value, or null if it is absent or null.
  const Json* find(const char* name) const;
  Status get(const char* name, int64_t* value, int64_t low, int64_t high) const;
  Status get(const char* name, double* value) const;
  Status get(const char* name, bool* value) const;
  Status get(const char* name, std::string* value) const;
  // Returns an error about a field.
  Status error(const char* name, const std::string& what) const;
  const std::string& file() const { return file_; }

 private:
  std::string file_;
  std::string prefix_;
  const Json& object_;
};

// These return how an error shows a value or a text: shortened, and with nothing that controls a
// terminal.
std::string shown(const Json& json);
std::string shown_text(std::string_view text);

// Returns the document as text, on one line or with an indent. Bytes that are not UTF-8, as files
// may have, become U+FFFD.
inline std::string dump(const Json& json, int indent = -1) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

}  // namespace fk::model
