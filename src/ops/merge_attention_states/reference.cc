// This file computes merge_attention_states by its definition, one place at a time, in double
// precision.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/access.h"
#include "ops/merge_attention_states/merge_attention_states.h"
#include "ops/merge_attention_states/places.h"

namespace fk::reference {

using merge_attention_states::lse_strides;
using merge_attention_states::Place;
using merge_attention_states::Places;
using merge_attention_states::row_strides;
using merge_attention_states::Strides;

namespace {

// Makes weights of the parts' lse at one place.
struct Weights {
  const Tensor& lses;
  int64_t first, part;
  double shift, sum = 0;  // all together: sum * exp(shift)

  Weights(const Tensor& t, const Strides& s, const Place& place, int64_t parts)
      : lses(t), first(place.offset(s)), part(s.part) {
    constexpr double kMax = std::numeric_limits<double>::max();
    double max = -kMax;
    for (int64_t i = 0; i < parts; ++i) max = std::fmax(max, load(lses, first + i * part));
    shift = std::min(max, kMax);  // finite, so that no difference is inf - inf
    for (int64_t i = 0; i < parts; ++i) sum += std::exp(load(lses, first + i * part) - shift);
  }

  double lse() const { return shift + std::log(sum); }
  bool dead(int64_t i) const { return load(lses, first + i * part) == -HUGE_VAL; }
  double operator[](int64_t i) const {
    return dead(i) ? 0 : std::exp(load(lses, first + i * part) - shift) / sum;
  }
};

}  // namespace

Status run(const MergeAttentionStatesFwd& a, const Exec&) {
  const Places p(a.outs);
  const Strides outs = row_strides(a.outs, true), lses = lse_strides(a.lses, true);
  const Strides out = row_strides(a.out, false), lse = lse_strides(a.lse, false);
  for (int64_t n = 0; n < p.count(); ++n) {
    const Place place(p, n);
    const Weights w(a.lses, lses, place, p.parts);
    if (a.lse) store(a.lse, place.offset(lse), w.lse());
    if (!a.out) continue;
    for (int64_t e = 0; e < p.columns; ++e) {
      double sum = 0;
      for (int64_t s = 0; s < p.parts; ++s) {
        if (w.dead(s)) continue;
        sum += w[s] * load(a.outs, place.offset(outs) + s * outs.part + e * outs.column);
      }
      store(a.out, place.offset(out) + e * out.column, sum);
    }
  }
  return {};
}

Status run(const MergeAttentionStatesBwd& a, const Exec&) {
  const Places p(a.outs);
  const Strides outs = row_strides(a.outs, true), lses = lse_strides(a.lses, true);
  const Strides dout = row_strides(a.dout, false), dlse = lse_strides(a.dlse, false);
  const Strides douts = row_strides(a.douts, true), dlses = lse_strides(a.dlses, true);
  for (int64_t n = 0; n < p.count(); ++n) {
    const Place place(p, n);
    const Weights w(a.lses, lses, place, p.parts);
    const auto gradient = [&](int64_t e) {
      return load(a.dout, place.offset(dout) + e * dout.column);
    };
    const auto product = [&](int64_t s) {
      double sum = 0;
      for (int64_t e = 0; e < p.columns; ++e) {
        sum += gradient(e) * load(a.outs, place.offset(outs) + s * outs.part + e * outs.column);
      }
      return sum;
    };
    double delta = a.dlse ? -load(a.dlse, place.offset(dlse)) : 0;
    for (int64_t s = 0; a.dlses && s < p.parts; ++s) {
      if (!w.dead(s)) delta += w[s] * product(s);
    }
    for (int64_t s = 0; s < p.parts; ++s) {
      if (a.dlses) {
        const double value = w.dead(s) ? 0 : w[s] * (product(s) - delta);
        store(a.dlses, place.offset(dlses) + s * dlses.part, value);
      }
      for (int64_t e = 0; a.douts && e < p.columns; ++e) {
        const double value = w.dead(s) ? 0 : w[s] * gradient(e);
        store(a.douts, place.offset(douts) + s * douts.part + e * douts.column, value);
      }
    }
  }
  return {};
}

}  // namespace fk::reference
