// This file declares the CPU engine: its packed weights, its buffers, and the stages of a forward
// pass. The code is in three files: cpu_load.cc packs weights, cpu_decode.cc runs one token,
// cpu_forward.cc a batch.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/thread_team.h"
#include "engine/arena.h"
#include "engine/engine.h"
#include "engine/kernels.h"
#include "engine/kv_cache.h"
#include "engine/pack.h"

namespace fk::engine {

// Holds one transformer layer's weights. Vectors are float32 in the engine's memory; those that the
// model does not have are null, and a matrix that it does not have converts to false.
struct PackedLayer {
  const float *attention_norm, *attention_norm_bias, *ffn_norm, *ffn_norm_bias;
  const float *q_norm, *k_norm;  // the norms of each head's query and key
  PackedMatrix q, k, v, o, gate, up, down;
  int64_t window;  // a token sees the last `window` positions, itself included; 0: all
};

// This many tokens of a prompt run at once: as many as keep a stage's inputs in the second-level
// cache.
constexpr int64_t kBatch = 256;

// Holds the buffers each thread has for itself while all threads work on one token. The engine owns
// them.
struct MemberBuffers {
  float* x;         // the residual stream
  float* rotation;  // the rotary embedding at this position: cosines, then sines
  float* q;         // the rotated queries
  Activations normed, attended;
};

// The logits of this many tokens are computed at once: it bounds the size of their buffer.
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

  // These are in cpu_load.cc. `load` plans every matrix, reserves memory for all of them, and packs
  // them.
  Status load(const EngineOptions& options);
  Status check_memory(int64_t packed_bytes) const;
  // Decides how `weight` will be packed and counts its bytes; its data are packed later. `quantize`
  // is the type that float weights become, or null where they stay as stored.
  PackedMatrix plan(const model::Weight& weight, const model::WeightType* quantize);
  void pack(const model::Weight& weight, const model::Weight& bias, PackedMatrix* matrix);
  // Copies a vector into the engine's memory as float32; the result is null where the model does
  // not have it.
  const float* read_vector(const model::Weight& weight);
  void allocate_buffers();
  // Makes room for at least `count` query rows in the row_ vectors.
  void reserve_rows(int64_t count);
  // Gives `count` threads their MemberBuffers. Returns false where memory runs out.
  bool reserve_members(int count);

  // These are in cpu_decode.cc: all threads together run one token. `me` is the calling thread,
  // which does its share of the groups or chunks; `mine` are its buffers.
  void decode(int32_t token, float* logits);
  void project_qkv(const PackedLayer& layer, const ThreadTeam::Member& me, const Activations& x);
  void attend_chunks(int64_t l, const ThreadTeam::Member& me, const MemberBuffers& mine);
  void merge_chunks(const PackedLayer& layer, const MemberBuffers& mine);
  void gate_and_up(const PackedLayer& layer, const ThreadTeam::Member& me, const Activations& x);

  // These are in cpu_forward.cc and serve one batch of n <= kBatch tokens. `l` is the number of a
  // layer. read_token reads a token's embedding into x and its position's cosines and sines into
  // `rotation`. `spare` is room for one row.
  void read_token(int32_t token, int64_t position, float* x, float* rotation, float* spare) const;
  // Returns an error if any of the n rows of logits is not finite, naming the weight to blame.
  Status check_logits(const float* logits, int64_t n) const;
  // Norms (where the layer does) and rotates one head's query or key, and scales a query.
  void prepare_head(const PackedLayer& layer, bool is_query, const float* rotation,
                    float* head) const;
  void embed(const int32_t* tokens, int64_t n);
  // `pending` is what the layer before left to be added to the residual stream, or null.
  void run_layer(int64_t l, int64_t n, const float* pending);
  void project_qkv(const PackedLayer& layer, int64_t n);
  void rotate_and_append(int64_t l, int64_t n);
  void attention(int64_t l, int64_t n);
  void project(const PackedMatrix& w, const Activations& x, int64_t n);
  void feed_forward(const PackedLayer& layer, int64_t n);
  // Adds `pending` (if not null) to the residual stream and writes its norm to normed_; `quantized`
  // says whether the next product reads int8 blocks of it.
  void norm(const float* weight, const float* bias, const float* pending, int64_t n,
            bool quantized);
  // Writes the logits of tokens [first, first + n) of the batch.
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

  // These have one row per token of a batch, in buffers_.
  float* x_ = nullptr;          // the residual stream
  float* projected_ = nullptr;  // the last product's output, still to be added to x_
  float* qkv_ = nullptr;        // queries, keys and values, each padded to whole groups of rows
  int64_t qkv_stride_ = 0;      // from one token's row of qkv_ to the next, in floats
  float* rotations_ = nullptr;  // the rotary embedding: cosines, then sines
  float *gate_ = nullptr, *up_ = nullptr;
  float* logits_ = nullptr;  // kLogitRows rows
  Activations normed_, attended_, hidden_;
  // These have one entry per query row that attention works on: in a batch ordered by head of keys,
  // then token, then query head of the group; for a single token by chunk of keys, then query head.
  std::vector<const float*> row_q_;
  std::vector<float*> row_out_;
  std::vector<int64_t> row_first_, row_last_;
  std::vector<float> row_max_, row_sum_, row_values_;
  std::vector<MemberBuffers> members_;
  std::unique_ptr<Arena> member_memory_;
};

}  // namespace fk::engine
