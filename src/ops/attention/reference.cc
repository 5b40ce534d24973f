// This file computes attention by its definition, one query at a time, in double precision.
#include <cmath>
#include <limits>
#include <vector>

#include "core/access.h"
#include "ops/attention/attention.h"
#include "ops/attention/problem.h"

namespace fk::reference {

using attention::Mask;
using attention::Problem;
using attention::Sequence;
using attention::View;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

using Row = std::vector<double>;

// Holds what scores and their gradients need of either op.
template <class Args>
struct Scores {
  const Args& a;
  Problem p;
  View q, k, v, bias, slopes;
  attention::Scales scales;

  explicit Scores(const Args& args)
      : a(args),
        p(attention::problem_of(args)),
        q(attention::view(args.q)),
        k(attention::view(args.k)),
        v(attention::view(args.v)),
        bias(attention::bias_view(args.bias)),
        slopes(attention::slope_view(args.alibi_slopes)),
        scales(attention::scales_of(args)) {}

  static Row read(const Tensor& t, const View& view, int64_t b, int64_t row, int64_t head) {
    Row out(t.size(-1));
    const int64_t begin = b * view.batch + row * view.row + head * view.head;
    for (size_t d = 0; d < out.size(); ++d) out[d] = load(t, begin + d * view.column);
    return out;
  }

  // Turns each pair by its angle at `position`, or back if `sign` is -1.
  void rotate(Row& x, int64_t position, int sign) const {
    if (!a.rotary_cos) return;
    const int64_t pairs = a.rotary_cos.size(1);
    for (int64_t r = 0; r < pairs; ++r) {
      const double c =
          load(a.rotary_cos, position * a.rotary_cos.stride(0) + r * a.rotary_cos.stride(1));
      const double s =
          sign * load(a.rotary_sin, position * a.rotary_sin.stride(0) + r * a.rotary_sin.stride(1));
      double& first = x[a.rotary_interleaved ? 2 * r : r];
      double& second = x[a.rotary_interleaved ? 2 * r + 1 : r + pairs];
      const double turned = first * c - second * s;
      second = second * c + first * s;
      first = turned;
    }
  }

  Row query(const Sequence& s, int64_t b, int64_t i, int64_t h) const {
    Row out = read(a.q, q, b, s.q_begin + i, h);
    rotate(out, i + s.k_len - s.q_len, 1);
    return out;
  }
  Row key(const Sequence& s, int64_t b, int64_t j, int64_t h) const {
    Row out = read(a.k, k, b, s.k_begin + j, h / p.group());
    rotate(out, j, 1);
    return out;
  }
  Row value(const Sequence& s, int64_t b, int64_t j, int64_t h) const {
    Row out = read(a.v, v, b, s.k_begin + j, h / p.group());
    for (double& x : out) x *= scales.values(b, h, p.group());
    return out;
  }

  // Returns the score of a query and a key. `slope` gets its derivative by scale * q.k.
  double score(const Sequence& s, int64_t b, int64_t h, int64_t i, int64_t j, const Row& query,
               const Row& key, double* slope = nullptr) const {
    double x = 0;
    for (size_t d = 0; d < query.size(); ++d) x += query[d] * key[d];
    x *= p.scale * attention::Scales::at(scales.q, b, h) *
         attention::Scales::at(scales.k, b, h / p.group());
    double derivative = 1;
    if (p.softcap > 0) {
      const double t = std::tanh(x / p.softcap);
      x = p.softcap * t;
      derivative = 1 - t * t;
    }
    if (slope != nullptr) *slope = derivative;
    if (a.bias) {
      x += load(a.bias, b * bias.batch + h * bias.head + i * bias.row + j * bias.column);
    }
    if (a.alibi_slopes) {
      const double distance = std::abs(static_cast<double>(i + s.k_len - s.q_len - j));
      x -= load(a.alibi_slopes, b * slopes.batch + h * slopes.head) * distance;
    }
    return x;
  }

  double sink(int64_t h) const {
    return a.sinks ? load(a.sinks, h * a.sinks.stride(0)) : -kInfinity;
  }
};

// Holds a bias without gaps, whose repeated dims have size 1.
struct BiasSums {
  int64_t size[4] = {1, 1, 1, 1};

  explicit BiasSums(const Tensor& bias) {
    for (int i = 0; i < bias.ndim; ++i) size[4 - bias.ndim + i] = bias.shape[i];
  }
  int64_t count() const { return size[0] * size[1] * size[2] * size[3]; }
  int64_t at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const auto of = [&](int64_t index, int dim) { return size[dim] == 1 ? 0 : index; };
    return ((of(b, 0) * size[1] + of(h, 1)) * size[2] + of(i, 2)) * size[3] + of(j, 3);
  }
};

int64_t at(const View& view, int64_t b, int64_t row, int64_t head, int64_t column = 0) {
  return b * view.batch + row * view.row + head * view.head + column * view.column;
}

}  // namespace

Status run(const AttentionFwd& a, const Exec&) {
  const Scores<AttentionFwd> scores(a);
  const Problem& p = scores.p;
  const View out = attention::view(a.out), lse_view = attention::row_view(a.lse);
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = p.sequence(b);
    for (int64_t h = 0; h < p.heads; ++h) {
      for (int64_t i = 0; i < s.q_len; ++i) {
        const Row query = scores.query(s, b, i, h);
        const int64_t first = p.mask.first_key(i, s.q_len, s.k_len);
        const int64_t end = p.mask.end_key(i, s.q_len, s.k_len);
        Row x;
        double largest = -kInfinity;
        for (int64_t j = first; j < end; ++j) {
          x.push_back(scores.score(s, b, h, i, j, query, scores.key(s, b, j, h)));
          // A NaN wins over every number.
          largest = x.back() > largest || std::isnan(x.back()) ? x.back() : largest;
        }
        Row y(p.value_dim, 0.0);
        double lse = -kInfinity;
        if (largest != -kInfinity) {
          largest = std::fmax(largest, scores.sink(h));
          double denominator = std::exp(scores.sink(h) - largest);
          for (double& e : x) denominator += e = std::exp(e - largest);
          lse = largest + std::log(denominator);
          for (int64_t j = first; j < end; ++j) {
            const Row value = scores.value(s, b, j, h);
            for (int64_t d = 0; d < p.value_dim; ++d) y[d] += x[j - first] / denominator * value[d];
          }
        }
        if (a.lse) store(a.lse, at(lse_view, b, s.q_begin + i, h), lse);
        if (!a.out) continue;
        for (int64_t d = 0; d < p.value_dim; ++d) {
          store(a.out, at(out, b, s.q_begin + i, h, d), y[d]);
        }
      }
    }
  }
  return {};
}

Status run(const AttentionBwd& a, const Exec&) {
  const Scores<AttentionBwd> scores(a);
  const Problem& p = scores.p;
  const View dout = attention::view(a.dout), out = attention::view(a.out);
  const View lse_view = attention::row_view(a.lse), dlse_view = attention::row_view(a.dlse);
  const View dq_view = attention::view(a.dq), dk_view = attention::view(a.dk);
  const View dv_view = attention::view(a.dv), dbias_view = attention::bias_view(a.dbias);
  Row dsinks(p.heads, 0.0);
  const BiasSums sums(a.dbias);
  Row dbias(sums.count(), 0.0);
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = p.sequence(b);
    for (int64_t g = 0; g < p.kv_heads; ++g) {
      std::vector<Row> dk(s.k_len, Row(p.head_dim, 0.0)), dv(s.k_len, Row(p.value_dim, 0.0));
      for (int64_t h = g * p.group(); h < (g + 1) * p.group(); ++h) {
        for (int64_t i = 0; i < s.q_len; ++i) {
          const int64_t row = s.q_begin + i;
          const Row query = scores.query(s, b, i, h);
          const double lse = load(a.lse, at(lse_view, b, row, h));
          Row dq(p.head_dim, 0.0), dy(p.value_dim);
          // This is what a change of every score at once would do to the loss.
          double delta = a.dlse ? -load(a.dlse, at(dlse_view, b, row, h)) : 0.0;
          for (int64_t d = 0; d < p.value_dim; ++d) {
            dy[d] = load(a.dout, at(dout, b, row, h, d));
            delta += dy[d] * load(a.out, at(out, b, row, h, d));
          }
          const int64_t first = p.mask.first_key(i, s.q_len, s.k_len);
          const int64_t end = lse == -kInfinity ? first : p.mask.end_key(i, s.q_len, s.k_len);
          for (int64_t j = first; j < end; ++j) {
            const Row key = scores.key(s, b, j, h), value = scores.value(s, b, j, h);
            double slope, dp = 0;
            const double x = scores.score(s, b, h, i, j, query, key, &slope);
            const double weight = std::exp(x - lse);
            for (int64_t d = 0; d < p.value_dim; ++d) {
              dp += dy[d] * value[d];
              dv[j][d] += weight * dy[d];
            }
            const double dscore = weight * (dp - delta);
            if (a.dbias) dbias[sums.at(b, h, i, j)] += dscore;
            for (int64_t d = 0; d < p.head_dim; ++d) {
              dq[d] += dscore * slope * p.scale * key[d];
              dk[j][d] += dscore * slope * p.scale * query[d];
            }
          }
          if (lse != -kInfinity) dsinks[h] -= std::exp(scores.sink(h) - lse) * delta;
          if (!a.dq) continue;
          scores.rotate(dq, i + s.k_len - s.q_len, -1);
          for (int64_t d = 0; d < p.head_dim; ++d) store(a.dq, at(dq_view, b, row, h, d), dq[d]);
        }
      }
      for (int64_t j = 0; j < s.k_len; ++j) {
        const int64_t row = s.k_begin + j;
        scores.rotate(dk[j], j, -1);
        for (int64_t d = 0; a.dk && d < p.head_dim; ++d) {
          store(a.dk, at(dk_view, b, row, g, d), dk[j][d]);
        }
        for (int64_t d = 0; a.dv && d < p.value_dim; ++d) {
          store(a.dv, at(dv_view, b, row, g, d), dv[j][d]);
        }
      }
    }
  }
  for (int64_t h = 0; a.dsinks && h < p.heads; ++h) {
    store(a.dsinks, h * a.dsinks.stride(0), dsinks[h]);
  }
  for (int64_t b = 0; b < sums.size[0]; ++b) {
    for (int64_t h = 0; h < sums.size[1]; ++h) {
      for (int64_t i = 0; i < sums.size[2]; ++i) {
        for (int64_t j = 0; a.dbias && j < sums.size[3]; ++j) {
          store(a.dbias, at(dbias_view, b, i, h, j), dbias[sums.at(b, h, i, j)]);
        }
      }
    }
  }
  return {};
}

}  // namespace fk::reference
