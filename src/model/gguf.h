// Reads the GGUF container, versions 2 and 3, little endian: typed values by key, then tensors.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "model/tensor_table.h"

namespace fk::model {

// Lists the types of values, with the numbers that GGUF gives them.
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
  uint64_t count = 1;      // of elements
  std::string_view bytes;  // the elements in the file, of strings with their lengths; all are whole
};

// Holds the keys and values of one file. They point into the file's bytes, which must outlive this.
class Gguf {
 public:
  // Checks the whole header, and adds the tensors to the table. `file` is the name for errors; it
  // must outlive both.
  static Status parse(const std::string& file, std::string_view bytes, Gguf* gguf,
                      TensorTable* table);

  const std::string& file() const { return *file_; }
  bool has(const std::string& key) const { return values_.count(key) != 0; }
  // Returns an error that names the file and the key.
  Status error(const std::string& key, const std::string& what) const;

  // These set *value to a key's value, and fail if it has another type. An absent key leaves *value
  // as it is, so that it keeps its default. An integer must lie in [low, high], and a float must be
  // finite.
  Status get(const std::string& key, int64_t* value, int64_t low, int64_t high) const;
  Status get(const std::string& key, double* value) const;
  Status get(const std::string& key, bool* value) const;
  Status get(const std::string& key, std::string* value) const;
  // The strings are views into the file.
  Status get(const std::string& key, std::vector<std::string_view>* values) const;
  Status get(const std::string& key, std::vector<float>* values) const;
  Status get(const std::string& key, std::vector<int32_t>* values) const;

 private:
  // Returns the value of a key, or null.
  const GgufValue* find(const std::string& key) const;

  const std::string* file_ = nullptr;
  std::map<std::string, GgufValue> values_;
};

}  // namespace fk::model
