// The gradients of a chunk of ssd in one head, as vector code. With e_t the decay from the chunk's
// begin to step t, w_s what step s counts at its end (tail_s dt_s), E_ts the decay from s to t, h
// the state at the begin and dh the gradient of the state at the end:
//
//   dx_s = dt_s (sum over t of (C_t B_s) E_ts dy_t + tail_s dh B_s)
//   dC_t = e_t h^T dy_t + ...,  dB_s = w_s dh^T x_s + ...,  d(C_t B_s) = (dy_t x_s) E_ts dt_s
//
// The logarithm of a step's decay, a_j = dt_j A, is in every E_ts with s < j <= t, in e_t from j
// on, in tail_s before j, and in the chunk's whole decay. Its gradient is the sum of what those
// four are worth. It is summed as such: the difference of two sums over all pairs, which is
// shorter, would cancel.

#include "ops/ssd/cpu/backward_plan.h"

// Once per target.
#if defined(FK_SSD_CPU_BACKWARD_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_SSD_CPU_BACKWARD_PER_TARGET
#undef FK_SSD_CPU_BACKWARD_PER_TARGET
#else
#define FK_SSD_CPU_BACKWARD_PER_TARGET
#endif

#include "ops/ssd/cpu/chunk_simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

using ssd::BackwardJob;
using ssd::BackwardScratch;

// Loads the gradient of a chunk's outputs before the gate: dy, or dy silu(z). `z_rows` is left with
// z.
HWY_INLINE void load_gradient(const Plan& plan, const View& dy, const View& z, const Chunk& chunk,
                              int64_t head, float* z_rows, float* out) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), p = plan.channel_width;
  pack_rows(rows_of_head(dy, chunk.batch, chunk.begin, head), chunk.count, plan.p.channels, out, p);
  if (z.data == nullptr) return;
  pack_rows(rows_of_head(z, chunk.batch, chunk.begin, head), chunk.count, plan.p.channels, z_rows,
            p);
  for (int64_t i = 0; i < chunk.count * p; i += lanes) {
    hn::StoreU(hn::Mul(hn::LoadU(d, out + i), Silu(d, hn::LoadU(d, z_rows + i))), d, out + i);
  }
}

// Stores the gradient of the gate. m.chunk.weighted holds z.
HWY_INLINE void store_gate_gradient(const BackwardJob& job, const BackwardScratch& m,
                                    const Chunk& chunk, int64_t head, const float* state,
                                    bool is_zero) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), p = job.plan.channel_width;
  chunk_outputs(job.plan, m.chunk, chunk, state, is_zero, m.strip, m.rows);
  float* const dy = m.product;  // as it was given, a row at a time
  for (int64_t r = 0; r < chunk.count; ++r) {
    pack_rows(rows_of_head(job.dy, chunk.batch, chunk.begin + r, head), 1, job.plan.p.channels, dy,
              p);
    for (int64_t c = 0; c < p; c += lanes) {
      const Vec z = hn::LoadU(d, m.chunk.weighted + r * p + c), s = Sigmoid(d, z);
      const Vec slope = hn::Mul(s, hn::MulAdd(z, hn::Sub(hn::Set(d, 1.0f), s), hn::Set(d, 1.0f)));
      float* y = m.rows + r * p + c;
      const Vec out = hn::MulAdd(hn::LoadU(d, m.chunk.skip + c),
                                 hn::LoadU(d, m.chunk.x + r * p + c), hn::LoadU(d, y));
      hn::StoreU(hn::Mul(hn::Mul(out, slope), hn::LoadU(d, dy + c)), d, y);
    }
  }
  unpack_rows(m.rows, p, chunk.count, job.plan.p.channels, nullptr,
              rows_of_head(job.dz, chunk.batch, chunk.begin, head));
}

// Takes the strip of dy x^T of steps [t, t + rows): fills those rows of `scores`, adds to the
// gradient of C B^T, and leaves dy x^T o decays in the strip.
HWY_INLINE void score_gradients(const Plan& plan, const BackwardScratch& m, int64_t count,
                                int64_t t, int64_t rows) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), q = plan.chunk_width;
  constexpr int kRows = 4;
  for (int64_t s = 0; s < t + rows; s += lanes) {
    const Vec dt = hn::LoadU(d, m.chunk.steps.dt + s);
    for (int64_t r = 0; r < rows; r += kRows) {
      Vec decays[kRows];
      decays_between(m.chunk.steps, count, t + r, s, decays);
      detail::repeat<kRows>([&](auto i) FK_MATRIX_BODY {
        const int64_t at = (t + r + i) * q + s;
        float* own = m.strip + (r + i) * q + s;
        const auto seen = hn::Gt(decays[i], hn::Zero(d));
        const auto decayed = [&](const float* x) FK_MATRIX_BODY {
          return hn::IfThenElseZero(seen, hn::Mul(hn::LoadU(d, x), decays[i]));
        };
        const Vec change = decayed(own);
        hn::StoreU(decayed(m.chunk.products + at), d, m.scores + at);
        hn::StoreU(hn::MulAdd(change, dt, hn::LoadU(d, m.dproducts + at)), d, m.dproducts + at);
        hn::StoreU(change, d, own);
      });
    }
  }
}

// Computes the gradients of decays within the chunk, for a strip's rows from the last up. `column`
// holds for each step s the sum, over the steps t so far, of what (dy_t x_s) (C_t B_s) E_ts is
// worth; then m.rate[t] is the sum of it over all s before t.
HWY_INLINE void rate_gradients(const Plan& plan, const BackwardScratch& m, int64_t t,
                               int64_t rows) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), q = plan.chunk_width;
  for (int64_t r = rows - 1; r >= 0; --r) {
    const float* change = m.strip + r * q;
    const float* products = m.chunk.products + (t + r) * q;
    Vec sum = hn::Zero(d);
    for (int64_t s = 0; s <= t + r; s += lanes) {
      const Vec worth = hn::MulAdd(hn::LoadU(d, change + s), hn::LoadU(d, products + s),
                                   hn::LoadU(d, m.column + s));
      hn::StoreU(worth, d, m.column + s);
      const int64_t before = std::min(lanes, t + r - s);
      const auto mask = hn::FirstN(d, static_cast<size_t>(before));
      sum = hn::MulAdd(hn::IfThenElseZero(mask, worth), hn::LoadU(d, m.chunk.steps.dt + s), sum);
    }
    m.rate[t + r] = ReduceSum(d, sum);
  }
}

using F64 = hn::Repartition<double, F32>;

HWY_INLINE hn::Vec<F64> lower_half(Vec x) {
  return hn::PromoteTo(F64(), hn::LowerHalf(hn::Half<F32>(), x));
}
HWY_INLINE hn::Vec<F64> upper_half(Vec x) {
  return hn::PromoteTo(F64(), hn::UpperHalf(hn::Half<F32>(), x));
}

// Adds factors o (state rows)^T, as `rows_turned` has the rows, to `sum`, both [state, step]; and
// leaves in `worth` what the scalar products of those rows with `other`'s are, each times its
// factor. What a step is worth counts in the gradients of all decays before or after it, so that it
// is summed in double.
HWY_INLINE void add_state_product(const Plan& plan, uint32_t* room, const float* state,
                                  const float* rows_turned, const float* other, int64_t count,
                                  const float* sum_factors, const float* worth_factors,
                                  float* values, float* sum, double* worth) {
  const F32 d;
  const F64 dd;
  const int64_t lanes = hn::Lanes(d), q = plan.chunk_width, n = plan.p.states;
  product(plan, room, n, padded_columns(count), plan.p.channels, {state, plan.channel_width, 1},
          {rows_turned, q}, {values, q}, Keep::kNothing);
  for (int64_t t = 0; t < count; t += lanes) {
    const Vec factor = hn::LoadU(d, sum_factors + t);
    auto low = hn::Zero(dd), high = hn::Zero(dd);
    for (int64_t row = 0; row < n; ++row) {
      const Vec value = hn::LoadU(d, values + row * q + t);
      const Vec own = hn::LoadU(d, other + row * q + t);
      float* to = sum + row * q + t;
      hn::StoreU(hn::MulAdd(value, factor, hn::LoadU(d, to)), d, to);
      low = hn::MulAdd(lower_half(value), lower_half(own), low);
      high = hn::MulAdd(upper_half(value), upper_half(own), high);
    }
    const Vec scale = hn::LoadU(d, worth_factors + t);
    hn::StoreU(hn::Mul(low, lower_half(scale)), dd, worth + t);
    hn::StoreU(hn::Mul(high, upper_half(scale)), dd, worth + t + lanes / 2);
  }
}

// Returns the scalar product of `count` floats, a multiple of Lanes(F32()), in double.
HWY_INLINE double dot(const float* a, const float* b, int64_t count) {
  const F32 d;
  const F64 dd;
  const int64_t lanes = hn::Lanes(d);
  auto low = hn::Zero(dd), high = hn::Zero(dd);
  for (int64_t i = 0; i < count; i += lanes) {
    const Vec x = hn::LoadU(d, a + i), y = hn::LoadU(d, b + i);
    low = hn::MulAdd(lower_half(x), lower_half(y), low);
    high = hn::MulAdd(upper_half(x), upper_half(y), high);
  }
  return hn::GetLane(hn::SumOfLanes(dd, hn::Add(low, high)));
}

// Stores dx = dt o (scores^T dy + tail o B dh) + D dy, and adds to dD.
HWY_INLINE void store_input_gradient(const BackwardJob& job, const BackwardScratch& m,
                                     const Chunk& chunk, int64_t head, const float* dstate,
                                     bool is_flat, float* dD) {
  const F32 d;
  const Plan& plan = job.plan;
  const int64_t lanes = hn::Lanes(d), p = plan.channel_width, q = plan.chunk_width;
  for (int64_t c = 0; c < p; c += lanes) {
    Vec sum = hn::Zero(d);
    for (int64_t i = c; i < chunk.count * p; i += p) {
      sum = hn::MulAdd(hn::LoadU(d, m.dy + i), hn::LoadU(d, m.chunk.x + i), sum);
    }
    hn::StoreU(hn::Add(hn::LoadU(d, dD + c), sum), d, dD + c);
  }
  if (job.dx.data == nullptr) return;
  if (!is_flat) {
    product(plan, m.chunk.room, chunk.count, p, plan.p.states, {m.chunk.B, plan.state_width, 1},
            {dstate, p}, {m.rows, p}, Keep::kNothing, m.chunk.steps.tail);
  }
  for_each_strip(chunk.count, [&](int64_t s, int64_t rows) HWY_ATTR {
    multiply(rows, p, chunk.count - s, MatrixA{m.scores + s * q + s, 1, q},
             MatrixB{m.dy + s * p, p}, MatrixC{m.rows + s * p, p},
             is_flat ? Keep::kNothing : Keep::kSum);
  });
  for (int64_t r = 0; r < chunk.count; ++r) {
    const Vec dt = hn::Set(d, m.chunk.steps.dt[r]);
    for (int64_t c = 0; c < p; c += lanes) {
      float* out = m.rows + r * p + c;
      const Vec skipped = hn::Mul(hn::LoadU(d, m.chunk.skip + c), hn::LoadU(d, m.dy + r * p + c));
      hn::StoreU(hn::MulAdd(hn::LoadU(d, out), dt, skipped), d, out);
    }
  }
  unpack_rows(m.rows, p, chunk.count, plan.p.channels, nullptr,
              rows_of_head(job.dx, chunk.batch, chunk.begin, head));
}

// Moves the gradient of the state back to a chunk's begin: what is left of it, and what each step
// adds.
HWY_INLINE void retreat_state(const Plan& plan, const Chunk& chunk, float decay,
                              const ChunkScratch& scratch, const float* dy, bool is_flat,
                              float* dstate) {
  const int64_t n = plan.state_width, p = plan.channel_width;
  scale_rows(dy, scratch.steps.grown, chunk.count, p, scratch.weighted);
  std::fill_n(scratch.scale, plan.p.states, decay);
  product(plan, scratch.room, plan.p.states, p, chunk.count, {scratch.C, 1, n},
          {scratch.weighted, p}, {dstate, p}, is_flat ? Keep::kNothing : Keep::kScaled,
          is_flat ? nullptr : scratch.scale);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_SSD_CPU_BACKWARD_PER_TARGET
