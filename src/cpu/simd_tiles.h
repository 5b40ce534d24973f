// Loads tiles of a tensor (..., steps, channels) as floats, with a step's channels in one vector,
// whatever the tensor's dtype and whichever of the two dims is contiguous; and stores such tiles.
// Kernels that go through time with a channel in each lane load their inputs this way, several
// steps at a time.

// This part is compiled once per instruction set (see cpu/foreach_target.h).
#if defined(FK_CPU_SIMD_TILES_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_CPU_SIMD_TILES_PER_TARGET
#undef FK_CPU_SIMD_TILES_PER_TARGET
#else
#define FK_CPU_SIMD_TILES_PER_TARGET
#endif

#include "cpu/simd.h"
#include "cpu/tile_rows.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace detail {

using F32x4 = hn::CappedTag<float, 4>;

// Transposes a matrix of 4 x 4 numbers.
template <class V>
HWY_INLINE void transpose4(V& r0, V& r1, V& r2, V& r3) {
  const F32x4 d;
  const auto a = hn::InterleaveLower(d, r0, r2), b = hn::InterleaveLower(d, r1, r3);
  const auto e = hn::InterleaveUpper(d, r0, r2), f = hn::InterleaveUpper(d, r1, r3);
  r0 = hn::InterleaveLower(d, a, b);
  r1 = hn::InterleaveUpper(d, a, b);
  r2 = hn::InterleaveLower(d, e, f);
  r3 = hn::InterleaveUpper(d, e, f);
}

// Loads a tile of which time is contiguous, four channels by four steps at a time. `channel` is the
// stride between channels.
template <class T>
void load_columns(const T* p, int64_t channel, int64_t steps, int64_t channels, float* out) {
  const F32x4 d4;
  const int64_t lanes = hn::Lanes(F32());
  for (int64_t c = 0; c < channels; c += 4) {
    const T* rows = p + c * channel;
    const int64_t n = channels - c;
    int64_t t = 0;
    for (; n >= 4 && t + 4 <= steps; t += 4) {
      auto r0 = LoadF32(d4, rows + t), r1 = LoadF32(d4, rows + channel + t);
      auto r2 = LoadF32(d4, rows + 2 * channel + t), r3 = LoadF32(d4, rows + 3 * channel + t);
      transpose4(r0, r1, r2, r3);
      float* to = out + t * lanes + c;
      hn::StoreU(r0, d4, to);
      hn::StoreU(r1, d4, to + lanes);
      hn::StoreU(r2, d4, to + 2 * lanes);
      hn::StoreU(r3, d4, to + 3 * lanes);
    }
    for (; t < steps; ++t) {
      for (int64_t i = 0; i < 4; ++i) {
        out[t * lanes + c + i] = i < n ? ToF32(rows + i * channel + t) : 0.0f;
      }
    }
  }
}

// Stores a tile of which time is contiguous.
template <class T>
void store_columns(const float* in, int64_t steps, int64_t channels, T* p, int64_t channel) {
  const F32x4 d4;
  const int64_t lanes = hn::Lanes(F32());
  for (int64_t c = 0; c < channels; c += 4) {
    T* rows = p + c * channel;
    const int64_t n = channels - c;
    int64_t t = 0;
    for (; n >= 4 && t + 4 <= steps; t += 4) {
      const float* from = in + t * lanes + c;
      auto r0 = hn::LoadU(d4, from), r1 = hn::LoadU(d4, from + lanes);
      auto r2 = hn::LoadU(d4, from + 2 * lanes), r3 = hn::LoadU(d4, from + 3 * lanes);
      transpose4(r0, r1, r2, r3);
      StoreF32(d4, r0, rows + t);
      StoreF32(d4, r1, rows + channel + t);
      StoreF32(d4, r2, rows + 2 * channel + t);
      StoreF32(d4, r3, rows + 3 * channel + t);
    }
    for (; t < steps; ++t) {
      for (int64_t i = 0; i < 4 && i < n; ++i) {
        FromF32(in[t * lanes + c + i], rows + i * channel + t);
      }
    }
  }
}

// Does the work of load_tile for elements of type T at p.
template <class T>
HWY_INLINE void load_tile_of(const T* p, const TileRows& r, int64_t steps, int64_t channels,
                             float* out) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  if (r.channel == 1 && channels == lanes) {
    for (int64_t t = 0; t < steps; ++t) hn::Store(LoadF32(d, p + t * r.step), d, out + t * lanes);
  } else if (r.channel == 1) {
    const size_t n = static_cast<size_t>(channels);
    for (int64_t t = 0; t < steps; ++t) {
      hn::Store(LoadNF32(d, p + t * r.step, n), d, out + t * lanes);
    }
  } else if (r.step == 1) {
    if (channels % 4 != 0 || channels < lanes) {
      for (int64_t t = 0; t < steps; ++t) hn::Store(hn::Zero(d), d, out + t * lanes);
    }
    load_columns(p, r.channel, steps, channels, out);
  } else {
    const size_t n = static_cast<size_t>(channels);
    for (int64_t t = 0; t < steps; ++t) {
      hn::Store(LoadStridedF32(d, p + t * r.step, r.channel, n), d, out + t * lanes);
    }
  }
}

// Does the work of store_tile for elements of type T at p.
template <class T>
HWY_INLINE void store_tile_of(const float* in, int64_t steps, int64_t channels, T* p,
                              const TileRows& r) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  const size_t n = static_cast<size_t>(channels);
  if (r.channel == 1 && channels == lanes) {
    for (int64_t t = 0; t < steps; ++t) StoreF32(d, hn::Load(d, in + t * lanes), p + t * r.step);
  } else if (r.channel == 1) {
    for (int64_t t = 0; t < steps; ++t) {
      StoreNF32(d, hn::Load(d, in + t * lanes), p + t * r.step, n);
    }
  } else if (r.step == 1) {
    store_columns(in, steps, channels, p, r.channel);
  } else {
    for (int64_t t = 0; t < steps; ++t) {
      StoreStridedF32(d, hn::Load(d, in + t * lanes), p + t * r.step, r.channel, n);
    }
  }
}

}  // namespace detail

// Loads `steps` rows of `channels` <= Lanes(F32()) entries to out[step * lanes + channel]; the
// lanes beyond `channels` become 0. `out` is aligned to whole vectors.
HWY_INLINE void load_tile(const TileRows& r, int64_t steps, int64_t channels, float* out) {
  ByDType(r.dtype, [&](auto t) FK_MATRIX_BODY {
    detail::load_tile_of(static_cast<const decltype(t)*>(r.data), r, steps, channels, out);
  });
}

// Rounds a tile, laid out as load_tile does it, to the dtype of `r` and stores it there.
HWY_INLINE void store_tile(const float* in, int64_t steps, int64_t channels, const TileRows& r) {
  ByDType(r.dtype, [&](auto t) FK_MATRIX_BODY {
    detail::store_tile_of(in, steps, channels, static_cast<decltype(t)*>(r.data), r);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_CPU_SIMD_TILES_PER_TARGET
