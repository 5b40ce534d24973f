// Parses GGUF's header, checking every length and offset in it.
#include "model/gguf.h"

#include <algorithm>
#include <cmath>

#include "core/integers.h"
#include "model/json.h"
#include "model/mapped_file.h"
#include "model/reader.h"

namespace fk::model {
namespace {

constexpr uint64_t kMaxKeys = 1 << 16;
constexpr uint64_t kMaxTensors = 1 << 20;
constexpr uint32_t kMaxDims = 4;
constexpr uint64_t kMaxTensorName = 255;
constexpr int64_t kMaxAlignment = 1 << 16;

// Returns the size of one value of a type in bytes; 0 for strings and arrays.
size_t size_of(GgufType type) {
  static constexpr size_t kSizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
  return kSizes[static_cast<uint32_t>(type)];
}

const char* name_of(GgufType type) {
  static constexpr const char* kNames[] = {"uint8",  "int8",    "uint16", "int16",  "uint32",
                                           "int32",  "float32", "bool",   "string", "array",
                                           "uint64", "int64",   "float64"};
  return kNames[static_cast<uint32_t>(type)];
}

// Names a tensor type that we read, with its number in GGUF.
struct TensorType {
  uint32_t id;
  WeightType type;
};
constexpr TensorType kTensorTypes[] = {
    {0, WeightType::kF32},   {1, WeightType::kF16},   {2, WeightType::kQ4_0},
    {3, WeightType::kQ4_1},  {6, WeightType::kQ5_0},  {7, WeightType::kQ5_1},
    {8, WeightType::kQ8_0},  {12, WeightType::kQ4_K}, {13, WeightType::kQ5_K},
    {14, WeightType::kQ6_K}, {30, WeightType::kBF16},
};
// These are GGUF's names of all its tensor types, by number, for errors about those that we do not
// read.
constexpr const char* kTensorTypeNames[] = {
    "F32",     "F16",    "Q4_0",    "Q4_1",  "Q4_2",   "Q4_3",  "Q5_0",  "Q5_1",
    "Q8_0",    "Q8_1",   "Q2_K",    "Q3_K",  "Q4_K",   "Q5_K",  "Q6_K",  "Q8_K",
    "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS",
    "I8",      "I16",    "I32",     "I64",   "F64",    "IQ1_M", "BF16"};

// Returns the error for a file that ends inside of `where`.
Status end_of_file(const std::string& file, const std::string& where) {
  return file_error(file, where + ": the file ends in the middle of it");
}

// Reads a string as a view into the file; returns false if the file ends before it does.
bool skip_string(Reader* reader, std::string_view* text) {
  uint64_t length;
  return reader->read(&length) && reader->read(length, text);
}

// Reads the number of a value type and checks it.
Status read_type(const std::string& file, const std::string& key, Reader* reader, GgufType* type) {
  uint32_t number;
  if (!reader->read(&number)) return end_of_file(file, key);
  if (number > static_cast<uint32_t>(GgufType::kFloat64)) {
    return file_error(file,
                      key + ": expected a value type from 0 to 12, got " + std::to_string(number));
  }
  *type = static_cast<GgufType>(number);
  return {};
}

// Reads the value of `key`. `all` is the whole file, into which the value points.
Status read_value(const std::string& file, const std::string& key, std::string_view all,
                  Reader* reader, GgufValue* value) {
  FK_RETURN_IF_ERROR(read_type(file, key, reader, &value->type));
  if (value->type == GgufType::kArray) {
    value->array = true;
    FK_RETURN_IF_ERROR(read_type(file, key, reader, &value->type));
    if (value->type == GgufType::kArray) {
      return file_error(file, key + ": expected an array of plain values, got one of arrays");
    }
    if (!reader->read(&value->count)) return end_of_file(file, key);
  }
  const size_t begin = reader->at();
  if (value->type == GgufType::kString) {
    for (uint64_t i = 0; i < value->count; ++i) {
      std::string_view text;
      if (!skip_string(reader, &text)) return end_of_file(file, key);
    }
    value->bytes = all.substr(begin, reader->at() - begin);
    return {};
  }
  const size_t size = size_of(value->type);
  if (value->count > reader->left() / size) return end_of_file(file, key);
  if (!reader->read(value->count * size, &value->bytes)) return end_of_file(file, key);
  if (value->type == GgufType::kBool) {
    for (char c : value->bytes) {
      if (c != 0 && c != 1) {
        return file_error(file, key + ": expected booleans of 0 or 1, got " +
                                    std::to_string(static_cast<unsigned char>(c)));
      }
    }
  }
  return {};
}

// Describes a tensor of the header, and where it says that the data begin.
struct Entry {
  std::string name;
  StoredTensor tensor;
  uint64_t offset;
};

// Reads the header's tensor number `index`.
Status read_tensor(const std::string& file, uint64_t index, Reader* reader, Entry* entry) {
  std::string_view name;
  if (!skip_string(reader, &name)) return end_of_file(file, "tensor " + std::to_string(index));
  if (name.empty() || name.size() > kMaxTensorName) {
    return file_error(file, "tensor " + std::to_string(index) + ": expected a name of 1 to " +
                                std::to_string(kMaxTensorName) + " bytes, got " +
                                std::to_string(name.size()));
  }
  entry->name = name;
  const std::string where = "tensor " + shown_text(name);
  uint32_t dims;
  if (!reader->read(&dims)) return end_of_file(file, where);
  if (dims < 1 || dims > kMaxDims) {
    return file_error(file, where + ": expected 1 to " + std::to_string(kMaxDims) +
                                " dimensions, got " + std::to_string(dims));
  }
  StoredTensor& tensor = entry->tensor;
  int64_t count = 1;
  for (uint32_t i = 0; i < dims; ++i) {
    int64_t extent;
    if (!reader->read(&extent)) return end_of_file(file, where);
    if (extent < 1 || !multiply(count, extent, &count)) {
      return file_error(file, where + ": expected sizes of 1 and more whose product fits, got " +
                                  std::to_string(static_cast<uint64_t>(extent)));
    }
    tensor.shape.push_back(extent);
  }
  std::reverse(tensor.shape.begin(), tensor.shape.end());  // the file has the innermost first
  uint32_t id;
  if (!reader->read(&id)) return end_of_file(file, where);
  const auto type = std::find_if(std::begin(kTensorTypes), std::end(kTensorTypes),
                                 [&](const TensorType& t) { return t.id == id; });
  if (type == std::end(kTensorTypes)) {
    const char* known = id < std::size(kTensorTypeNames) ? kTensorTypeNames[id] : "unknown";
    return unsupported(file + ": " + where +
                       ": expected F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K or "
                       "Q6_K, got " +
                       known + " (" + std::to_string(id) + ")");
  }
  tensor.type = type->type;
  const WeightTypeInfo& info = type_info(type->type);
  tensor.type_name = info.name;
  if (tensor.shape.back() % info.block != 0) {
    return file_error(file, where + ": expected rows of whole blocks of " +
                                std::to_string(info.block) + ", got " +
                                std::to_string(tensor.shape.back()));
  }
  if (!multiply(count / info.block, info.bytes, &tensor.bytes)) {
    return file_error(file, where + ": is too large");
  }
  if (!reader->read(&entry->offset)) return end_of_file(file, where);
  tensor.file = &file;
  return {};
}

// Points the tensors at their data, and checks that they are aligned, inside the file, and do not
// overlap. Sorts the entries by offset.
Status place_tensors(const std::string& file, std::string_view data, uint64_t alignment,
                     std::vector<Entry>* entries) {
  for (Entry& entry : *entries) {
    const uint64_t bytes = static_cast<uint64_t>(entry.tensor.bytes);
    if (entry.offset % alignment != 0) {
      return file_error(file, "tensor " + shown_text(entry.name) +
                                  ": expected an offset of whole " + std::to_string(alignment) +
                                  " bytes, got " + std::to_string(entry.offset));
    }
    if (entry.offset > data.size() || bytes > data.size() - entry.offset) {
      return file_error(file, "tensor " + shown_text(entry.name) + ": its " +
                                  std::to_string(bytes) + " bytes at " +
                                  std::to_string(entry.offset) + " reach past the file's " +
                                  std::to_string(data.size()) + " bytes of data");
    }
    entry.tensor.data = data.data() + entry.offset;
  }
  std::sort(entries->begin(), entries->end(),
            [](const Entry& a, const Entry& b) { return a.offset < b.offset; });
  for (size_t i = 1; i < entries->size(); ++i) {
    const Entry& before = (*entries)[i - 1];
    if (before.offset + static_cast<uint64_t>(before.tensor.bytes) > (*entries)[i].offset) {
      return file_error(file, "tensor " + shown_text((*entries)[i].name) + ": lies over " +
                                  shown_text(before.name));
    }
  }
  return {};
}

}  // namespace

Status Gguf::parse(const std::string& file, std::string_view bytes, Gguf* gguf,
                   TensorTable* table) {
  gguf->file_ = &file;
  Reader reader(bytes);
  std::string_view magic;
  if (!reader.read(4, &magic) || magic != "GGUF") {
    return file_error(file, "expected GGUF at its start");
  }
  uint32_t version;
  uint64_t tensors, keys;
  if (!reader.read(&version)) return end_of_file(file, "version");
  if (version != 2 && version != 3) {
    const bool swapped = version == 2u << 24 || version == 3u << 24;
    return unsupported(file + ": version: expected 2 or 3, got " +
                       (swapped ? "a big-endian file" : std::to_string(version)));
  }
  if (!reader.read(&tensors) || !reader.read(&keys)) return end_of_file(file, "header");
  if (tensors > kMaxTensors || keys > kMaxKeys) {
    return file_error(file, "header: expected at most " + std::to_string(kMaxTensors) +
                                " tensors and " + std::to_string(kMaxKeys) + " keys, got " +
                                std::to_string(tensors) + " and " + std::to_string(keys));
  }
  for (uint64_t i = 0; i < keys; ++i) {
    std::string_view key;
    if (!skip_string(&reader, &key)) return end_of_file(file, "key " + std::to_string(i));
    if (key.empty() || key.size() > 65535) {
      return file_error(file, "key " + std::to_string(i) + ": expected 1 to 65535 bytes, got " +
                                  std::to_string(key.size()));
    }
    GgufValue value;
    FK_RETURN_IF_ERROR(read_value(file, shown_text(key), bytes, &reader, &value));
    if (!gguf->values_.emplace(key, value).second) {
      return file_error(file, "the key " + shown_text(key) + " comes twice");
    }
  }
  int64_t alignment = 32;
  FK_RETURN_IF_ERROR(gguf->get("general.alignment", &alignment, 8, kMaxAlignment));
  if ((alignment & (alignment - 1)) != 0) {
    return gguf->error("general.alignment",
                       "expected a power of two, got " + std::to_string(alignment));
  }
  std::vector<Entry> entries;
  for (uint64_t i = 0; i < tensors; ++i) {
    Entry entry;
    FK_RETURN_IF_ERROR(read_tensor(file, i, &reader, &entry));
    entries.push_back(std::move(entry));
  }
  const uint64_t step = static_cast<uint64_t>(alignment);
  const uint64_t begin = round_up(reader.at(), step);
  if (tensors > 0 && begin > bytes.size()) return end_of_file(file, "header");
  const std::string_view data = bytes.substr(std::min<uint64_t>(begin, bytes.size()));
  FK_RETURN_IF_ERROR(place_tensors(file, data, step, &entries));
  for (Entry& entry : entries) {
    const std::string name = shown_text(entry.name);
    if (!table->add(std::move(entry.name), std::move(entry.tensor))) {
      return file_error(file, "tensor " + name + ": comes twice");
    }
  }
  return {};
}

Status Gguf::error(const std::string& key, const std::string& what) const {
  return file_error(*file_, key + ": " + what);
}

const GgufValue* Gguf::find(const std::string& key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : &found->second;
}

namespace {

std::string type_name(const GgufValue& value) {
  return (value.array ? "an array of " : "") + std::string(name_of(value.type));
}

// Returns element `index` of a value whose elements are of type T.
template <class T>
T load(const GgufValue& value, uint64_t index) {
  T result;
  std::memcpy(&result, value.bytes.data() + index * sizeof(T), sizeof(T));
  return result;
}

// Sets *result to element `index` as an integer; returns false if the elements are no integers or
// int64_t cannot hold this one.
bool load_integer(const GgufValue& value, uint64_t index, int64_t* result) {
  switch (value.type) {
    case GgufType::kUint8:
      *result = load<uint8_t>(value, index);
      return true;
    case GgufType::kInt8:
      *result = load<int8_t>(value, index);
      return true;
    case GgufType::kUint16:
      *result = load<uint16_t>(value, index);
      return true;
    case GgufType::kInt16:
      *result = load<int16_t>(value, index);
      return true;
    case GgufType::kUint32:
      *result = load<uint32_t>(value, index);
      return true;
    case GgufType::kInt32:
      *result = load<int32_t>(value, index);
      return true;
    case GgufType::kInt64:
      *result = load<int64_t>(value, index);
      return true;
    case GgufType::kUint64: {
      const uint64_t wide = load<uint64_t>(value, index);
      *result = static_cast<int64_t>(wide);
      return wide <= INT64_MAX;
    }
    default:
      return false;
  }
}

}  // namespace

Status Gguf::get(const std::string& key, int64_t* value, int64_t low, int64_t high) const {
  const GgufValue* found = find(key);
  if (found == nullptr) return {};
  int64_t number;
  if (found->array || !load_integer(*found, 0, &number)) {
    return error(key, "expected an integer, got " + type_name(*found));
  }
  if (number < low || number > high) {
    return error(key, "expected from " + std::to_string(low) + " to " + std::to_string(high) +
                          ", got " + std::to_string(number));
  }
  *value = number;
  return {};
}

Status Gguf::get(const std::string& key, double* value) const {
  const GgufValue* found = find(key);
  if (found == nullptr) return {};
  int64_t integer;
  double number;
  if (!found->array && found->type == GgufType::kFloat32) {
    number = load<float>(*found, 0);
  } else if (!found->array && found->type == GgufType::kFloat64) {
    number = load<double>(*found, 0);
  } else if (!found->array && load_integer(*found, 0, &integer)) {
    number = static_cast<double>(integer);
  } else {
    return error(key, "expected a number, got " + type_name(*found));
  }
  if (!std::isfinite(number)) return error(key, "expected a finite number");
  *value = number;
  return {};
}

Status Gguf::get(const std::string& key, bool* value) const {
  const GgufValue* found = find(key);
  if (found == nullptr) return {};
  if (found->array || found->type != GgufType::kBool) {
    return error(key, "expected a bool, got " + type_name(*found));
  }
  *value = found->bytes[0] != 0;
  return {};
}

Status Gguf::get(const std::string& key, std::string* value) const {
  const GgufValue* found = find(key);
  if (found == nullptr) return {};
  if (found->array || found->type != GgufType::kString) {
    return error(key, "expected a string, got " + type_name(*found));
  }
  *value = found->bytes.substr(8);
  return {};
}

Status Gguf::get(const std::string& key, std::vector<std::string_view>* values) const {
  const GgufValue* found = find(key);
  if (found == nullptr) return {};
  if (!found->array || found->type != GgufType::kString) {
    return error(key, "expected an array of strings, got " + type_name(*found));
  }
  Reader reader(found->bytes);
  values->resize(found->count);
  for (std::string_view& text : *values) {
    if (!skip_string(&reader, &text)) return error(key, "is cut short");
  }
  return {};
}

Status Gguf::get(const std::string& key, std::vector<float>* values) const {
  const GgufValue* found = find(key);
  if (found == nullptr) return {};
  if (!found->array || found->type != GgufType::kFloat32) {
    return error(key, "expected an array of float32, got " + type_name(*found));
  }
  values->resize(found->count);
  for (uint64_t i = 0; i < found->count; ++i) {
    const float number = load<float>(*found, i);
    if (!std::isfinite(number)) {
      return error(key, "expected finite numbers, got another at " + std::to_string(i));
    }
    (*values)[i] = number;
  }
  return {};
}

Status Gguf::get(const std::string& key, std::vector<int32_t>* values) const {
  const GgufValue* found = find(key);
  if (found == nullptr) return {};
  if (!found->array) return error(key, "expected an array of integers, got " + type_name(*found));
  values->resize(found->count);
  for (uint64_t i = 0; i < found->count; ++i) {
    int64_t number;
    if (!load_integer(*found, i, &number) || number < INT32_MIN || number > INT32_MAX) {
      return error(key, "expected an array of int32, got " + type_name(*found));
    }
    (*values)[i] = static_cast<int32_t>(number);
  }
  return {};
}

}  // namespace fk::model
