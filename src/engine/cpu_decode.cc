// This file runs a forward pass of one token.
//
// Floor: the packed weights' bytes (and the cache's) at memory bandwidth. The threads stay together
// for the whole token and meet five times a layer. Work on a whole row (norms, int8 blocks of a
// norm's output, the sum over chunks of keys) is done by each thread for itself: that costs less
// than one more meeting and sending the row from core to core. Rows of a matrix always fall to the
// same thread, which therefore knows what it will read next and prefetches it before it waits for
// the others.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/integers.h"
#include "engine/cpu_engine.h"

namespace fk::engine {
namespace {

// A thread prefetches this many bytes of the next stage's weights while it waits for the others.
constexpr int64_t kFetchBytes = int64_t{16} << 10;

// Returns whether products with `m` read int8 activations.
bool integer(const PackedMatrix& m) { return m && !is_float(m.packing); }

// Prefetches the beginning of this thread's part of `w`, which it multiplies next.
void fetch_part(const PackedMatrix& w, const ThreadTeam::Member& me) {
  if (!w) return;
  const int64_t begin = me.begin(w.groups()), end = me.end(w.groups());
  const int64_t bytes = (end - begin) * group_bytes(w.packing, w.columns);
  prefetch(w.group(begin), std::min(bytes, kFetchBytes));
}

// Computes this thread's part of the product of `w` with one token.
void multiply_part(const PackedMatrix& w, const ThreadTeam::Member& me, const Activations& x,
                   float* out) {
  multiply(w, me.begin(w.groups()), me.end(w.groups()), x, 1, out, 0);
}

}  // namespace

void CpuEngine::decode(int32_t token, float* logits) {
  float* const out = padded(config_.vocab) == config_.vocab ? logits : logits_;
  reserve_rows(config_.heads * (position_ / kKeyChunk + 1));  // a row per head and chunk of keys
  ThreadTeam::run([&](ThreadTeam::Member& me) {
    const MemberBuffers& mine = members_[static_cast<size_t>(me.index())];
    const auto norm = [&](const float* add, const float* weight, const float* bias,
                          bool quantized) {
      add_and_norm(mine.x, add, weight, bias, config_.norm_eps, config_.norm == model::Norm::kRms,
                   config_.dim, mine.normed.x);
      if (quantized) quantize(mine.normed, 0, 0, config_.dim / 32);
    };
    read_token(token, position_, mine.x, mine.rotation, mine.normed.x);
    for (int64_t l = 0; l < config_.layers; ++l) {
      const PackedLayer& layer = layers_[static_cast<size_t>(l)];
      const bool last = l + 1 == config_.layers;
      norm(l == 0 ? nullptr : projected_, layer.attention_norm, layer.attention_norm_bias,
           integer(layer.q) || integer(layer.k) || integer(layer.v));
      project_qkv(layer, me, mine.normed);
      me.meet([&] { fetch_part(layer.o, me); });
      attend_chunks(l, me, mine);
      me.meet([] {});
      merge_chunks(layer, mine);
      multiply_part(layer.o, me, mine.attended, projected_);
      me.meet([&] { fetch_part(layer.gate ? layer.gate : layer.up, me); });
      norm(projected_, layer.ffn_norm, layer.ffn_norm_bias,
           integer(layer.gate) || integer(layer.up));
      gate_and_up(layer, me, mine.normed);
      me.meet([&] { fetch_part(layer.down, me); });
      multiply_part(layer.down, me, hidden_, projected_);
      me.meet([&] { fetch_part(last ? output_ : layers_[static_cast<size_t>(l + 1)].q, me); });
    }
    norm(projected_, output_norm_, output_norm_bias_, integer(output_));
    multiply_part(output_, me, mine.normed, out);
  });
  if (out != logits) std::memcpy(logits, out, static_cast<size_t>(config_.vocab) * 4);
  ++position_;
}

void CpuEngine::project_qkv(const PackedLayer& layer, const ThreadTeam::Member& me,
                            const Activations& x) {
  const int64_t count = layer.q.groups() + layer.k.groups() + layer.v.groups();
  const int64_t begin = me.begin(count), end = me.end(count);
  int64_t first = 0;  // how many groups the matrices before this one have
  for (const PackedMatrix* w : {&layer.q, &layer.k, &layer.v}) {
    const int64_t from = std::max(begin - first, int64_t{0});
    const int64_t to = std::min(end - first, w->groups());
    if (from < to) multiply(*w, from, to, x, 1, qkv_ + first * kGroupRows, 0);
    first += w->groups();
  }
}

// The threads share out (chunk of keys, head) pairs. The thread that has a head's newest chunk also
// appends the token's key and value to it. Each pair leaves its own maximum, sum and output.
void CpuEngine::attend_chunks(int64_t l, const ThreadTeam::Member& me, const MemberBuffers& mine) {
  const PackedLayer& layer = layers_[static_cast<size_t>(l)];
  const int64_t dim = config_.head_dim, heads = config_.heads, kv_heads = config_.kv_heads;
  const int64_t group = heads / kv_heads;
  const int64_t end = position_ + 1;
  const int64_t first = layer.window > 0 ? std::max<int64_t>(0, end - layer.window) : 0;
  const int64_t first_chunk = first / kKeyChunk;
  const int64_t chunks = (end - 1) / kKeyChunk + 1 - first_chunk;
  float* const keys = qkv_ + padded(heads * dim);
  const float* const values = keys + padded(kv_heads * dim);
  const int64_t items = chunks * kv_heads;
  for (int64_t i = me.begin(items); i < me.end(items); ++i) {
    const int64_t h = i / chunks, chunk = i % chunks;
    const int64_t row = chunk * heads + h * group;
    for (int64_t j = 0; j < group; ++j) {
      const auto r = static_cast<size_t>(row + j);
      float* q = mine.q + j * dim;
      std::copy_n(qkv_ + (h * group + j) * dim, dim, q);
      prepare_head(layer, true, mine.rotation, q);
      row_q_[r] = q;
      row_first_[r] = first;
      row_last_[r] = end - 1;
    }
    if (chunk + 1 == chunks) {
      prepare_head(layer, false, mine.rotation, keys + h * dim);
      append(cache_, l, h, position_, keys + h * dim, values + h * dim);
    }
    const AttentionRows rows = {group,          &row_q_[row],   &row_first_[row], &row_last_[row],
                                &row_out_[row], &row_max_[row], &row_sum_[row]};
    const int64_t from = (first_chunk + chunk) * kKeyChunk;
    attend(cache_, l, h, rows, from, std::min(end, from + kKeyChunk));
  }
}

// Merges what the chunks of each head left into the softmax over all keys. Every thread does all of
// it, for its own copy.
void CpuEngine::merge_chunks(const PackedLayer& layer, const MemberBuffers& mine) {
  const int64_t dim = config_.head_dim, heads = config_.heads, end = position_ + 1;
  const int64_t first = layer.window > 0 ? std::max<int64_t>(0, end - layer.window) : 0;
  const int64_t chunks = (end - 1) / kKeyChunk + 1 - first / kKeyChunk;
  for (int64_t h = 0; h < heads; ++h) {
    float max = row_max_[static_cast<size_t>(h)];
    for (int64_t c = 1; c < chunks; ++c) {
      max = std::max(max, row_max_[static_cast<size_t>(c * heads + h)]);
    }
    float sum = 0;
    float* out = mine.attended.x + h * dim;
    std::fill_n(out, dim, 0.0f);
    for (int64_t c = 0; c < chunks; ++c) {
      const auto row = static_cast<size_t>(c * heads + h);
      const float weight = chunks == 1 ? 1.0f : std::exp(row_max_[row] - max);
      sum += weight * row_sum_[row];
      for (int64_t i = 0; i < dim; ++i) out[i] += weight * row_out_[row][i];
    }
    for (int64_t i = 0; i < dim; ++i) out[i] /= sum;
  }
  if (integer(layer.o)) quantize(mine.attended, 0, 0, mine.attended.columns / 32);
}

void CpuEngine::gate_and_up(const PackedLayer& layer, const ThreadTeam::Member& me,
                            const Activations& x) {
  constexpr int64_t kGroups = 2;  // 32 rows: their outputs are one int8 block of the next product
  const bool silu = config_.activation == model::Activation::kSilu;
  const bool gated = static_cast<bool>(layer.gate);
  const int64_t items = ceil_div(layer.up.groups(), kGroups);
  const int64_t begin = me.begin(items), end = me.end(items);
  const int64_t from = begin * kGroups, to = std::min(layer.up.groups(), end * kGroups);
  if (from >= to) return;
  if (gated) multiply(layer.gate, from, to, x, 1, gate_, 0);
  multiply(layer.up, from, to, x, 1, up_, 0);
  const int64_t row = from * kGroupRows;
  const int64_t rows = std::min(to * kGroupRows, config_.hidden) - row;
  activate(gated ? gate_ + row : up_ + row, gated ? up_ + row : nullptr, silu, rows,
           hidden_.x + row);
  if (integer(layer.down)) quantize(hidden_, 0, begin, std::min(end, config_.hidden / 32));
}

}  // namespace fk::engine
