// This is the host side of attention on mma.sync: it lays out the workspace's parts, describes
// operands as the kernels take them, and chooses a tile.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>

#include "core/exec.h"
#include "core/integers.h"
#include "core/workspace.h"
#include "cuda/launch.h"
#include "ops/attention/cuda/rotate.h"
#include "ops/attention/cuda/scores.cuh"

namespace fk::cuda::attention {

// Returns the form in which tensor cores get elements, which the architecture of the code that runs
// decides.
inline Form form_of(DType dtype, int code) {
  if (dtype == DType::kFloat32) return Form::kTwoTerms;
  if (dtype == DType::kFloat8E4M3) return Form::kScaled;
  return dtype == DType::kBFloat16 && code < 80 ? Form::kScaled : Form::kSame;
}

// Holds the largest magnitudes of scaled operands.
struct Maxima {
  int64_t elements = 0;  // of an operand
  uint32_t* data = nullptr;

  Maxima(const Problem& problem, Form form, int count, WorkspaceParts* parts) {
    const int64_t batch = problem.packed ? 1 : problem.batch;
    if (form == Form::kSame || batch * problem.kv_heads == 0) return;
    elements = batch * problem.kv_heads * (1 + most_slices(batch));
    data = parts->take<uint32_t>(count * elements);
  }
  uint32_t* of(int operand) const { return data == nullptr ? nullptr : data + operand * elements; }
};

// Describes an operand on its way to the kernels, with the place where it is prepared, if it has to
// be.
struct Prepared {
  const Tensor* tensor;
  bool queries;
  Rotation rotation;
  Form form;
  uint32_t* maxima;
  View scales;                                // of 8-bit elements
  bool inside = false;                        // the kernel itself brings float32 into its form
  const RowStatistics* statistics = nullptr;  // see Preparation
  uint16_t* to = nullptr;

  Prepared(const Tensor& t, bool queries_, const Rotation& rotation_, Form form_, uint32_t* maxima_,
           WorkspaceParts* parts, const View& scales_ = {}, bool inside_ = false)
      : tensor(&t),
        queries(queries_),
        rotation(rotation_),
        form(form_),
        maxima(maxima_),
        scales(scales_),
        inside(inside_ && form_ == Form::kTwoTerms && rotation_.pairs == 0) {
    if (!needed()) return;
    to = parts->take<uint16_t>(prepared_elements(t) * (form == Form::kTwoTerms ? 2 : 1));
  }

  bool needed() const { return !inside && (form != Form::kSame || rotation.pairs > 0); }

  Operand operand(const Problem& problem) const {
    const Tensor& t = *tensor;
    Operand x;
    x.columns = static_cast<int>(needed() ? prepared_columns(t) : t.size(-1));
    x.kv_heads = static_cast<int>(problem.kv_heads);
    if (needed()) {
      x.data = to;
      x.column = 1;
      x.head = prepared_columns(t);
      x.row = x.head * t.size(-2);
      x.batch = problem.packed ? 0 : x.row * t.size(-3);
      x.low = prepared_elements(t);
      x.maxima = maxima;
      x.vectors = true;
      return x;
    }
    const View view = fk::attention::view(t);
    x.data = static_cast<const uint16_t*>(t.data);
    x.batch = view.batch;
    x.row = view.row;
    x.head = view.head;
    x.column = view.column;
    x.vectors =
        reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && x.column == 1 && x.columns % 8 == 0;
    for (int i = 0; i + 1 < t.ndim; ++i) {
      x.vectors = x.vectors && (t.shape[i] == 1 || t.strides[i] * size_of(t.dtype) % 16 == 0);
    }
    return x;
  }
};

// Prepares those of the operands that need it, in one launch.
inline Status prepare(const Problem& problem, std::initializer_list<const Prepared*> operands,
                      cudaStream_t stream, float* sums = nullptr, int64_t sum_count = 0) {
  Preparation tensors[kMostPreparations];
  int count = 0;
  for (const Prepared* x : operands) {
    if (x->needed()) {
      tensors[count++] = {x->tensor, x->queries, x->rotation,  x->to,
                          x->maxima, x->scales,  x->statistics};
    }
  }
  return count == 0
             ? Status()
             : prepare(problem, (*operands.begin())->form, tensors, count, stream, sums, sum_count);
}

template <class Args>
ScoreChange score_change_of(const Args& a, const Problem& problem) {
  ScoreChange change;
  change.bias = fk::attention::bias_view(a.bias);
  change.slopes = fk::attention::slope_view(a.alibi_slopes);
  if (a.bias) change.bias_dtype = a.bias.dtype;
  if (a.alibi_slopes) change.slopes_dtype = a.alibi_slopes.dtype;
  change.scale = static_cast<float>(problem.scale);
  change.softcap = static_cast<float>(problem.softcap);
  change.plain = change.bias.data == nullptr && change.slopes.data == nullptr &&
                 change.softcap == 0.f && change.scale > 0.f && std::isfinite(change.scale);
  return change;
}

// Such calls are so rare that one kernel takes them, with features or without: there is less to
// compile.
template <int kTerms, int kDim>
constexpr bool kAlwaysFeatures = kTerms == 2 && kDim > 128;

// Returns the number of columns of the kernels that take the call; they are compiled for these
// three.
inline int dim_of(const Problem& problem) {
  const int64_t columns = std::max(problem.head_dim, problem.value_dim);
  return columns <= 64 ? 64 : columns <= 128 ? 128 : 256;
}

// Returns how many heads of the batch, at its end, take turns tile by tile, the longest tiles of
// all first. Where masks make tiles unequal, all multiprocessors then finish at about the same
// time: three tiles for each block that runs at once are enough. The heads before come one after
// another, for what they share to stay in L2.
inline int heads_together(const Problem& p, int64_t tiles, int64_t heads, int64_t blocks_at_once) {
  const int64_t all = p.batch * heads;
  if (p.packed || p.mask.unlimited() || tiles * all >= int64_t{1} << 30) return 0;
  return static_cast<int>(std::min(all, ceil_div(3 * blocks_at_once, tiles)));
}

// Launches `parts` such grids along z; the blocks at one place of them are a cluster. `early` is
// launch()'s.
template <class Tile, class Argument>
Status launch_tile(void (*kernel)(Argument), const char* name, dim3 grid, const Argument& p,
                   cudaStream_t stream, int parts = 1, bool early = false) {
  grid.z = static_cast<unsigned>(parts);
  const LaunchShape shape = {grid, Tile::kThreads, Tile::kSharedBytes, parts > 1};
  const void* arguments[] = {&p};
  return launch(reinterpret_cast<const void*>(kernel), name, shape, stream, arguments, early);
}

// Returns whether the device takes the large tile: the code is for sm_80 or later, and the device
// has the shared memory. Otherwise it takes the small one, which fits Turing's 64 KB.
template <class Large, class Small>
bool takes_large(const DeviceProperties& properties) {
  constexpr int kTuringBytes = 64 * 1024, kAmpereBytes = 99 * 1024;  // the least of sm_8x
  static_assert(Small::kSharedBytes <= kTuringBytes);
  static_assert(Large::kSharedBytes <= kAmpereBytes || Small::kUse == Use::kSmall);
  return properties.code >= 80 && Large::kSharedBytes <= properties.shared_bytes_per_block;
}

}  // namespace fk::cuda::attention
