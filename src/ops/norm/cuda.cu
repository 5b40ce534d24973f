// rms_norm and layer_norm on CUDA: chooses kernel and tile, and launches. The kernels are in
// cuda_forward.cuh and cuda_backward.cuh.
#include <algorithm>

#include "cuda/launch.h"
#include "ops/norm/cuda_backward.cuh"
#include "ops/norm/cuda_forward.cuh"
#include "ops/norm/norm.h"

namespace fk {
namespace cuda {
namespace {

using namespace norm;  // NOLINT: the kernels' own namespace

template <class T_>
struct Type {
  using T = T_;
};

template <class Body>
Status with_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(Type<float>());
    case DType::kFloat16:
      return body(Type<__half>());
    case DType::kBFloat16:
      return body(Type<__nv_bfloat16>());
    default:
      return unsupported(std::string("no CUDA norm kernel for ") + name_of(dtype));
  }
}

template <int kTeam, int kBlock, int kVecs_>
struct Tile {
  using Team = norm::Team<kTeam, kBlock>;
  static constexpr int kVecs = kVecs_;
};

// body(Tile) for the forward of rows of `vectors` 16-byte vectors, at most kMaxForward.
constexpr int64_t kMaxForward = 2048;
template <class Body>
Status with_forward_tile(int64_t vectors, const Body& body) {
  // A warp per row: no barriers, and four rows per block keep the block scheduler quiet.
  if (vectors <= 32) return body(Tile<32, 128, 1>());
  if (vectors <= 96) return body(Tile<32, 128, 3>());
  // A block per row. Two vectors per thread: enough loads in flight, few enough registers for many
  // blocks per multiprocessor.
  if (vectors <= 256) return body(Tile<128, 128, 2>());
  if (vectors <= 512) return body(Tile<256, 256, 2>());
  if (vectors <= 1024) return body(Tile<512, 512, 2>());
  // Four: larger blocks would leave the multiprocessor with one or two, all at the same barrier.
  return body(Tile<512, 512, 4>());
}

// body(Tile, blocks per multiprocessor) for the backward, at most kMaxBackward. Longer rows would
// not fit the registers beside the sums of their columns.
constexpr int64_t kMaxBackward = 1024;
template <class Body>
auto with_backward_tile(int64_t vectors, const Body& body) {
  // A warp per row, as in the forward.
  if (vectors <= 32) return body(Tile<32, 128, 1>(), 4);
  if (vectors <= 96) return body(Tile<32, 128, 3>(), 3);
  // One vector per thread while blocks are small: the sums and a row ahead fit 64 registers.
  if (vectors <= 256) return body(Tile<256, 256, 1>(), 3);
  if (vectors <= 512) return body(Tile<256, 256, 2>(), 2);
  return body(Tile<512, 512, 2>(), 1);
}

// The looped kernels: enough threads for the long rows that come there.
constexpr int kLoopedThreads = 512;
constexpr int kLoopedBlocksPerMultiprocessor = 2;

View view_of(const Tensor& t, int inner_dims) {
  View view;
  if (!t) return view;
  view.data = t.data;
  view.rows = rows_of(t, inner_dims);
  if (inner_dims > 0) view.column_stride = t.stride(-1);
  return view;
}

Parameter parameter_of(const Tensor& t, float otherwise, float offset) {
  Parameter parameter;
  parameter.otherwise = otherwise;
  parameter.offset = offset;
  if (!t) return parameter;
  parameter.data = t.data;
  parameter.stride = t.stride(-1);
  parameter.is_float = t.dtype == DType::kFloat32;
  return parameter;
}

// Whether every row of `t` can be read in 16-byte vectors.
bool vectorised(const Tensor& t) {
  if (!t) return true;
  if (t.stride(-1) != 1 || reinterpret_cast<uintptr_t>(t.data) % 16 != 0) return false;
  for (int i = 0; i < t.ndim - 1; ++i) {
    if (t.shape[i] > 1 && t.strides[i] * size_of(t.dtype) % 16 != 0) return false;
  }
  return t.size(-1) * size_of(t.dtype) % 16 == 0;
}

template <class... Tensors>
bool all_vectorised(const Tensors&... tensors) {
  return (vectorised(tensors) && ...);
}

int64_t vectors_of(const Tensor& x) { return x.size(-1) * size_of(x.dtype) / 16; }

// Whether the tiled kernels take rows of x, if all tensors are vectorised.
bool fits_tiled(const Tensor& x, int64_t rows, int64_t max_vectors) {
  return x.size(-1) > 0 && vectors_of(x) <= max_vectors && rows < (int64_t{1} << 31);
}

template <bool kLayer>
Status launch_forward(const Forward& p, DType dtype, int64_t vectors, bool tiled, bool aligned,
                      cudaStream_t stream) {
  return with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::T;
    if (tiled) {
      return with_forward_tile(vectors, [&](auto tile) {
        using Tile = decltype(tile);
        using Team = typename Tile::Team;
        const auto blocks = static_cast<unsigned>((p.rows + Team::kCount - 1) / Team::kCount);
        forward_tiled<T, kLayer, Team, Tile::kVecs, DirectLoader, 1>
            <<<blocks, Team::kThreads, 0, stream>>>(p);
        return check_launch("norm forward_tiled");
      });
    }
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(p.rows, 1 << 20));
    if (aligned) {
      forward_looped<T, kVecWidth<T>, kLoopedThreads><<<blocks, kLoopedThreads, 0, stream>>>(p);
    } else {
      forward_looped<T, 1, kLoopedThreads><<<blocks, kLoopedThreads, 0, stream>>>(p);
    }
    return check_launch("norm forward_looped");
  });
}

template <class Args>
Forward forward_of(const Args& a) {
  Forward p;
  p.inputs[0] = view_of(a.x, 1);
  p.inputs[1] = view_of(a.residual, 1);
  p.y = view_of(a.y, 1);
  p.sum = view_of(a.sum, 1);
  p.rstd = view_of(a.rstd, 0);
  p.rows = p.inputs[0].rows.count;
  p.columns = a.x.size(-1);
  p.eps = static_cast<float>(a.eps);
  return p;
}

// The most blocks a backward launches: as many as run at once, since each leaves a row of partial
// sums. Does not look at pointers: the workspace is asked for before there are any.
int tiled_backward_blocks(const Tensor& x, int64_t rows) {
  return with_backward_tile(vectors_of(x), [&](auto tile, int per_multiprocessor) {
    constexpr int kTeams = decltype(tile)::Team::kCount;
    return static_cast<int>(std::min<int64_t>(
        (rows + kTeams - 1) / kTeams,
        int64_t{per_multiprocessor} * device_properties(x.device_id).multiprocessors));
  });
}

int looped_backward_blocks(const Tensor& x, int64_t rows) {
  return static_cast<int>(std::min<int64_t>(
      rows, kLoopedBlocksPerMultiprocessor * device_properties(x.device_id).multiprocessors));
}

size_t backward_workspace(const Tensor& x, int outputs) {
  const int64_t rows = rows_of(x).count;
  int blocks = looped_backward_blocks(x, rows);
  if (fits_tiled(x, rows, kMaxBackward)) blocks = std::max(blocks, tiled_backward_blocks(x, rows));
  return sizeof(float) * outputs * blocks * x.size(-1);
}

template <bool kLayer>
Status launch_backward(const Backward& p, DType dtype, int64_t vectors, bool tiled, bool aligned,
                       int blocks, cudaStream_t stream) {
  return with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::T;
    if (tiled) {
      return with_backward_tile(vectors, [&](auto tile, int) {
        using Tile = decltype(tile);
        using Team = typename Tile::Team;
        backward_tiled<T, kLayer, Team, Tile::kVecs, PrefetchLoader, 1>
            <<<blocks, Team::kThreads, 0, stream>>>(p);
        return check_launch("norm backward_tiled");
      });
    }
    if (aligned) {
      backward_looped<T, kVecWidth<T>, kLoopedThreads><<<blocks, kLoopedThreads, 0, stream>>>(p);
    } else {
      backward_looped<T, 1, kLoopedThreads><<<blocks, kLoopedThreads, 0, stream>>>(p);
    }
    return check_launch("norm backward_looped");
  });
}

Gradient gradient_of(const Tensor& t, const float* partials) {
  Gradient gradient;
  gradient.partials = partials;
  gradient.out = t.data;
  gradient.stride = t.stride(-1);
  gradient.is_float = t.dtype == DType::kFloat32;
  return gradient;
}

Status launch_add_partials(const Gradients& p, DType dtype, cudaStream_t stream) {
  return with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::T;
    const dim3 grid(static_cast<unsigned>((p.columns + kGradientColumns - 1) / kGradientColumns),
                    p.gradients[1].partials != nullptr ? 2 : 1);
    add_partials<T><<<grid, kGradientThreads, 0, stream>>>(p);
    return check_launch("norm add_partials");
  });
}

// What the two backwards share. `dbias` and the mean are layer_norm's.
template <bool kLayer, class Args>
Status run_backward(const Args& a, Backward p, const Tensor& dbias, bool aligned,
                    const Exec& exec) {
  p.inputs[0] = view_of(a.dy, 1);
  p.inputs[1] = view_of(a.x, 1);
  p.inputs[2] = view_of(a.dsum, 1);
  p.dx = view_of(a.dx, 1);
  p.rstd = view_of(a.rstd, 0);
  p.rows = p.inputs[1].rows.count;
  p.columns = a.x.size(-1);
  if (p.columns == 0) return {};
  const cudaStream_t stream = stream_of(exec);
  const bool tiled = aligned && fits_tiled(a.x, p.rows, kMaxBackward);
  const int blocks =
      tiled ? tiled_backward_blocks(a.x, p.rows) : looped_backward_blocks(a.x, p.rows);
  float* partials = exec.workspace<float>();
  Gradients gradients;
  gradients.columns = p.columns;
  gradients.blocks = blocks;
  if (a.dweight) {
    p.dweight = partials;
    gradients.gradients[0] = gradient_of(a.dweight, partials);
    partials += blocks * p.columns;
  }
  if (dbias) {
    p.dbias = partials;
    gradients.gradients[1] = gradient_of(dbias, partials);
  }
  if (blocks > 0) {
    FK_RETURN_IF_ERROR(
        launch_backward<kLayer>(p, a.x.dtype, vectors_of(a.x), tiled, aligned, blocks, stream));
  }
  if (!a.dweight && !dbias) return {};
  return launch_add_partials(gradients, a.x.dtype, stream);
}

}  // namespace

Status run(const RmsNormFwd& a, const Exec& exec) {
  Forward p = forward_of(a);
  if (p.rows == 0) return {};
  p.weight = parameter_of(a.weight, 1.f, static_cast<float>(a.weight_offset));
  const bool aligned = all_vectorised(a.x, a.residual, a.y, a.sum, a.weight);
  return launch_forward<false>(p, a.x.dtype, vectors_of(a.x),
                               aligned && fits_tiled(a.x, p.rows, kMaxForward), aligned,
                               stream_of(exec));
}

Status run(const LayerNormFwd& a, const Exec& exec) {
  Forward p = forward_of(a);
  if (p.rows == 0) return {};
  p.layer = true;
  p.mean = view_of(a.mean, 0);
  p.weight = parameter_of(a.weight, 1.f, 0.f);
  p.bias = parameter_of(a.bias, 0.f, 0.f);
  const bool aligned = all_vectorised(a.x, a.residual, a.y, a.sum, a.weight, a.bias);
  return launch_forward<true>(p, a.x.dtype, vectors_of(a.x),
                              aligned && fits_tiled(a.x, p.rows, kMaxForward), aligned,
                              stream_of(exec));
}

size_t workspace(const RmsNormBwd& a) { return backward_workspace(a.x, a.dweight ? 1 : 0); }

size_t workspace(const LayerNormBwd& a) {
  return backward_workspace(a.x, (a.dweight ? 1 : 0) + (a.dbias ? 1 : 0));
}

Status run(const RmsNormBwd& a, const Exec& exec) {
  Backward p;
  p.weight = parameter_of(a.weight, 1.f, static_cast<float>(a.weight_offset));
  return run_backward<false>(a, p, Tensor(), all_vectorised(a.dy, a.x, a.dsum, a.weight, a.dx),
                             exec);
}

Status run(const LayerNormBwd& a, const Exec& exec) {
  Backward p;
  p.weight = parameter_of(a.weight, 1.f, 0.f);
  p.mean = view_of(a.mean, 0);
  return run_backward<true>(a, p, a.dbias, all_vectorised(a.dy, a.x, a.dsum, a.weight, a.dx), exec);
}

}  // namespace cuda
}  // namespace fk
