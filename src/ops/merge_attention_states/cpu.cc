// These are the CPU kernels of merge_attention_states.
//
// Floor: memory traffic. The forward reads the parts' outputs once and writes one; the backward
// reads them and dout once and writes as many gradients. A place costs two exponentials a part.
//
// Threads take places (a head of a query each), vectors run along its columns. The weighted sum of
// the parts stays in the first-level cache; the backward keeps each part's dout . out_s in dlses
// until their weighted sum is known.

#include "ops/merge_attention_states/merge_attention_states.h"

#ifndef FK_OPS_MERGE_ATTENTION_STATES_CPU_ONCE_
#define FK_OPS_MERGE_ATTENTION_STATES_CPU_ONCE_

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "cpu/axis_plan.h"
#include "ops/merge_attention_states/places.h"

namespace fk::cpu {
namespace {

using merge_attention_states::lse_strides;
using merge_attention_states::Place;
using merge_attention_states::Places;
using merge_attention_states::row_strides;
using merge_attention_states::Strides;

// So many columns are summed at a time.
constexpr int64_t kColumns = 256;

// Makes weights of the parts' lse at one place.
struct Weights {
  const float* lses;
  int64_t stride;
  float shift, inverse, lse;

  Weights(const float* p, int64_t part_stride, int64_t parts) : lses(p), stride(part_stride) {
    float max = -FLT_MAX;
    for (int64_t s = 0; s < parts; ++s) max = std::fmax(max, lses[s * stride]);
    shift = std::min(max, FLT_MAX);  // finite, so that no difference is inf - inf
    float sum = 0;
    for (int64_t s = 0; s < parts; ++s) sum += std::exp(lses[s * stride] - shift);
    lse = shift + std::log(sum);
    inverse = 1 / sum;
  }

  bool dead(int64_t s) const { return lses[s * stride] == -kInfinity; }
  float operator[](int64_t s) const { return std::exp(lses[s * stride] - shift) * inverse; }
};

struct MergeForwardJob {
  const MergeAttentionStatesFwd& a;
  Places places;
  Strides outs, lses, out, lse;
};

struct MergeBackwardJob {
  const MergeAttentionStatesBwd& a;
  Places places;
  Strides dout, dlse, outs, lses, douts, dlses;
};

}  // namespace
}  // namespace fk::cpu

#endif  // FK_OPS_MERGE_ATTENTION_STATES_CPU_ONCE_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/merge_attention_states/cpu.cc"
#include "cpu/foreach_target.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

// Calls body(i, n) for n columns from i on: a vector's worth at a time, then the rest.
template <class Body>
HWY_INLINE void for_columns(int64_t columns, const Body& body) {
  const int64_t lanes = hn::Lanes(F32());
  int64_t i = 0;
  for (; i + lanes <= columns; i += lanes) body(i, lanes);
  if (i < columns) body(i, columns - i);
}

template <class T>
HWY_INLINE hn::Vec<F32> load_columns(const T* p, int64_t stride, int64_t i, int64_t n) {
  const F32 d;
  const auto count = static_cast<size_t>(n);
  if (stride != 1) return LoadStridedF32(d, p + i * stride, stride, count);
  return count == hn::Lanes(d) ? LoadF32(d, p + i) : LoadNF32(d, p + i, count);
}

template <class T>
HWY_INLINE void store_columns(hn::Vec<F32> v, T* p, int64_t stride, int64_t i, int64_t n) {
  const F32 d;
  const auto count = static_cast<size_t>(n);
  if (stride != 1) return StoreStridedF32(d, v, p + i * stride, stride, count);
  if (count == hn::Lanes(d)) return StoreF32(d, v, p + i);
  StoreNF32(d, v, p + i, count);
}

template <class T>
void merge_places(const MergeForwardJob& job, int64_t begin, int64_t end) {
  const F32 d;
  alignas(64) float sums[kColumns];
  const int64_t parts = job.places.parts;
  for (int64_t n = begin; n < end; ++n) {
    const Place place(job.places, n);
    const Weights w(job.a.lses.ptr<const float>() + place.offset(job.lses), job.lses.part, parts);
    if (job.a.lse) job.a.lse.ptr<float>()[place.offset(job.lse)] = w.lse;
    if (!job.a.out) continue;
    const T* outs = job.a.outs.ptr<const T>() + place.offset(job.outs);
    T* out = job.a.out.ptr<T>() + place.offset(job.out);
    for (int64_t first = 0; first < job.places.columns; first += kColumns) {
      const int64_t columns = std::min(kColumns, job.places.columns - first);
      std::fill(sums, sums + kColumns, 0.0f);
      for (int64_t s = 0; s < parts; ++s) {
        if (w.dead(s)) continue;
        const auto weight = hn::Set(d, w[s]);
        const T* part = outs + s * job.outs.part + first * job.outs.column;
        for_columns(columns, [&](int64_t i, int64_t count) {
          const auto x = load_columns(part, job.outs.column, i, count);
          hn::Store(hn::MulAdd(x, weight, hn::Load(d, sums + i)), d, sums + i);
        });
      }
      T* to = out + first * job.out.column;
      for_columns(columns, [&](int64_t i, int64_t count) {
        store_columns(hn::Load(d, sums + i), to, job.out.column, i, count);
      });
    }
  }
}

template <class T>
void differentiate_places(const MergeBackwardJob& job, int64_t begin, int64_t end) {
  const F32 d;
  const int64_t parts = job.places.parts, columns = job.places.columns;
  for (int64_t n = begin; n < end; ++n) {
    const Place place(job.places, n);
    const Weights w(job.a.lses.ptr<const float>() + place.offset(job.lses), job.lses.part, parts);
    const T* dout = job.a.dout.ptr<const T>() + place.offset(job.dout);
    const T* outs = job.a.outs.ptr<const T>() + place.offset(job.outs);
    if (job.a.dlses) {
      float* dlses = job.a.dlses.ptr<float>() + place.offset(job.dlses);
      float delta = job.a.dlse ? -job.a.dlse.ptr<const float>()[place.offset(job.dlse)] : 0.0f;
      for (int64_t s = 0; s < parts; ++s) {
        if (w.dead(s)) continue;
        auto products = hn::Zero(d);
        for_columns(columns, [&](int64_t i, int64_t count) {
          const auto x = load_columns(outs + s * job.outs.part, job.outs.column, i, count);
          products = hn::MulAdd(x, load_columns(dout, job.dout.column, i, count), products);
        });
        const float product = ReduceSum(d, products);
        dlses[s * job.dlses.part] = product;
        delta += w[s] * product;
      }
      for (int64_t s = 0; s < parts; ++s) {
        float& value = dlses[s * job.dlses.part];
        value = w.dead(s) ? 0.0f : w[s] * (value - delta);
      }
    }
    if (!job.a.douts) continue;
    T* douts = job.a.douts.ptr<T>() + place.offset(job.douts);
    for (int64_t s = 0; s < parts; ++s) {
      T* part = douts + s * job.douts.part;
      const bool dead = w.dead(s);
      const auto weight = hn::Set(d, w[s]);
      for_columns(columns, [&](int64_t i, int64_t count) {
        const auto x = load_columns(dout, job.dout.column, i, count);
        store_columns(dead ? hn::Zero(d) : hn::Mul(x, weight), part, job.douts.column, i, count);
      });
    }
  }
}

void merge(const MergeForwardJob& job, int64_t begin, int64_t end) {
  ByDType(job.a.outs.dtype, [&](auto t) { merge_places<decltype(t)>(job, begin, end); });
}

void differentiate(const MergeBackwardJob& job, int64_t begin, int64_t end) {
  ByDType(job.a.outs.dtype, [&](auto t) { differentiate_places<decltype(t)>(job, begin, end); });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fk::cpu {
namespace {

FK_CPU_EXPORT(merge);
FK_CPU_EXPORT(differentiate);

template <class Job, class Kernel>
void for_places(const Job& job, Kernel kernel, const Exec& exec) {
  const Places& p = job.places;
  const int64_t grain = grain_of(p.count(), (p.parts + 1) * std::max<int64_t>(p.columns, 1));
  exec.parallel_for(p.count(), grain, [&](int64_t b, int64_t e) { kernel(job, b, e); });
}

}  // namespace

Status run(const MergeAttentionStatesFwd& a, const Exec& exec) {
  const MergeForwardJob job{
      a,
      Places(a.outs),
      row_strides(a.outs, true),
      lse_strides(a.lses, true),
      row_strides(a.out, false),
      lse_strides(a.lse, false),
  };
  for_places(job, FK_CPU_DISPATCH(merge), exec);
  return {};
}

Status run(const MergeAttentionStatesBwd& a, const Exec& exec) {
  const MergeBackwardJob job{
      a,
      Places(a.outs),
      row_strides(a.dout, false),
      lse_strides(a.dlse, false),
      row_strides(a.outs, true),
      lse_strides(a.lses, true),
      row_strides(a.douts, true),
      lse_strides(a.dlses, true),
  };
  for_places(job, FK_CPU_DISPATCH(differentiate), exec);
  return {};
}

}  // namespace fk::cpu
#endif
