// Vector code that the kernels of ssd share: the decays of a chunk's steps, its rows as floats, and
// states on their way in and out.

#include "ops/ssd/cpu/plan.h"

// Once per target.
#if defined(FK_SSD_CPU_CHUNK_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_SSD_CPU_CHUNK_PER_TARGET
#undef FK_SSD_CPU_CHUNK_PER_TARGET
#else
#define FK_SSD_CPU_CHUNK_PER_TARGET
#endif

#include <limits>

#include "core/access.h"
#include "cpu/gemm/pack.h"
#include "cpu/gemm/tiles.h"
#include "cpu/simd.h"
#include "cpu/simd_activations.h"
#include "ops/ssd/cpu/products_simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

using ssd::ChunkScratch;
using ssd::HeadBlock;
using ssd::Inputs;
using ssd::kStrip;
using ssd::Piece;
using ssd::Plan;
using ssd::StepScratch;
using ssd::View;
using Vec = hn::Vec<F32>;

// A chunk is the steps [begin, begin + count) of a row of the batch.
struct Chunk {
  int64_t batch, begin, count;
};

HWY_INLINE float number_of_head(const Tensor& t, int64_t head) {
  return t ? static_cast<float>(load(t, head * t.stride(0))) : 0.0f;
}

// Loads D for each channel of a head.
HWY_INLINE void load_skip(const Plan& plan, const Tensor& D, int64_t head, float* out) {
  if (!D || D.ndim == 1) {
    std::fill_n(out, plan.channel_width, number_of_head(D, head));
    return;
  }
  const MatrixView row{D.data, D.dtype, D.stride(0), D.stride(1)};
  pack_rows(row.from(head), 1, plan.p.channels, out, plan.channel_width);
}

// Fills in what is known of each step of a chunk in one head, and returns the whole chunk's decay.
HWY_INLINE float prepare_steps(const Plan& plan, const Inputs& in, const Chunk& chunk, int64_t head,
                               const StepScratch& steps) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), width = plan.chunk_width;
  const MatrixView row{in.dt.data, in.dt.dtype, 0, in.dt.strides[1]};
  const int64_t at = in.dt.offset(chunk.batch, chunk.begin, head);
  pack_rows({static_cast<char*>(row.data) + at * size_of(row.dtype), row.dtype, 0, row.column}, 1,
            chunk.count, steps.raw, width);
  const Vec bias = hn::Set(d, number_of_head(in.dt_bias, head));
  const Vec least = hn::Set(d, in.least), most = hn::Set(d, in.most), one = hn::Set(d, 1.0f);
  for (int64_t i = 0; i < width; i += lanes) {
    Vec dt = hn::Add(hn::LoadU(d, steps.raw + i), bias), slope = one;
    if (in.softplus) dt = Softplus(d, dt, &slope);
    const auto inside = hn::And(hn::Ge(dt, least), hn::Le(dt, most));
    hn::StoreU(hn::IfThenElseZero(inside, slope), d, steps.slope + i);
    hn::StoreU(hn::Min(most, hn::Max(least, dt)), d, steps.dt + i);
  }
  // Past this, a decay is 0 or infinity, and longer sums would lose what other steps add.
  constexpr double kMostStep = 1e5;
  const double A = number_of_head(in.A, head);
  double sum = 0;
  for (int64_t i = 0; i < chunk.count; ++i) {
    sum += std::min(std::max(steps.dt[i] * A, -kMostStep), kMostStep);
    steps.high[i] = static_cast<float>(sum);
    steps.low[i] = static_cast<float>(sum - steps.high[i]);
  }
  std::fill(steps.high + chunk.count, steps.high + width, static_cast<float>(sum));
  std::fill(steps.low + chunk.count, steps.low + width, 0.0f);
  const Vec last_high = hn::Set(d, steps.high[chunk.count - 1]);
  const Vec last_low = hn::Set(d, steps.low[chunk.count - 1]);
  for (int64_t i = 0; i < width; i += lanes) {
    const Vec high = hn::LoadU(d, steps.high + i), low = hn::LoadU(d, steps.low + i);
    Vec e[2] = {hn::Add(high, low), hn::Add(hn::Sub(last_high, high), hn::Sub(last_low, low))};
    Exp(d, e);
    hn::StoreU(e[0], d, steps.grown + i);
    hn::StoreU(e[1], d, steps.tail + i);
    hn::StoreU(hn::Mul(e[1], hn::LoadU(d, steps.dt + i)), d, steps.weight + i);
  }
  return steps.grown[chunk.count - 1];
}

// Computes the decays from the steps [s, s + lanes) to each of the kRows steps from t on. They are
// 0 where s is later than t, or t no step of the chunk: such exponents are masked before they are
// taken.
template <int kRows>
HWY_INLINE void decays_between(const StepScratch& steps, int64_t count, int64_t t, int64_t s,
                               Vec (&out)[kRows]) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  const Vec high = hn::LoadU(d, steps.high + s), low = hn::LoadU(d, steps.low + s);
  const Vec never = hn::Set(d, -std::numeric_limits<float>::infinity());
  detail::repeat<kRows>([&](auto r) FK_MATRIX_BODY {
    const Vec sum = hn::Add(hn::Sub(hn::Set(d, steps.high[t + r]), high),
                            hn::Sub(hn::Set(d, steps.low[t + r]), low));
    const int64_t seen = t + r >= count ? 0 : std::clamp<int64_t>(t + r + 1 - s, 0, lanes);
    out[r] = hn::IfThenElse(hn::FirstN(d, static_cast<size_t>(seen)), sum, never);
  });
  Exp(d, out);
}

// Turns rows whose number is rounded up to four, of which the last are made 0.
HWY_INLINE void turn(float* in, int64_t in_width, int64_t rows, int64_t columns, float* out,
                     int64_t out_width) {
  const int64_t row_fours = (rows + 3) / 4 * 4, column_fours = (columns + 3) / 4 * 4;
  std::fill(in + rows * in_width, in + row_fours * in_width, 0.0f);
  transpose(in, in_width, row_fours, column_fours, out, out_width);
}

// Makes what lies beyond the columns of a state's rows 0.
HWY_INLINE void clear_padding(float* state, int64_t rows, int64_t columns, int64_t width) {
  if (columns == width) return;
  for (int64_t r = 0; r < rows; ++r) {
    std::fill(state + r * width + columns, state + (r + 1) * width, 0.0f);
  }
}

// These bring a head's state from and to a tensor: there it is P rows of N states, here N rows of P
// channels.
HWY_INLINE void load_state(const Plan& plan, const MatrixView& from, float* turned, float* state) {
  const int64_t channels = plan.p.channels, states = plan.p.states;
  pack_rows(from, channels, states, turned, plan.state_width);
  turn(turned, plan.state_width, channels, states, state, plan.channel_width);
  clear_padding(state, states, channels, plan.channel_width);
}
HWY_INLINE void store_state(const Plan& plan, float* state, float* turned, const MatrixView& to) {
  const int64_t channels = plan.p.channels, states = plan.p.states;
  turn(state, plan.channel_width, states, channels, turned, plan.state_width);
  unpack_rows(turned, plan.state_width, channels, states, nullptr, to);
}

// Loads B and C of a chunk, which the heads of a group share, and multiplies C B^T.
HWY_INLINE void load_shared(const Plan& plan, const Inputs& in, const Chunk& chunk, int64_t group,
                            const ChunkScratch& scratch, bool with_products) {
  const int64_t states = plan.p.states, n = plan.state_width, q = plan.chunk_width;
  const auto rows = [&](const View& v) { return rows_of_head(v, chunk.batch, chunk.begin, group); };
  pack_rows(rows(in.B), chunk.count, states, scratch.B, n);
  if (!with_products) return;
  pack_rows(rows(in.C), chunk.count, states, scratch.C, n);
  turn(scratch.B, n, chunk.count, states, scratch.B_turned, q);
  multiply_in_parts(reinterpret_cast<float*>(scratch.room), chunk.count,
                    padded_columns(chunk.count), states, {scratch.C, n, 1}, {scratch.B_turned, q},
                    {scratch.products, q}, Keep::kNothing);
}

// Moves a state on to a chunk's end: what is left of it, and what each step adds. If `is_zero`, it
// is 0, and its memory may hold anything.
HWY_INLINE void advance_state(const Plan& plan, const Chunk& chunk, float decay,
                              const ChunkScratch& scratch, bool is_zero, float* state) {
  const int64_t n = plan.state_width, p = plan.channel_width;
  scale_rows(scratch.x, scratch.steps.weight, chunk.count, p, scratch.weighted);
  std::fill_n(scratch.scale, plan.p.states, decay);
  product(plan, scratch.room, plan.p.states, p, chunk.count, {scratch.B, 1, n},
          {scratch.weighted, p}, {state, p}, is_zero ? Keep::kNothing : Keep::kScaled,
          is_zero ? nullptr : scratch.scale);
}

// Calls body(first, rows) for each strip of a chunk's steps.
template <class Body>
HWY_INLINE void for_each_strip(int64_t count, const Body& body) {
  for (int64_t first = 0; first < count; first += kStrip) {
    body(first, std::min(kStrip, count - first));
  }
}

// Calls body(chunk) for each chunk of a piece, in order.
template <class Body>
HWY_INLINE void for_each_chunk(const Plan& plan, const Piece& piece, const Body& body) {
  for (int64_t begin = piece.begin; begin < piece.end; begin += plan.chunk) {
    body(Chunk{piece.batch, begin, std::min(plan.chunk, piece.end - begin)});
  }
}

// Computes rows [t, t + rows) of the chunk's matrix, C B^T o decays o dt, up to their diagonal.
HWY_INLINE void fill_strip(const Plan& plan, const ChunkScratch& scratch, int64_t count, int64_t t,
                           int64_t rows, float* out) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), width = plan.chunk_width;
  constexpr int kRows = 4;
  for (int64_t s = 0; s < t + rows; s += lanes) {
    const Vec dt = hn::LoadU(d, scratch.steps.dt + s);
    for (int64_t r = 0; r < rows; r += kRows) {
      Vec decays[kRows];
      decays_between(scratch.steps, count, t + r, s, decays);
      const float* products = scratch.products + (t + r) * width + s;
      float* to = out + r * width + s;
      detail::repeat<kRows>([&](auto i) FK_MATRIX_BODY {
        const Vec scaled = hn::Mul(hn::Mul(hn::LoadU(d, products + i * width), decays[i]), dt);
        const auto seen = hn::Gt(decays[i], hn::Zero(d));
        hn::StoreU(hn::IfThenElseZero(seen, scaled), d, to + i * width);
      });
    }
  }
}

// Computes y of a chunk in one head, before D and the gate.
HWY_INLINE void chunk_outputs(const Plan& plan, const ChunkScratch& scratch, const Chunk& chunk,
                              const float* state, bool is_zero, float* strip, float* y) {
  const int64_t p = plan.channel_width, q = plan.chunk_width;
  if (!is_zero) {
    product(plan, scratch.room, chunk.count, p, plan.p.states, {scratch.C, plan.state_width, 1},
            {state, p}, {y, p}, Keep::kNothing, scratch.steps.grown);
  }
  for_each_strip(chunk.count, [&](int64_t t, int64_t rows) HWY_ATTR {
    fill_strip(plan, scratch, chunk.count, t, rows, strip);
    multiply(rows, p, t + rows, MatrixA{strip, q, 1}, MatrixB{scratch.x, p}, MatrixC{y + t * p, p},
             is_zero ? Keep::kNothing : Keep::kSum);
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_SSD_CPU_CHUNK_PER_TARGET
