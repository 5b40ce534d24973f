// This file runs a forward pass of many tokens, stage by stage; between two stages all threads meet
// once. Work on a whole row (norms, int8 blocks of a norm's output) is shared out by token.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/integers.h"
#include "engine/cpu_engine.h"
#include "engine/parallel.h"

namespace fk::engine {
namespace {

// Rotates the first 2 * `pairs` values of a head by the angles whose cosines and sines are in
// `rotation`, and multiplies them by `scale`. `interleaved` pairs are neighbours (2 i, 2 i + 1);
// otherwise value i is paired with value i + pairs.
void rotate(float* head, const float* rotation, int64_t pairs, bool interleaved, float scale) {
  const float* cosine = rotation;
  const float* sine = rotation + pairs;
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t a = interleaved ? 2 * i : i;
    const int64_t b = interleaved ? 2 * i + 1 : i + pairs;
    const float x = head[a], y = head[b];
    head[a] = (x * cosine[i] - y * sine[i]) * scale;
    head[b] = (x * sine[i] + y * cosine[i]) * scale;
  }
}

}  // namespace

Status CpuEngine::forward(const int32_t* tokens, int64_t count, Logits which, float* logits) {
  if (count < 0) return invalid("expected a count of tokens, got " + std::to_string(count));
  if (count > context_ - position_) {
    return invalid("the context holds " + std::to_string(context_) + " tokens; " +
                   std::to_string(position_) + " are there and " + std::to_string(count) +
                   " more came");
  }
  for (int64_t i = 0; i < count; ++i) {
    if (tokens[i] < 0 || tokens[i] >= config_.vocab) {
      return invalid("token " + std::to_string(i) + ": expected an id below " +
                     std::to_string(config_.vocab) + ", got " + std::to_string(tokens[i]));
    }
  }
  if (count == 1 && which != Logits::kNone) {
    if (!reserve_members(num_threads())) return {FK_UNSUPPORTED, "too little memory"};
    decode(tokens[0], logits);
    return check_logits(logits, 1);
  }
  for (int64_t begin = 0; begin < count; begin += kBatch) {
    const int64_t n = std::min(kBatch, count - begin);
    embed(tokens + begin, n);
    for (int64_t l = 0; l < config_.layers; ++l) run_layer(l, n, l == 0 ? nullptr : projected_);
    position_ += n;
    if (which == Logits::kAll) {
      head(0, n, logits + begin * config_.vocab);
      FK_RETURN_IF_ERROR(check_logits(logits + begin * config_.vocab, n));
    } else if (which == Logits::kLast && begin + n == count) {
      head(n - 1, 1, logits);
      FK_RETURN_IF_ERROR(check_logits(logits, 1));
    }
  }
  return {};
}

// The search for a weight that is not finite reads all of them, so it runs only once logits have
// turned out wrong.
Status CpuEngine::check_logits(const float* logits, int64_t n) const {
  if (all_finite(logits, n * config_.vocab)) return {};
  std::vector<float> values;
  for (const auto& [name, weight] : model::named_weights(decoder_)) {
    values.resize(static_cast<size_t>(weight->columns));
    for (int64_t r = 0; r < weight->rows; ++r) {
      model::read_row(*weight, r, values.data());
      if (all_finite(values.data(), weight->columns)) continue;
      return invalid("the model's logits are not finite: its weight " + name + " is not, in row " +
                     std::to_string(r));
    }
  }
  return invalid("the model's logits are not finite, though its weights are: they are too large");
}

void CpuEngine::read_token(int32_t token, int64_t position, float* x, float* rotation,
                           float* spare) const {
  model::read_row(decoder_.token_embedding, token, x);
  if (config_.learned_positions) {
    model::read_row(decoder_.position_embedding, position, spare);
    for (int64_t i = 0; i < config_.dim; ++i) x[i] += spare[i];
  }
  const int64_t pairs = config_.rotary_dim / 2;
  for (int64_t i = 0; i < pairs; ++i) {
    const float angle =
        static_cast<float>(position) * config_.rope_frequencies[static_cast<size_t>(i)];
    rotation[i] = std::cos(angle) * config_.rope_magnitude;
    rotation[pairs + i] = std::sin(angle) * config_.rope_magnitude;
  }
}

void CpuEngine::embed(const int32_t* tokens, int64_t n) {
  parallel(n, 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      read_token(tokens[t], position_ + t, x_ + t * padded(config_.dim),
                 rotations_ + t * config_.rotary_dim, normed_.x + t * config_.dim);
    }
  });
}

void CpuEngine::norm(const float* weight, const float* bias, const float* pending, int64_t n,
                     bool quantized) {
  const int64_t stride = padded(config_.dim);
  parallel(n, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      add_and_norm(x_ + t * stride, pending == nullptr ? nullptr : pending + t * stride, weight,
                   bias, config_.norm_eps, config_.norm == model::Norm::kRms, config_.dim,
                   normed_.x + t * config_.dim);
      if (quantized) quantize(normed_, t, 0, config_.dim / 32);
    }
  });
}

void CpuEngine::run_layer(int64_t l, int64_t n, const float* pending) {
  const PackedLayer& layer = layers_[static_cast<size_t>(l)];
  const auto integer = [](const PackedMatrix& m) { return m && !is_float(m.packing); };
  norm(layer.attention_norm, layer.attention_norm_bias, pending, n,
       integer(layer.q) || integer(layer.k) || integer(layer.v));
  project_qkv(layer, n);
  rotate_and_append(l, n);
  attention(l, n);
  project(layer.o, attended_, n);
  norm(layer.ffn_norm, layer.ffn_norm_bias, projected_, n,
       integer(layer.gate) || integer(layer.up));
  feed_forward(layer, n);
  project(layer.down, hidden_, n);
}

void CpuEngine::project_qkv(const PackedLayer& layer, int64_t n) {
  const PackedMatrix* parts[] = {&layer.q, &layer.k, &layer.v};
  const int64_t count = layer.q.groups() + layer.k.groups() + layer.v.groups();
  parallel(count, 1, [&](int64_t begin, int64_t end) {
    int64_t first = 0;  // how many groups the matrices before this one have
    for (const PackedMatrix* w : parts) {
      const int64_t from = std::max(begin - first, int64_t{0});
      const int64_t to = std::min(end - first, w->groups());
      if (from < to) multiply(*w, from, to, normed_, n, qkv_ + first * kGroupRows, qkv_stride_);
      first += w->groups();
    }
  });
}

void CpuEngine::prepare_head(const PackedLayer& layer, bool is_query, const float* rotation,
                             float* head) const {
  const int64_t dim = config_.head_dim;
  const float* weight = is_query ? layer.q_norm : layer.k_norm;
  constexpr bool kRms = true;
  if (weight != nullptr) {
    add_and_norm(head, nullptr, weight, nullptr, config_.norm_eps, kRms, dim, head);
  }
  const float scale = is_query ? 1.0f / std::sqrt(static_cast<float>(dim)) : 1.0f;
  rotate(head, rotation, config_.rotary_dim / 2, config_.rope_interleaved, scale);
  if (!is_query) return;
  for (int64_t i = config_.rotary_dim; i < dim; ++i) head[i] *= scale;
}

void CpuEngine::rotate_and_append(int64_t l, int64_t n) {
  const PackedLayer& layer = layers_[static_cast<size_t>(l)];
  const int64_t dim = config_.head_dim;
  const int64_t k_at = padded(config_.heads * dim);
  const int64_t v_at = k_at + padded(config_.kv_heads * dim);
  parallel(n, 4, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* qkv = qkv_ + t * qkv_stride_;
      const float* rotation = rotations_ + t * config_.rotary_dim;
      for (int64_t h = 0; h < config_.heads; ++h)
        prepare_head(layer, true, rotation, qkv + h * dim);
      for (int64_t h = 0; h < config_.kv_heads; ++h) {
        float* key = qkv + k_at + h * dim;
        prepare_head(layer, false, rotation, key);
        append(cache_, l, h, position_ + t, key, qkv + v_at + h * dim);
      }
    }
  });
}

void CpuEngine::attention(int64_t l, int64_t n) {
  constexpr int64_t kQueryBlock = 16;
  const PackedLayer& layer = layers_[static_cast<size_t>(l)];
  const int64_t group = config_.heads / config_.kv_heads;
  const int64_t blocks = ceil_div(n, kQueryBlock);
  const bool quantized = !is_float(layer.o.packing);
  for (int64_t h = 0; h < config_.kv_heads; ++h) {
    for (int64_t t = 0; t < n; ++t) {
      const int64_t last = position_ + t;
      for (int64_t j = 0; j < group; ++j) {
        const auto row = static_cast<size_t>((h * n + t) * group + j);
        row_q_[row] = qkv_ + t * qkv_stride_ + (h * group + j) * config_.head_dim;
        row_first_[row] = layer.window > 0 ? std::max<int64_t>(0, last - layer.window + 1) : 0;
        row_last_[row] = last;
      }
    }
  }
  // The last blocks of queries see the most keys, so the threads begin with them.
  parallel(blocks * config_.kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = blocks - 1 - i / config_.kv_heads, h = i % config_.kv_heads;
      const int64_t t0 = block * kQueryBlock, t1 = std::min(n, t0 + kQueryBlock);
      const int64_t row = (h * n + t0) * group;
      const int64_t first = row_first_[static_cast<size_t>(row)] / 64 * 64;
      const AttentionRows rows = {(t1 - t0) * group, &row_q_[row],   &row_first_[row],
                                  &row_last_[row],   &row_out_[row], &row_max_[row],
                                  &row_sum_[row]};
      attend(cache_, l, h, rows, first, position_ + t1);
      for (int64_t t = t0; t < t1; ++t) {
        for (int64_t j = 0; j < group; ++j) {
          const auto r = static_cast<size_t>((h * n + t) * group + j);
          float* out = attended_.x + t * attended_.columns + (h * group + j) * config_.head_dim;
          for (int64_t c = 0; c < config_.head_dim; ++c) out[c] = row_out_[r][c] / row_sum_[r];
        }
      }
    }
  });
  if (!quantized) return;
  parallel(n, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) quantize(attended_, t, 0, attended_.columns / 32);
  });
}

void CpuEngine::project(const PackedMatrix& w, const Activations& x, int64_t n) {
  parallel(w.groups(), 1, [&](int64_t begin, int64_t end) {
    multiply(w, begin, end, x, n, projected_, padded(config_.dim));
  });
}

void CpuEngine::feed_forward(const PackedLayer& layer, int64_t n) {
  constexpr int64_t kGroups = 2;  // 32 rows: their outputs are one int8 block of the next product
  const int64_t stride = padded(config_.hidden);
  const bool silu = config_.activation == model::Activation::kSilu;
  const bool quantized = !is_float(layer.down.packing);
  const bool gated = static_cast<bool>(layer.gate);
  const int64_t items = ceil_div(layer.up.groups(), kGroups);
  parallel(items, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t from = i * kGroups, to = std::min(layer.up.groups(), from + kGroups);
      const int64_t row = from * kGroupRows;
      const int64_t rows = std::min(kGroups * kGroupRows, config_.hidden - row);
      if (gated) multiply(layer.gate, from, to, normed_, n, gate_, stride);
      multiply(layer.up, from, to, normed_, n, up_, stride);
      for (int64_t t = 0; t < n; ++t) {
        const float* up = up_ + t * stride + row;
        const float* in = gated ? gate_ + t * stride + row : up;
        activate(in, gated ? up : nullptr, silu, rows, hidden_.x + t * hidden_.columns + row);
        if (quantized) quantize(hidden_, t, i, i + 1);
      }
    }
  });
}

void CpuEngine::head(int64_t first, int64_t n, float* logits) {
  // Moves the wanted rows to the front, so that their norms land where `multiply` reads.
  const int64_t stride = padded(config_.dim), row = padded(config_.vocab);
  if (first > 0) {
    std::memmove(x_, x_ + first * stride, static_cast<size_t>(n * stride) * 4);
    std::memmove(projected_, projected_ + first * stride, static_cast<size_t>(n * stride) * 4);
  }
  norm(output_norm_, output_norm_bias_, projected_, n, !is_float(output_.packing));
  for (int64_t t = 0; t < n; t += kLogitRows) {
    const int64_t rows = std::min(kLogitRows, n - t);
    Activations x = normed_;
    const int64_t blocks = x.columns / 32;
    x.x += t * x.columns;
    x.q += t * x.columns;
    x.scale += t * blocks;
    x.sum += t * blocks;
    x.minus32 += t * blocks;
    x.minus16 += t * blocks * 2;
    parallel(output_.groups(), 1, [&](int64_t begin, int64_t end) {
      multiply(output_, begin, end, x, rows, logits_, row);
    });
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(logits + (t + r) * config_.vocab, logits_ + r * row,
                  static_cast<size_t>(config_.vocab) * 4);
    }
  }
}

int64_t CpuEngine::cache_bytes() const {
  int64_t bytes = 0;
  for (const PackedLayer& layer : layers_) {
    const int64_t keys = layer.window > 0 ? std::min(position_, layer.window) : position_;
    bytes += keys * cache_.heads * cache_.padded_dim * cache_.element() * 2;
  }
  return bytes;
}

}  // namespace fk::engine
