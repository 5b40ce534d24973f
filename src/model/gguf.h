// The GGUF container, versions 2 and 3, little endian: typed values by key, then tensors.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "model/tensor_table.h"

namespace fk::model {

enum class GgufType : uint32_t {
  kUint8 = 0,
  kInt8 = 1,
  kUint16 = 2,
  kInt16 = 3,
  kUint32 = 4,
  kInt32 = 5,
  kFloat32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kUint64 = 10,
  kInt64 = 11,
  kFloat64 = 12,
};

struct GgufValue {
  GgufType type;  // of the value, or of an array's elements
  bool array = false;
  uint64_t count = 1;
  std::string_view bytes;  // the elements, strings with their lengths; checked to be whole
};

class Gguf {
 public:
  // Checks the whole structure and adds the tensors to the table. `file` outlives both.
  static Status parse(const std::string& file, std::string_view bytes, Gguf* gguf,
                      TensorTable* table);

  const std::string& file() const { return *file_; }
  bool has(const std::string& key) const { return values_.count(key) != 0; }
  Status error(const std::string& key, const std::string& what) const;

  // Absent keys leave *value as it is.
  Status get(const std::string& key, int64_t* value, int64_t low, int64_t high) const;
  Status get(const std::string& key, double* value) const;  // finite
  Status get(const std::string& key, bool* value) const;
  Status get(const std::string& key, std::string* value) const;
  // Views into the file.
  Status get(const std::string& key, std::vector<std::string_view>* values) const;
  Status get(const std::string& key, std::vector<float>* values) const;
  Status get(const std::string& key, std::vector<int32_t>* values) const;

 private:
  const GgufValue* find(const std::string& key) const;

  const std::string* file_ = nullptr;
  std::map<std::string, GgufValue> values_;
};

}  // namespace fk::model
