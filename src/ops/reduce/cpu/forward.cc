// This file computes sum and max on the CPU.
//
// Floor: x is read once. Each vector loaded costs one addition, or a NaN-propagating maximum; sums
// are accumulated in fp32 within blocks and in double between them. Where there are few rows the
// axis is cut into chunks, which give one partial result each; the cut depends on shapes and
// strides alone, so that the number of threads does not show in the result. Rows and columns: see
// cpu/axis_plan.h.
//
// One core reads memory faster at four distant places at once than at one (27 against 19 GB/s on an
// EPYC 9004), but caches no faster: inputs that those do not hold are taken as four rows at a time.

#ifndef FK_OPS_REDUCE_CPU_JOBS_
#define FK_OPS_REDUCE_CPU_JOBS_

#include <limits>

#include "core/exec.h"
#include "cpu/axis_plan.h"
#include "ops/reduce/reduce.h"

namespace fk::cpu {

enum class Reduce { kSum, kMax };

struct ReduceForward {
  Reduce what;
  const Tensor& x;
  const Tensor& y;
  Rows x_rows, y_rows;
  Tiles tiles;                // none: rows
  int64_t chunks = 1;         // pieces of the axis
  int64_t chunk = 0;          // length of each, but the last
  bool distant = false;       // take four distant rows at a time
  double* partial = nullptr;  // [chunks, rows]

  int64_t pieces() const { return (tiles.count > 0 ? tiles.count : x_rows.count) * chunks; }
};

}  // namespace fk::cpu

#endif  // FK_OPS_REDUCE_CPU_JOBS_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/reduce/cpu/forward.cc"
#include "cpu/foreach_target.h"
#include "cpu/simd_axis.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

struct Sum {
  static double Join(double a, double b) { return a + b; }

  template <class T>
  static HWY_INLINE float Block(const T* x, int64_t n) {
    return BlockSum(x, n);
  }

  template <class T>
  static HWY_INLINE double Row(const T* x, int64_t stride, int64_t n) {
    return RowSum(x, stride, n);
  }

  // Adds up four rows at once. Each has one chain of additions, hence the shorter blocks.
  template <class T>
  static HWY_INLINE void FourRows(const T* const* x, int64_t n, double* result) {
    constexpr int64_t kShortBlock = kBlock / 4;
    const F32 d;
    std::fill_n(result, 4, 0.0);
    for (int64_t i = 0; i < n; i += kShortBlock) {
      auto s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
      ForEachVector(std::min(kShortBlock, n - i), [&](int64_t c, auto k) HWY_ATTR {
        s0 = hn::Add(s0, Load(x[0] + i + c, k));
        s1 = hn::Add(s1, Load(x[1] + i + c, k));
        s2 = hn::Add(s2, Load(x[2] + i + c, k));
        s3 = hn::Add(s3, Load(x[3] + i + c, k));
      });
      result[0] += ReduceSum(d, s0);
      result[1] += ReduceSum(d, s1);
      result[2] += ReduceSum(d, s2);
      result[3] += ReduceSum(d, s3);
    }
  }

  template <class T>
  static HWY_INLINE void Columns(const T* x, int64_t stride, int64_t begin, int64_t end,
                                 int64_t width, double* result) {
    SumColumns(result, width, begin, end,
               [&](int64_t j, int64_t c, auto k) HWY_ATTR { return Load(x + j * stride + c, k); });
  }
};

struct Max {
  static double Join(double a, double b) { return b > a || std::isnan(b) ? b : a; }

  template <class T>
  static HWY_INLINE float Block(const T* x, int64_t n) {
    return BlockMaxNaN(x, n);
  }

  template <class T>
  static HWY_INLINE double Row(const T* x, int64_t stride, int64_t n) {
    if (stride == 1) return BlockMaxNaN(x, n);
    T buffer[kBlock];
    double max = -kInfinity;
    for (int64_t i = 0; i < n; i += kBlock) {
      const int64_t k = std::min(kBlock, n - i);
      max = Join(max, BlockMaxNaN(Gather(x + i * stride, stride, k, buffer), k));
    }
    return max;
  }

  template <class T>
  static HWY_INLINE void FourRows(const T* const* x, int64_t n, double* result) {
    const F32 d;
    auto m0 = hn::Set(d, -kInfinity), m1 = m0, m2 = m0, m3 = m0;
    ForEachVector(n, [&](int64_t c, auto k) HWY_ATTR {
      m0 = MaxNaN(m0, Load(x[0] + c, k, -kInfinity));
      m1 = MaxNaN(m1, Load(x[1] + c, k, -kInfinity));
      m2 = MaxNaN(m2, Load(x[2] + c, k, -kInfinity));
      m3 = MaxNaN(m3, Load(x[3] + c, k, -kInfinity));
    });
    const auto reduce = [d](auto m) HWY_ATTR {
      return hn::AllFalse(d, hn::IsNaN(m)) ? ReduceMax(d, m) : kNaN;
    };
    result[0] = reduce(m0);
    result[1] = reduce(m1);
    result[2] = reduce(m2);
    result[3] = reduce(m3);
  }

  template <class T>
  static HWY_INLINE void Columns(const T* x, int64_t stride, int64_t begin, int64_t end,
                                 int64_t width, double* result) {
    alignas(64) float max[kTile];
    std::fill_n(max, width, -kInfinity);
    const auto larger = [](auto a, auto b) HWY_ATTR { return MaxNaN(a, b); };
    FoldColumns(max, width, begin, end, larger,
                [&](int64_t j, int64_t c, auto k) HWY_ATTR { return Load(x + j * stride + c, k); });
    std::copy_n(max, width, result);
  }
};

// Stores `width` numbers as the results of the rows from `row` on.
template <class T>
HWY_INLINE void StoreResults(const ReduceForward& job, int64_t row, const double* results,
                             int64_t width) {
  T* y = job.y.ptr<T>() + job.y_rows.offset(row);
  for (int64_t c = 0; c < width; ++c) {
    FromF32(static_cast<float>(results[c]), y + c * job.y_rows.last_stride);
  }
}

// Reduces rows of one block each.
template <class Op, class T>
void ForwardShortRows(const ReduceForward& job, int64_t begin, int64_t end) {
  const int64_t n = job.x.size(-1);
  for (int64_t r = begin; r < end; ++r) {
    const T* x = job.x.ptr<const T>() + job.x_rows.offset(r);
    FromF32(Op::Block(x, n), job.y.ptr<T>() + job.y_rows.offset(r));
  }
}

// Piece i of the call is a chunk of a row or of a tile.
struct Piece {
  Tiles::Tile tile;
  int64_t chunk, begin, end;  // end: of the axis's steps

  Piece(const ReduceForward& job, int64_t i) {
    const int64_t item = job.chunks == 1 ? i : i / job.chunks;
    tile = job.tiles.count > 0 ? job.tiles[item] : Tiles::Tile{item, 1};
    chunk = i - item * job.chunks;
    begin = chunk * job.chunk;
    end = std::min(job.x.size(-1), begin + job.chunk);
  }

  template <class T>
  const T* start(const ReduceForward& job) const {
    return job.x.ptr<const T>() + job.x_rows.offset(tile.row) + begin * job.x.stride(-1);
  }
};

template <class T>
HWY_INLINE void StorePiece(const ReduceForward& job, const Piece& piece, const double* results) {
  if (job.chunks == 1) {
    StoreResults<T>(job, piece.tile.row, results, piece.tile.width);
  } else {
    double* partial = job.partial + piece.chunk * job.x_rows.count + piece.tile.row;
    std::copy_n(results, piece.tile.width, partial);
  }
}

template <class Op, class T>
void ForwardPieces(const ReduceForward& job, int64_t begin, int64_t end) {
  alignas(64) double result[kTile];
  const int64_t stride = job.x.stride(-1);
  for (int64_t i = begin; i < end; ++i) {
    const Piece piece(job, i);
    const T* x = piece.start<T>(job);
    if (job.tiles.count > 0) {
      Op::Columns(x, stride, 0, piece.end - piece.begin, piece.tile.width, result);
    } else {
      result[0] = Op::Row(x, stride, piece.end - piece.begin);
    }
    StorePiece<T>(job, piece, result);
  }
}

// Does so for unit-stride rows, four at a time. A row's result must not depend on which others it
// meets, so those left over are taken together with themselves.
template <class Op, class T>
void ForwardDistant(const ReduceForward& job, int64_t begin, int64_t end) {
  const int64_t quarter = (end - begin + 3) / 4;
  for (int64_t i = begin; i < begin + quarter; ++i) {
    const Piece pieces[4] = {{job, i},
                             {job, std::min(end - 1, i + quarter)},
                             {job, std::min(end - 1, i + 2 * quarter)},
                             {job, std::min(end - 1, i + 3 * quarter)}};
    double results[4];
    const T* x[4];
    bool even = true;
    for (int j = 0; j < 4; ++j) {
      x[j] = pieces[j].start<T>(job);
      even &= pieces[j].end - pieces[j].begin == pieces[0].end - pieces[0].begin;
    }
    if (even) Op::FourRows(x, pieces[0].end - pieces[0].begin, results);
    for (int j = 0; j < 4; ++j) {
      if (!even) {
        const T* same[4] = {x[j], x[j], x[j], x[j]};
        double four[4];
        Op::FourRows(same, pieces[j].end - pieces[j].begin, four);
        results[j] = four[0];
      }
      StorePiece<T>(job, pieces[j], &results[j]);
    }
  }
}

// Joins the chunks of all rows.
template <class Op, class T>
void JoinChunks(const ReduceForward& job) {
  const int64_t rows = job.x_rows.count;
  for (int64_t r = 0; r < rows; ++r) {
    double result = job.partial[r];
    for (int64_t c = 1; c < job.chunks; ++c) result = Op::Join(result, job.partial[c * rows + r]);
    StoreResults<T>(job, r, &result, 1);
  }
}

template <class Op>
void Forward(const ReduceForward& job, int64_t begin, int64_t end) {
  const bool short_rows = job.tiles.count == 0 && job.x.stride(-1) == 1 && job.x.size(-1) <= kBlock;
  ByDType(job.x.dtype, [&](auto t) {
    using T = decltype(t);
    if (job.distant) {
      ForwardDistant<Op, T>(job, begin, end);
    } else if (short_rows) {
      ForwardShortRows<Op, T>(job, begin, end);
    } else {
      ForwardPieces<Op, T>(job, begin, end);
    }
  });
}

}  // namespace

void reduce_forward(const ReduceForward& job, int64_t begin, int64_t end) {
  job.what == Reduce::kSum ? Forward<Sum>(job, begin, end) : Forward<Max>(job, begin, end);
}

void reduce_join(const ReduceForward& job) {
  ByDType(job.x.dtype, [&](auto t) {
    using T = decltype(t);
    job.what == Reduce::kSum ? JoinChunks<Sum, T>(job) : JoinChunks<Max, T>(job);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace fk::cpu {

FK_CPU_EXPORT(reduce_forward);
FK_CPU_EXPORT(reduce_join);

namespace {

// Plans a call from shapes and strides only.
ReduceForward plan(Reduce what, const Tensor& x, const Tensor& y) {
  constexpr int64_t kPieces = 64;       // enough for the threads of a large machine
  constexpr int64_t kFewPieces = 8;     // so few items would leave threads idle
  constexpr int64_t kElements = 16384;  // a piece is worth a thread
  ReduceForward job{what, x, y, rows_of(x), rows_of(y, 0), {}};
  const int64_t n = x.size(-1);
  job.chunk = n;
  if (in_columns(x, job.x_rows)) {
    const int64_t inner = evenly_spaced_rows({&job.x_rows, &job.y_rows});
    job.tiles = tiles_of(job.x_rows.count, inner, kTile);
  }
  constexpr int64_t kNearBytes = int64_t{24} << 20;
  job.distant = job.tiles.count == 0 && x.stride(-1) == 1 && n >= kBlock &&
                x.numel() * size_of(x.dtype) > kNearBytes;
  const int64_t items = job.pieces();
  const int64_t width = job.tiles.count > 0 ? job.tiles.width : 1;
  if (items == 0 || items > kFewPieces || items * width * n <= 2 * kInlineElements) return job;
  const int64_t wanted = std::min(kPieces / items, width * n / kElements);
  if (wanted <= 1) return job;
  const int64_t unit = job.tiles.count > 0 ? 64 : kBlock;
  job.chunk = ((n - 1) / wanted / unit + 1) * unit;
  job.chunks = (n - 1) / job.chunk + 1;
  return job;
}

Status forward(Reduce what, const Tensor& x, const Tensor& y, const Exec& exec) {
  if (!y) return {};
  ReduceForward job = plan(what, x, y);
  job.partial = exec.workspace<double>();
  const auto kernel = FK_CPU_DISPATCH(reduce_forward);
  const int64_t width = job.tiles.count > 0 ? job.tiles.width : 1;
  exec.parallel_for(job.pieces(), grain_of(job.pieces(), width * job.chunk),
                    [&](int64_t b, int64_t e) { kernel(job, b, e); });
  if (job.chunks > 1) FK_CPU_DISPATCH(reduce_join)(job);
  return {};
}

size_t partial_bytes(Reduce what, const Tensor& x, const Tensor& y) {
  if (!y) return 0;
  const ReduceForward job = plan(what, x, y);
  return job.chunks > 1 ? job.chunks * job.x_rows.count * sizeof(double) : 0;
}

}  // namespace

size_t workspace(const SumFwd& a) { return partial_bytes(Reduce::kSum, a.x, a.y); }

size_t workspace(const MaxFwd& a) { return partial_bytes(Reduce::kMax, a.x, a.y); }

Status run(const SumFwd& a, const Exec& exec) { return forward(Reduce::kSum, a.x, a.y, exec); }

Status run(const MaxFwd& a, const Exec& exec) { return forward(Reduce::kMax, a.x, a.y, exec); }

}  // namespace fk::cpu

#endif  // HWY_ONCE
