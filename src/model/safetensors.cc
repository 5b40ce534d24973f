// Parses the header of a safetensors file and checks it against the file's size.
#include "model/safetensors.h"

#include <algorithm>

#include "model/json.h"
#include "model/mapped_file.h"
#include "model/reader.h"

namespace fk::model {
namespace {

constexpr uint64_t kMaxHeader = 100 << 20;  // the format's own limit
constexpr size_t kMaxSizes = 8;             // dimensions of a tensor

// Names a dtype of the format.
struct StoredType {
  const char* name;
  int bytes;
  bool readable;    // weights may have it
  WeightType type;  // if `readable`
};
constexpr StoredType kTypes[] = {
    {"F32", 4, true, WeightType::kF32},      {"F16", 2, true, WeightType::kF16},
    {"BF16", 2, true, WeightType::kBF16},    {"F64", 8, false, WeightType::kF32},
    {"F8_E4M3", 1, false, WeightType::kF32}, {"F8_E5M2", 1, false, WeightType::kF32},
    {"I64", 8, false, WeightType::kF32},     {"U64", 8, false, WeightType::kF32},
    {"I32", 4, false, WeightType::kF32},     {"U32", 4, false, WeightType::kF32},
    {"I16", 2, false, WeightType::kF32},     {"U16", 2, false, WeightType::kF32},
    {"I8", 1, false, WeightType::kF32},      {"U8", 1, false, WeightType::kF32},
    {"BOOL", 1, false, WeightType::kF32},
};

// Names the bytes of a tensor in the file's buffer.
struct ByteRange {
  int64_t begin, end;
  std::string name;
};

// Reads a whole number that is not negative; returns false for anything else.
bool read_size(const Json& json, int64_t* value) {
  if (!json.is_number_unsigned() || json.get<uint64_t>() > INT64_MAX) return false;
  *value = json.get<int64_t>();
  return true;
}

// Reads one tensor's entry in the header; `buffer` is the data behind the header.
Status read_tensor(const std::string& file, const std::string& name, const Json& json,
                   std::string_view buffer, StoredTensor* tensor, ByteRange* range) {
  const auto error = [&](const std::string& what) {
    return file_error(file, "tensor " + shown_text(name) + ": " + what);
  };
  if (!json.is_object()) return error("expected an object, got " + shown(json));
  const JsonFields fields(file, json);

  const Json* dtype = fields.find("dtype");
  if (dtype == nullptr || !dtype->is_string()) return error("dtype: expected a string");
  const auto type = std::find_if(std::begin(kTypes), std::end(kTypes), [&](const StoredType& t) {
    return dtype->get_ref<const std::string&>() == t.name;
  });
  if (type == std::end(kTypes)) return error("dtype: expected a known type, got " + shown(*dtype));

  const Json* shape = fields.find("shape");
  if (shape == nullptr || !shape->is_array() || shape->size() > kMaxSizes) {
    return error("shape: expected an array of at most " + std::to_string(kMaxSizes) + " sizes");
  }
  int64_t size = type->bytes;
  for (const Json& entry : *shape) {
    int64_t extent;
    if (!read_size(entry, &extent)) return error("shape: expected sizes, got " + shown(entry));
    if (!multiply(size, extent, &size)) return error("shape: is too large");
    tensor->shape.push_back(extent);
  }

  const Json* offsets = fields.find("data_offsets");
  if (offsets == nullptr || !offsets->is_array() || offsets->size() != 2 ||
      !read_size((*offsets)[0], &range->begin) || !read_size((*offsets)[1], &range->end)) {
    return error("data_offsets: expected two sizes");
  }
  if (range->begin > range->end || range->end > static_cast<int64_t>(buffer.size())) {
    return error("data_offsets: expected a range within the " + std::to_string(buffer.size()) +
                 " bytes of data, got " + std::to_string(range->begin) + " to " +
                 std::to_string(range->end));
  }
  if (range->end - range->begin != size) {
    return error("data_offsets: expected " + std::to_string(size) + " bytes for the shape, got " +
                 std::to_string(range->end - range->begin));
  }
  tensor->data = buffer.data() + range->begin;
  if (reinterpret_cast<uintptr_t>(tensor->data) % static_cast<uintptr_t>(type->bytes) != 0) {
    return error("data_offsets: expected data aligned to " + std::to_string(type->bytes) +
                 " bytes (saving the file again with a current safetensors aligns it)");
  }
  range->name = name;
  tensor->file = &file;
  tensor->bytes = size;
  tensor->readable = type->readable;
  tensor->type = type->type;
  tensor->type_name = type->name;
  return {};
}

}  // namespace

Status read_safetensors(const std::string& file, std::string_view bytes, TensorTable* table) {
  Reader reader(bytes);
  uint64_t length;
  if (!reader.read(&length)) return file_error(file, "is too short for a safetensors file");
  std::string_view header;
  if (length > kMaxHeader || !reader.read(length, &header)) {
    return file_error(file, "header length: expected at most " +
                                std::to_string(std::min<uint64_t>(kMaxHeader, reader.left())) +
                                " bytes, got " + std::to_string(length));
  }
  if (header.empty() || header[0] != '{') {
    return file_error(file, "header: expected { at its start");
  }
  JsonDocument json;
  FK_RETURN_IF_ERROR(parse_json(file, header, &json));
  const std::string_view buffer = bytes.substr(reader.at());

  std::vector<ByteRange> ranges;
  for (const auto& [name, entry] : json.items()) {
    if (name == "__metadata__") {
      const bool strings =
          entry.is_object() &&
          std::all_of(entry.begin(), entry.end(), [](const Json& e) { return e.is_string(); });
      if (!strings) return file_error(file, "__metadata__: expected an object of strings");
      continue;
    }
    StoredTensor tensor;
    ByteRange range;
    FK_RETURN_IF_ERROR(read_tensor(file, name, entry, buffer, &tensor, &range));
    ranges.push_back(std::move(range));
    if (!table->add(name, std::move(tensor))) {
      return file_error(file,
                        "tensor " + shown_text(name) + ": is in another file of the model too");
    }
  }

  std::sort(ranges.begin(), ranges.end(), [](const ByteRange& a, const ByteRange& b) {
    return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
  });
  int64_t end = 0;
  for (const ByteRange& range : ranges) {
    if (range.begin != end) {
      return file_error(file, "tensor " + shown_text(range.name) + ": expected data from byte " +
                                  std::to_string(end) + " on, got " + std::to_string(range.begin) +
                                  (range.begin < end ? ", inside another tensor's" : ""));
    }
    end = range.end;
  }
  if (end != static_cast<int64_t>(buffer.size())) {
    return file_error(file, "expected " + std::to_string(end) + " bytes of data, got " +
                                std::to_string(buffer.size()));
  }
  return {};
}

}  // namespace fk::model
