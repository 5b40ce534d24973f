// Makes a CPU engine: parses its options, checks that there is memory, packs the decoder's weights
// and sets up the buffers.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <string>

#include "core/integers.h"
#include "engine/cpu_engine.h"
#include "engine/parallel.h"
#include "engine/quantize.h"
#include "model/check_config.h"

namespace fk::engine {
namespace {

using model::Weight;

std::string megabytes(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f MB", static_cast<double>(bytes) * 1e-6);
  return text;
}

// Returns how much memory the system could still give, in bytes, or 0 where it does not say.
int64_t available_memory() {
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  int64_t kilobytes = 0;
  while (file >> name >> kilobytes) {
    std::getline(file, unit);
    if (name == "MemAvailable:") return kilobytes * 1024;
  }
  return 0;
}

// Takes memory from `arena` for the inputs of a product: `tokens` rows of `columns` values.
Activations take_activations(Arena& arena, int64_t columns, int64_t tokens) {
  const int64_t blocks = (columns + 31) / 32;
  const auto floats = [&](int64_t n) { return reinterpret_cast<float*>(arena.take(n * 4)); };
  const auto integers = [&](int64_t n) { return reinterpret_cast<int32_t*>(arena.take(n * 4)); };
  Activations a;
  a.columns = columns;
  a.x = floats(tokens * columns + kGroupRows);
  a.q = reinterpret_cast<int8_t*>(arena.take(tokens * columns));
  a.scale = floats(tokens * blocks);
  a.sum = floats(tokens * blocks);
  a.minus32 = integers(tokens * blocks);
  a.minus16 = integers(tokens * blocks * 2);
  return a;
}

// Returns an upper bound of what take_activations takes.
int64_t activation_bytes(int64_t columns, int64_t tokens) { return tokens * columns * 6 + 4096; }

}  // namespace

Status parse_options(int64_t context, const std::string& cache, const std::string& quantize,
                     EngineOptions* options) {
  if (context < 0 || context > model::kMaxContext) {
    return invalid("context: expected 0 to " + std::to_string(model::kMaxContext) + ", got " +
                   std::to_string(context));
  }
  options->context = context;
  if (cache == "f16") {
    options->cache = EngineOptions::Cache::kHalf;
  } else if (cache == "f32") {
    options->cache = EngineOptions::Cache::kFloat;
  } else if (cache != "auto") {
    return invalid("cache: expected auto, f16 or f32, got " + cache);
  }
  options->quantize = !quantize.empty();
  if (quantize.empty()) return {};
  if (!model::find_type(quantize.c_str(), &options->quantize_to) ||
      !can_quantize(options->quantize_to)) {
    return invalid("quantize: expected f16, bf16, q8_0, q4_0, q4_1, q5_0 or q5_1, got " + quantize);
  }
  return {};
}

Status make_engine(const model::Decoder& decoder, const EngineOptions& options,
                   std::unique_ptr<Engine>* engine) {
  return CpuEngine::make(decoder, options, engine);
}

Status CpuEngine::make(const model::Decoder& decoder, const EngineOptions& options,
                       std::unique_ptr<Engine>* engine) {
  std::unique_ptr<CpuEngine> made(new CpuEngine(decoder));
  FK_RETURN_IF_ERROR(made->load(options));
  *engine = std::move(made);
  return {};
}

Status CpuEngine::check_memory(int64_t packed_bytes) const {
  const int64_t needed = packed_bytes + buffers_.size() + vectors_.size();
  const int64_t available = available_memory();
  if (available == 0 || needed <= available) return {};
  return {FK_UNSUPPORTED, "too little memory: the model needs " + megabytes(needed) +
                              " and the machine has " + megabytes(available) +
                              " left; --quantize q4_0 makes float weights smaller"};
}

PackedMatrix CpuEngine::plan(const Weight& weight, const model::WeightType* quantize) {
  PackedMatrix m;
  if (!weight) return m;
  m.packing = packing_of(weight, quantize);
  m.rows = weight.rows;
  m.columns = weight.columns;
  weight_bytes_ += m.bytes();
  return m;
}

const float* CpuEngine::read_vector(const Weight& weight) {
  if (!weight) return nullptr;
  auto* values = reinterpret_cast<float*>(vectors_.take(padded(weight.columns) * 4));
  model::read_row(weight, 0, values);
  return values;
}

void CpuEngine::pack(const Weight& weight, const Weight& bias, PackedMatrix* matrix) {
  if (!weight) return;
  matrix->data = weights_.take(matrix->bytes());
  const int64_t grain =
      std::max<int64_t>(1, (int64_t{1} << 18) / group_bytes(matrix->packing, matrix->columns));
  parallel(matrix->groups(), grain,
           [&](int64_t begin, int64_t end) { pack_groups(weight, *matrix, begin, end); });
  matrix->bias = read_vector(bias);
}

Status CpuEngine::load(const EngineOptions& options) {
  const model::WeightType* quantize = options.quantize ? &options.quantize_to : nullptr;
  context_ = options.context > 0 ? options.context : config_.context;
  if (config_.learned_positions) context_ = std::min(context_, config_.context);

  int64_t vector_bytes = 1 << 16;
  bool all_float = true;
  for (const auto& named : model::named_weights(decoder_)) {
    const Weight& weight = *named.second;
    if (weight.rows == 1) vector_bytes += padded(weight.columns) * 4 + 64;
  }
  for (const model::Layer& layer : decoder_.layers) {
    PackedLayer p{};
    p.q = plan(layer.q, quantize);
    p.k = plan(layer.k, quantize);
    p.v = plan(layer.v, quantize);
    p.o = plan(layer.o, quantize);
    p.gate = plan(layer.gate, quantize);
    p.up = plan(layer.up, quantize);
    p.down = plan(layer.down, quantize);
    p.window = layer.window;
    all_float = all_float && p.q.packing == Packing::kF32;
    layers_.push_back(p);
  }
  output_ = plan(decoder_.output, quantize);

  if (!vectors_.reserve(vector_bytes)) return {FK_UNSUPPORTED, "too little memory"};
  allocate_buffers();
  cache_.half = options.cache == EngineOptions::Cache::kHalf ||
                (options.cache == EngineOptions::Cache::kAuto && !all_float);
  cache_.layers = config_.layers;
  cache_.heads = config_.kv_heads;
  cache_.head_dim = config_.head_dim;
  cache_.padded_dim = padded(config_.head_dim);
  cache_.capacity = round_up(context_, kKeyChunk);
  if (!cache_.memory.reserve(cache_.bytes())) {
    return {FK_UNSUPPORTED, "too little memory: keys and values of " + std::to_string(context_) +
                                " positions need " + megabytes(cache_.bytes()) +
                                "; a smaller --context needs less"};
  }
  FK_RETURN_IF_ERROR(check_memory(weight_bytes_));
  const int64_t slack = static_cast<int64_t>(layers_.size() + 1) * 8 * 64 + 4096;
  if (buffers_.data() == nullptr || !weights_.reserve(weight_bytes_ + slack)) {
    return {FK_UNSUPPORTED, "too little memory: the weights need " + megabytes(weight_bytes_)};
  }
  const Weight none;
  for (size_t l = 0; l < layers_.size(); ++l) {
    const model::Layer& layer = decoder_.layers[l];
    PackedLayer& p = layers_[l];
    p.attention_norm = read_vector(layer.attention_norm);
    p.attention_norm_bias = read_vector(layer.attention_norm_bias);
    p.ffn_norm = read_vector(layer.ffn_norm);
    p.ffn_norm_bias = read_vector(layer.ffn_norm_bias);
    p.q_norm = read_vector(layer.q_norm);
    p.k_norm = read_vector(layer.k_norm);
    pack(layer.q, layer.q_bias, &p.q);
    pack(layer.k, layer.k_bias, &p.k);
    pack(layer.v, layer.v_bias, &p.v);
    pack(layer.o, layer.o_bias, &p.o);
    pack(layer.gate, none, &p.gate);
    pack(layer.up, layer.up_bias, &p.up);
    pack(layer.down, layer.down_bias, &p.down);
  }
  pack(decoder_.output, none, &output_);
  output_norm_ = read_vector(decoder_.output_norm);
  output_norm_bias_ = read_vector(decoder_.output_norm_bias);
  return {};
}

void CpuEngine::allocate_buffers() {
  const int64_t q_rows = padded(config_.heads * config_.head_dim);
  const int64_t k_rows = padded(config_.kv_heads * config_.head_dim);
  const int64_t hidden = padded(config_.hidden);
  const int64_t dim = padded(config_.dim);
  qkv_stride_ = q_rows + 2 * k_rows;
  const int64_t floats = kBatch * (2 * dim + qkv_stride_ + config_.rotary_dim + 2 * hidden) +
                         kLogitRows * padded(config_.vocab) + 1024;
  const int64_t bytes = floats * 4 + activation_bytes(config_.dim, kBatch) +
                        activation_bytes(config_.heads * config_.head_dim, kBatch) +
                        activation_bytes(config_.hidden, kBatch) + 65536;
  if (!buffers_.reserve(bytes)) return;
  const auto take = [&](int64_t n) { return reinterpret_cast<float*>(buffers_.take(n * 4)); };
  x_ = take(kBatch * dim);
  projected_ = take(kBatch * dim);
  qkv_ = take(kBatch * qkv_stride_);
  rotations_ = take(kBatch * config_.rotary_dim + 16);
  gate_ = take(kBatch * hidden);
  up_ = take(kBatch * hidden);
  logits_ = take(kLogitRows * padded(config_.vocab));
  normed_ = take_activations(buffers_, config_.dim, kBatch);
  attended_ = take_activations(buffers_, config_.heads * config_.head_dim, kBatch);
  hidden_ = take_activations(buffers_, config_.hidden, kBatch);
  reserve_rows(config_.heads * kBatch);
}

void CpuEngine::reserve_rows(int64_t count) {
  if (count <= static_cast<int64_t>(row_q_.size())) return;
  const size_t all = std::max(static_cast<size_t>(count), 2 * row_q_.size());
  const auto head_dim = static_cast<size_t>(padded(config_.head_dim));
  row_out_.resize(all);
  row_first_.resize(all);
  row_last_.resize(all);
  row_max_.resize(all);
  row_sum_.resize(all);
  row_values_.resize(all * head_dim);
  for (size_t i = 0; i < all; ++i) row_out_[i] = row_values_.data() + i * head_dim;
  // row_q_ comes last because its size says how many rows there are: if memory runs out before, the
  // old number stays true.
  row_q_.resize(all);
}

bool CpuEngine::reserve_members(int count) {
  if (static_cast<int>(members_.size()) >= count) return true;
  const int64_t attended = config_.heads * config_.head_dim;
  const int64_t bytes = padded(config_.dim) * 4 + config_.rotary_dim * 4 + attended * 4 +
                        activation_bytes(config_.dim, 1) + activation_bytes(attended, 1) + 1024;
  auto memory = std::make_unique<Arena>();
  if (!memory->reserve(bytes * count)) return false;
  std::vector<MemberBuffers> members;
  for (int i = 0; i < count; ++i) {
    const auto take = [&](int64_t n) { return reinterpret_cast<float*>(memory->take(n * 4)); };
    MemberBuffers m;
    m.x = take(padded(config_.dim));
    m.rotation = take(config_.rotary_dim);
    m.q = take(attended);
    m.normed = take_activations(*memory, config_.dim, 1);
    m.attended = take_activations(*memory, attended, 1);
    members.push_back(m);
  }
  members_ = std::move(members);
  member_memory_ = std::move(memory);
  return true;
}

std::string CpuEngine::description() const {
  std::map<std::string, int64_t> bytes;
  const auto add = [&](const PackedMatrix& m) {
    if (!m) return;
    const bool is_file_type = m.packing != Packing::kQ8_Float;
    const char* name =
        is_file_type ? model::type_info(static_cast<model::WeightType>(m.packing)).name : "int8";
    bytes[name] += m.bytes();
  };
  for (const PackedLayer& l : layers_) {
    for (const PackedMatrix* m : {&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down}) add(*m);
  }
  add(output_);
  std::string text;
  for (const auto& [name, size] : bytes) {
    text += (text.empty() ? "" : ", ") + name + " " + megabytes(size);
  }
  return text;
}

}  // namespace fk::engine
