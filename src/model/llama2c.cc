// Makes a decoder from llama2.c's checkpoints. The legacy form is seven int32, then float32
// weights. Versions 1 and 2 have a header of 256 bytes, then float32 weights (1), or int8 weights
// with a float32 scale per group (2).
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
  bool shared = true;    // the output matrix is the embedding
  int32_t group = 0;     // weights that share a scale; 0 for floats
  size_t bytes = 0;      // where the weights begin
};

// Reads the header and checks the sizes in it.
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

// Hands out the weights in the order of the file. It keeps the first error until `finish` returns
// it; the weights handed out after it have no data.
class Cursor {
 public:
  Cursor(const std::string& file, std::string_view bytes, const Header& header)
      : file_(file), bytes_(bytes), at_(header.bytes), group_(header.group) {}

  // Returns the next weight, of float32.
  Weight floats(int64_t rows, int64_t columns) {
    Weight weight;
    weight.rows = rows;
    weight.columns = columns;
    weight.row_bytes = columns * 4;
    weight.data = take(rows * columns * 4);
    return weight;
  }

  // Returns the next weight, of int8 in version 2 and of float32 otherwise.
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

  // Returns the first error, or one if the file does not end here.
  Status finish() const {
    FK_RETURN_IF_ERROR(status_);
    if (at_ == bytes_.size()) return {};
    return file_error(file_, "expected " + std::to_string(at_) + " bytes for these sizes, got " +
                                 std::to_string(bytes_.size()));
  }

 private:
  // Steps over `count` bytes and returns where they begin. check_config has made sure that the
  // products of sizes do not overflow.
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
  // The legacy form has no magic number, so every file that no other reader knows comes here.
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
  config.eos = {1, 2};  // in training, <s> begins each text and so also ends the one before
  const Status rope = set_rope({}, &config);
  if (!rope.ok()) return file_error(file, rope.message());

  const int64_t dim = config.dim, hidden = config.hidden, head = config.head_dim;
  const int64_t q_rows = config.heads * head, kv_rows = config.kv_heads * head;
  decoder->layers.resize(static_cast<size_t>(config.layers));
  Cursor cursor(file, bytes, header);
  // The file has one kind of weight for all layers, then the next kind.
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
    cursor.skip_floats(config.context * (head / 2) * 2);  // skips tables of cosines and sines
  }
  decoder->output = header.shared ? decoder->token_embedding : cursor.matrix(config.vocab, dim);
  return cursor.finish();
}

}  // namespace fk::model
