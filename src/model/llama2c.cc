// llama2.c's checkpoints. Legacy: seven int32, then float32 weights. Versions 1 and 2: a header of
// 256 bytes, then float32, or int8 with a float32 scale per group.
#include "model/check_config.h"
#include "model/formats.h"
#include "model/mapped_file.h"
#include "model/reader.h"
#include "model/rope.h"

namespace fk::model {
namespace {

constexpr uint32_t kMagic = 0x616b3432;  // "ak42"
constexpr size_t kHeaderBytes = 256;

struct Header {
  uint32_t version = 0;  // 0: legacy
  bool shared = true;
  int32_t group = 0;
  size_t bytes = 0;
};

Status read_header(const std::string& file, std::string_view bytes, Header* header,
                   Config* config) {
  Reader reader(bytes);
  uint32_t magic = 0;
  if (is_llama2c(bytes)) {
    if (!reader.read(&magic) || !reader.read(&header->version)) {
      return file_error(file, "is too short for its header");
    }
    if (header->version != 1 && header->version != 2) {
      return unsupported(file + ": version: expected 1 or 2, got " +
                         std::to_string(header->version));
    }
  }
  int32_t dim, hidden, layers, heads, kv_heads, vocab, context;
  for (int32_t* field : {&dim, &hidden, &layers, &heads, &kv_heads, &vocab, &context}) {
    if (!reader.read(field)) return file_error(file, "is too short for its header");
  }
  if (header->version == 0) {
    header->shared = vocab > 0;
    if (vocab == INT32_MIN) return file_error(file, "vocabulary: is too large");
    vocab = vocab < 0 ? -vocab : vocab;
    header->bytes = reader.at();
  } else {
    uint8_t shared;
    if (!reader.read(&shared)) return file_error(file, "is too short for its header");
    header->shared = shared != 0;
    if (header->version == 2 && !reader.read(&header->group)) {
      return file_error(file, "is too short for its header");
    }
    header->bytes = kHeaderBytes;
    if (bytes.size() < kHeaderBytes) return file_error(file, "is too short for its header");
  }
  config->dim = dim;
  config->hidden = hidden;
  config->layers = layers;
  config->heads = heads;
  config->kv_heads = kv_heads;
  config->vocab = vocab;
  config->context = context;
  config->head_dim = heads > 0 ? dim / heads : 0;
  config->rotary_dim = config->head_dim;
  FK_RETURN_IF_ERROR(check_config(file, *config));
  if (dim % heads != 0) {
    return file_error(file, "heads: expected a divisor of the embedding size " +
                                std::to_string(dim) + ", got " + std::to_string(heads));
  }
  if (header->version == 2 && (header->group < 4 || header->group % 4 != 0)) {
    return file_error(file,
                      "group size: expected a multiple of 4, got " + std::to_string(header->group));
  }
  return {};
}

// Hands out the weights one after the other. An error is kept until the end asks for it.
class Cursor {
 public:
  Cursor(const std::string& file, std::string_view bytes, const Header& header)
      : file_(file), bytes_(bytes), at_(header.bytes), group_(header.group) {}

  Weight floats(int64_t rows, int64_t columns) {
    Weight weight;
    weight.rows = rows;
    weight.columns = columns;
    weight.row_bytes = columns * 4;
    weight.data = take(rows * columns * 4);
    return weight;
  }

  // Of type int8 in version 2.
  Weight matrix(int64_t rows, int64_t columns) {
    if (group_ == 0) return floats(rows, columns);
    if (columns % group_ != 0 && status_.ok()) {
      status_ = file_error(file_, "group size: expected a divisor of the row length " +
                                      std::to_string(columns) + ", got " + std::to_string(group_));
    }
    Weight weight;
    weight.type = WeightType::kInt8Grouped;
    weight.rows = rows;
    weight.columns = columns;
    weight.row_bytes = columns;
    weight.group = group_;
    weight.data = take(rows * columns);
    weight.scales = static_cast<const float*>(take(rows * columns / group_ * 4));
    return weight;
  }

  void skip_floats(int64_t count) { take(count * 4); }

  Status finish() const {
    FK_RETURN_IF_ERROR(status_);
    if (at_ == bytes_.size()) return {};
    return file_error(file_, "expected " + std::to_string(at_) + " bytes for these sizes, got " +
                                 std::to_string(bytes_.size()));
  }

 private:
  // Sizes were checked to be small enough for their products.
  const void* take(int64_t count) {
    if (!status_.ok()) return nullptr;
    const size_t left = bytes_.size() - at_;
    if (static_cast<uint64_t>(count) > left) {
      status_ = file_error(file_, "ends after " + std::to_string(bytes_.size()) +
                                      " bytes, in the middle of its weights");
      return nullptr;
    }
    const void* data = bytes_.data() + at_;
    at_ += static_cast<size_t>(count);
    return data;
  }

  const std::string& file_;
  std::string_view bytes_;
  size_t at_;
  int64_t group_;
  Status status_;
};

}  // namespace

bool is_llama2c(std::string_view bytes) {
  uint32_t magic;
  Reader reader(bytes);
  return reader.read(&magic) && magic == kMagic;
}

Status decoder_from_llama2c(const std::string& file, std::string_view bytes, Decoder* decoder) {
  Config& config = decoder->config;
  Header header;
  const Status read = read_header(file, bytes, &header, &config);
  // The legacy form has no magic number: what no other reader knew comes here.
  if (!read.ok() && !is_llama2c(bytes)) {
    return file_error(file, "is neither GGUF, safetensors nor llama2.c (read as llama2.c, " +
                                read.message().substr(file.size() + 2) + ")");
  }
  FK_RETURN_IF_ERROR(read);
  config.family = Family::kLlama;
  config.architecture =
      header.version == 0 ? "llama2.c" : "llama2.c version " + std::to_string(header.version);
  config.rope_interleaved = true;
  config.rope_theta = 10000;
  config.tied = header.shared;
  config.bos = 1;
  config.eos = {1, 2};  // training texts follow each other, each begun by <s>
  const Status rope = set_rope({}, &config);
  if (!rope.ok()) return file_error(file, rope.message());

  const int64_t dim = config.dim, hidden = config.hidden, head = config.head_dim;
  const int64_t q_rows = config.heads * head, kv_rows = config.kv_heads * head;
  decoder->layers.resize(static_cast<size_t>(config.layers));
  Cursor cursor(file, bytes, header);
  const auto each = [&](Weight Layer::*member, int64_t rows, int64_t columns, bool norm) {
    for (Layer& layer : decoder->layers) {
      layer.*member = norm ? cursor.floats(rows, columns) : cursor.matrix(rows, columns);
    }
  };
  if (header.version == 0) {
    decoder->token_embedding = cursor.matrix(config.vocab, dim);
    each(&Layer::attention_norm, 1, dim, true);
  } else {
    each(&Layer::attention_norm, 1, dim, true);
    each(&Layer::ffn_norm, 1, dim, true);
    decoder->output_norm = cursor.floats(1, dim);
    decoder->token_embedding = cursor.matrix(config.vocab, dim);
  }
  each(&Layer::q, q_rows, dim, false);
  each(&Layer::k, kv_rows, dim, false);
  each(&Layer::v, kv_rows, dim, false);
  each(&Layer::o, dim, q_rows, false);
  if (header.version == 0) each(&Layer::ffn_norm, 1, dim, true);
  each(&Layer::gate, hidden, dim, false);
  each(&Layer::down, dim, hidden, false);
  each(&Layer::up, hidden, dim, false);
  if (header.version == 0) {
    decoder->output_norm = cursor.floats(1, dim);
    cursor.skip_floats(config.context * (head / 2) * 2);  // tables of cosines and sines
  }
  decoder->output = header.shared ? decoder->token_embedding : cursor.matrix(config.vocab, dim);
  return cursor.finish();
}

}  // namespace fk::model
