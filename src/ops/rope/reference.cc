// This file computes rope, the rotary position embedding, in double precision, one pair at a time.
#include "core/access.h"
#include "ops/rope/rope.h"

namespace fk {
namespace reference {
namespace {

// Sets out = in with the pairs turned by direction * angle. in and out may be the same memory.
void rotate(const Tensor& in, const Tensor& cos, const Tensor& sin, const Tensor& positions,
            bool interleaved, double direction, const Tensor& out) {
  const int64_t r = cos.size(1), d = in.size(3);
  for (int64_t b = 0; b < in.size(0); ++b) {
    for (int64_t l = 0; l < in.size(1); ++l) {
      int64_t position = l;
      if (positions) {
        const int64_t batch_stride = positions.ndim == 2 ? positions.stride(0) : 0;
        position = load_index(positions, b * batch_stride + l * positions.stride(-1));
      }
      for (int64_t h = 0; h < in.size(2); ++h) {
        const int64_t from = b * in.stride(0) + l * in.stride(1) + h * in.stride(2);
        const int64_t to = b * out.stride(0) + l * out.stride(1) + h * out.stride(2);
        for (int64_t k = 0; k < r; ++k) {
          const int64_t first = interleaved ? 2 * k : k;
          const int64_t second = interleaved ? 2 * k + 1 : k + r;
          const double x0 = load(in, from + first * in.stride(3));
          const double x1 = load(in, from + second * in.stride(3));
          const double c = load(cos, position * cos.stride(0) + k * cos.stride(1));
          const double s = direction * load(sin, position * sin.stride(0) + k * sin.stride(1));
          store(out, to + first * out.stride(3), x0 * c - x1 * s);
          store(out, to + second * out.stride(3), x1 * c + x0 * s);
        }
        for (int64_t i = 2 * r; i < d; ++i) {
          store(out, to + i * out.stride(3), load(in, from + i * in.stride(3)));
        }
      }
    }
  }
}

}  // namespace

Status run(const RopeFwd& a, const Exec&) {
  if (a.y) rotate(a.x, a.cos, a.sin, a.positions, a.interleaved, 1, a.y);
  return {};
}

Status run(const RopeBwd& a, const Exec&) {
  if (a.dx) rotate(a.dy, a.cos, a.sin, a.positions, a.interleaved, -1, a.dx);
  return {};
}

}  // namespace reference
}  // namespace fk
