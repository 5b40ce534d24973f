// The CPU engine's parts: packed weights, buffers, and the stages of a forward pass.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/arena.h"
#include "engine/engine.h"
#include "engine/kernels.h"
#include "engine/kv_cache.h"
#include "engine/packed_matrix.h"
#include "engine/team.h"

namespace fk::engine {

struct PackedLayer {
  const float *attention_norm, *attention_norm_bias, *ffn_norm, *ffn_norm_bias;
  const float *q_norm, *k_norm;  // null: none
  PackedMatrix q, k, v, o, gate, up, down;
  int64_t window;
};

// Tokens that are run at once: as many as keep a stage's inputs in the second-level cache.
constexpr int64_t kBatch = 256;

// What each thread has for itself while it works on one token.
struct MemberBuffers {
  float* x;     // residual stream
  float* turn;  // cosines, then sines
  float* q;     // queries, rotated
  Activations normed, attended;
};

// The tokens whose logits are computed at once.
constexpr int64_t kLogitRows = 8;

class CpuEngine final : public Engine {
 public:
  static Status make(const model::Decoder& decoder, const EngineOptions& options,
                     std::unique_ptr<Engine>* engine);

  Status forward(const int32_t* tokens, int64_t count, Logits which, float* logits) override;
  int64_t position() const override { return position_; }
  void rewind(int64_t position) override { position_ = position; }
  int64_t context() const override { return context_; }
  int64_t vocab() const override { return config_.vocab; }
  int64_t weight_bytes() const override { return weight_bytes_; }
  int64_t cache_bytes() const override;
  std::string description() const override;

 private:
  explicit CpuEngine(const model::Decoder& decoder) : decoder_(decoder), config_(decoder.config) {}

  // cpu_load.cc
  Status load(const EngineOptions& options);
  Status check_memory(int64_t packed_bytes) const;
  PackedMatrix plan(const model::Weight& weight, const model::WeightType* quantize);
  void pack(const model::Weight& weight, const model::Weight& bias, PackedMatrix* matrix);
  const float* read_vector(const model::Weight& weight);
  void allocate_buffers();
  void reserve_rows(int64_t count);
  bool reserve_members(int count);

  // cpu_decode.cc: one token, by all threads together.
  void decode(int32_t token, float* logits);
  void project_qkv(const PackedLayer& layer, const Team::Member& me, const Activations& x);
  void attend_chunks(int64_t l, const Team::Member& me, const MemberBuffers& mine);
  void merge_chunks(const PackedLayer& layer, const MemberBuffers& mine);
  void gate_and_up(const PackedLayer& layer, const Team::Member& me, const Activations& x);

  // cpu_forward.cc: one batch of `n` <= kBatch tokens.
  void read_token(int32_t token, int64_t position, float* x, float* turn, float* spare) const;
  Status check_logits(const float* logits, int64_t n) const;
  void turn_head(const PackedLayer& layer, bool is_query, const float* turn, float* head) const;
  void embed(const int32_t* tokens, int64_t n);
  void run_layer(int64_t l, int64_t n, const float* pending);
  void project_qkv(const PackedLayer& layer, int64_t n);
  void rotate_and_append(int64_t l, int64_t n);
  void attention(int64_t l, int64_t n);
  void project(const PackedMatrix& w, const Activations& x, int64_t n);
  void feed_forward(const PackedLayer& layer, int64_t n);
  void norm(const float* weight, const float* bias, const float* pending, int64_t n,
            bool quantized);
  void head(int64_t first, int64_t n, float* logits);

  const model::Decoder& decoder_;
  const model::Config& config_;
  std::vector<PackedLayer> layers_;
  PackedMatrix output_;
  const float *output_norm_ = nullptr, *output_norm_bias_ = nullptr;
  Arena weights_, vectors_, buffers_;
  KvCache cache_;
  int64_t context_ = 0;
  int64_t weight_bytes_ = 0;
  int64_t position_ = 0;

  // Per token of a batch.
  float* x_ = nullptr;          // residual stream
  float* projected_ = nullptr;  // what is to be added to it
  float* qkv_ = nullptr;
  int64_t qkv_stride_ = 0;
  float* turn_ = nullptr;  // cosines, then sines
  float *gate_ = nullptr, *up_ = nullptr;
  float* logits_ = nullptr;  // kLogitRows rows
  Activations normed_, attended_, hidden_;
  // Per query row: (head of keys, token, query head of the group).
  std::vector<const float*> row_q_;
  std::vector<float*> row_out_;
  std::vector<int64_t> row_first_, row_last_;
  std::vector<float> row_max_, row_sum_, row_values_;
  std::vector<MemberBuffers> members_;
  std::unique_ptr<Arena> member_memory_;
};

}  // namespace fk::engine
