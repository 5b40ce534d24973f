// Parses JSON with limits and reads fields with checks.
#include "model/json.h"

#include <algorithm>
#include <cmath>

#include "core/printable.h"
#include "model/mapped_file.h"

namespace fk::model {
namespace {

// Receives the parser's events and builds the document. A function that returns false stops the
// parser; `what` then says why.
class Builder : public nlohmann::json_sax<Json> {
 public:
  explicit Builder(Json* root) : root_(root) {}

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t&) override { return add(value); }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t&) override { return false; }

  bool start_object(size_t) override { return open(Json::object()); }
  bool start_array(size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    const auto [place, fresh] = stack_.back()->emplace(name, nullptr);
    if (!fresh) {
      what = "the key " + shown_text(name) + " comes twice";
      return false;
    }
    member_ = &*place;
    return true;
  }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    // The text is "[json.exception.parse_error.101] parse error at line 1, column 2: ..."; only its
    // last part is shown.
    const std::string text = error.what();
    const size_t colon = text.find(": ");
    what = "is not JSON at byte " + std::to_string(position) +
           (colon == std::string::npos ? "" : printable(text.substr(colon)));
    return false;
  }

  std::string what;

 private:
  // Puts a value into the innermost open container and returns where it is.
  template <class Value>
  Json* place(Value&& value) {
    if (stack_.empty()) {
      *root_ = std::forward<Value>(value);
      return root_;
    }
    if (stack_.back()->is_array()) {
      stack_.back()->push_back(std::forward<Value>(value));
      return &stack_.back()->back();
    }
    *member_ = std::forward<Value>(value);
    return member_;
  }

  template <class Value>
  bool add(Value&& value) {
    place(Json(std::forward<Value>(value)));
    return true;
  }

  bool open(Json&& container) {
    if (stack_.size() >= kMaxJsonDepth) {
      what = "nests deeper than " + std::to_string(kMaxJsonDepth) + " levels";
      return false;
    }
    stack_.push_back(place(std::move(container)));
    return true;
  }

  bool close() {
    stack_.pop_back();
    return true;
  }

  Json* root_;
  std::vector<Json*> stack_;  // the open containers, the outermost first
  Json* member_ = nullptr;    // where the value of the last key goes
};

// Empties a document from the inside out.
void take_apart(Json* json) noexcept {
  if (!json->is_structured()) return;
  for (Json& part : *json) take_apart(&part);
  json->clear();
}

}  // namespace

JsonDocument::~JsonDocument() { take_apart(this); }

std::string shown_text(std::string_view text) {
  constexpr size_t kLongest = 60;
  size_t end = std::min(text.size(), kLongest);
  // The cut moves to a character's beginning, or half a character would be left.
  while (end < text.size() && end > kLongest - 4 && (text[end] & 0xC0) == 0x80) --end;
  return "\"" + printable(text.substr(0, end)) + (text.size() > end ? "...\"" : "\"");
}

std::string shown(const Json& json) {
  if (json.is_string()) return shown_text(std::string_view(json.get_ref<const std::string&>()));
  if (json.is_array()) return "an array of " + std::to_string(json.size());
  if (json.is_object()) return "an object";
  return json.dump();
}

Status parse_json(const std::string& file, std::string_view text, Json* json) {
  Builder builder(json);
  if (!Json::sax_parse(text.begin(), text.end(), &builder)) return file_error(file, builder.what);
  if (!json->is_object()) return file_error(file, "expected a JSON object, got " + shown(*json));
  return {};
}

const Json* JsonFields::find(const char* name) const {
  if (!object_.is_object()) return nullptr;
  const auto found = object_.find(name);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

bool JsonFields::has(const char* name) const { return find(name) != nullptr; }

Status JsonFields::error(const char* name, const std::string& what) const {
  return file_error(file_, prefix_ + name + ": " + what);
}

Status JsonFields::get(const char* name, int64_t* value, int64_t low, int64_t high) const {
  const Json* field = find(name);
  if (field == nullptr) return {};
  bool fits = field->is_number_integer();
  if (fits && field->is_number_unsigned()) fits = field->get<uint64_t>() <= INT64_MAX;
  if (fits) {
    const int64_t number = field->get<int64_t>();
    if (number >= low && number <= high) {
      *value = number;
      return {};
    }
  }
  return error(name, "expected an integer from " + std::to_string(low) + " to " +
                         std::to_string(high) + ", got " + shown(*field));
}

Status JsonFields::get(const char* name, double* value) const {
  const Json* field = find(name);
  if (field == nullptr) return {};
  if (!field->is_number() || !std::isfinite(field->get<double>())) {
    return error(name, "expected a finite number, got " + shown(*field));
  }
  *value = field->get<double>();
  return {};
}

Status JsonFields::get(const char* name, bool* value) const {
  const Json* field = find(name);
  if (field == nullptr) return {};
  if (!field->is_boolean()) return error(name, "expected true or false, got " + shown(*field));
  *value = field->get<bool>();
  return {};
}

Status JsonFields::get(const char* name, std::string* value) const {
  const Json* field = find(name);
  if (field == nullptr) return {};
  if (!field->is_string()) return error(name, "expected a string, got " + shown(*field));
  *value = field->get<std::string>();
  return {};
}

}  // namespace fk::model
