// How a block of the forward brings tiles of (steps, channels) from global to shared memory, and y
// back, whichever of the two is contiguous there. A staging thread takes units of four elements
// along the contiguous dimension; tensors of other layouts, and blocks that cut through a unit, go
// element by element. Inputs become (log2(e) dt, dt u) in float; y comes as sums over some of the
// states each, and goes through D and the gate.
#pragma once

#include "cuda/scan_step.cuh"
#include "ops/selective_scan/cuda/stage.cuh"

namespace fk::cuda {

// Says which elements of u, delta, z and y lie side by side, in fours that can be read at once:
// those of channels, of steps, or none.
enum class ScanLayout { kChannels, kSteps, kAny };

// Calls stage(layout) with the layout as a compile-time constant.
template <class Stage>
__device__ __forceinline__ void with_layout(const ScanArgs& a, const BlockChannels& place,
                                            const Stage& stage) {
  const Segment& segment = place.segment;
  const bool whole =
      a.time_contiguous ? (segment.first | segment.last) % 4 == 0 : place.channels % 4 == 0;
  if (!a.quads || !whole) {
    stage(std::integral_constant<ScanLayout, ScanLayout::kAny>());
  } else if (a.time_contiguous) {
    stage(std::integral_constant<ScanLayout, ScanLayout::kSteps>());
  } else {
    stage(std::integral_constant<ScanLayout, ScanLayout::kChannels>());
  }
}

// Holds four elements as they were loaded, in whole registers.
template <class T>
struct alignas(4 * sizeof(T)) ScanQuad {
  uint32_t words[sizeof(T)];

  __device__ __forceinline__ static ScanQuad zero() {
    ScanQuad q;
#pragma unroll
    for (uint32_t& word : q.words) word = 0;
    return q;
  }
  __device__ __forceinline__ static ScanQuad at(const T* p) {
    return *reinterpret_cast<const ScanQuad*>(p);
  }
  // Loads four elements, of which the first `count` exist.
  __device__ __forceinline__ static ScanQuad at(const T* p, int64_t stride, int count) {
    Vec<T, 4> v = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k < count) v.data[k] = p[k * stride];
    }
    ScanQuad q;
    memcpy(q.words, v.data, sizeof(q));
    return q;
  }
  __device__ __forceinline__ void to_floats(float (&out)[4]) const {
    Vec<T, 4> v;
    memcpy(v.data, words, sizeof(v));
    unpack(v, out);
  }
};

__device__ __forceinline__ void load_four(const float* from, float (&to)[4]) {
  const float4 v = *reinterpret_cast<const float4*>(from);
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

__device__ __forceinline__ void store_four(float* to, const float (&from)[4]) {
  *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
}

// Spreads the units of a tile, of four neighbouring channels or steps, over kThreads staging
// threads.
template <class T, class Tile, ScanLayout kLayout, int kThreads>
struct ForwardUnits {
  static constexpr int kT = Tile::kT;
  static constexpr int kCount = ceil_div(kT * Tile::kChannels / 4, kThreads);
  static constexpr bool kTime = kLayout == ScanLayout::kSteps;
  static constexpr bool kAny = kLayout == ScanLayout::kAny;
  // A thread's unit has kOwn different channels, and its units kOwnUnits.
  static constexpr bool kAlike = !kTime && !Tile::kNarrow && kThreads % (Tile::kChannels / 4) == 0;
  static constexpr int kOwn = kTime ? 1 : 4, kOwnUnits = kAlike ? 1 : kCount;
  using Quad = ScanQuad<T>;

  const ScanArgs& a;
  const BlockChannels& place;
  const int tiles, last_steps;        // of the last tile
  int step[kCount], channel[kCount];  // within the tile; step kT: there is none

  __device__ __forceinline__ ForwardUnits(const ScanArgs& args, const BlockChannels& block,
                                          int tile_count, int thread)
      : a(args),
        place(block),
        tiles(tile_count),
        last_steps(static_cast<int>(block.segment.last - block.segment.first -
                                    int64_t{tile_count - 1} * kT)) {
    const int across = Tile::kNarrow ? a.block_channels / 4 : Tile::kChannels / 4;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int k = thread + i * kThreads;
      step[i] = kTime ? k % (kT / 4) * 4 : k / across;
      channel[i] = kTime ? k / (kT / 4) : k % across * 4;
      if (k >= kT * across || channel[i] >= place.channels) step[i] = kT;
    }
  }
  __device__ __forceinline__ int steps_of(int tile) const {
    return tile + 1 < tiles ? kT : last_steps;
  }
  // Returns where unit i lies in the first tile.
  template <class Element>
  __device__ __forceinline__ Element* at(const StepView& view, int i) const {
    return place.template at<Element>(view, place.segment.first) + step[i] * view.step +
           channel[i] * view.channel;
  }
  // Loads unit i at `from`, with zeros where there is nothing.
  __device__ __forceinline__ Quad load(const T* from, const StepView& view, int i,
                                       int steps) const {
    if (step[i] >= steps) return Quad::zero();
    if constexpr (kAny) {
      return Quad::at(from, view.channel, place.channels - channel[i]);
    } else {
      return Quad::at(from);
    }
  }
  __device__ __forceinline__ void load_own(const ChannelView& view,
                                           float (&values)[kOwnUnits][kOwn]) const {
#pragma unroll
    for (int i = 0; i < kOwnUnits; ++i) {
#pragma unroll
      for (int k = 0; k < kOwn; ++k) values[i][k] = channel_value<T>(view, place, channel[i] + k);
    }
  }
  __device__ __forceinline__ static float own(const float (&values)[kOwnUnits][kOwn], int i,
                                              int k) {
    return values[kAlike ? 0 : i][kTime ? 0 : k];
  }
};

// The threads that bring inputs do this.
template <class T, class Tile, ScanLayout kLayout>
struct InputStager {
  using Units = ForwardUnits<T, Tile, kLayout, Tile::kInputs>;
  using Quad = ScanQuad<T>;
  static constexpr int kT = Tile::kT, kUnits = Units::kCount;
  static constexpr int kGroups = Tile::kStates / 4;  // of B or C at one step
  static constexpr int kStateUnits = ceil_div(2 * kT * kGroups, Tile::kInputs);
  struct TileInFlight {  // of a tile on its way
    Quad delta[kUnits], u[kUnits], states[kStateUnits];
  };

  const ScanArgs& a;
  const int thread;
  const Units units;
  float *states, *inputs;
  int state_step[kStateUnits], first_state[kStateUnits];
  int requested = 0;                   // tiles
  const T *delta[kUnits], *u[kUnits];  // of the next one
  const T* next_states[kStateUnits];
  float bias[Units::kOwnUnits][Units::kOwn];

  __device__ __forceinline__ InputStager(const ScanArgs& args, const BlockChannels& place,
                                         int tiles, float* shared)
      : a(args), thread(threadIdx.x), units(args, place, tiles, threadIdx.x) {
    states = shared;
    inputs = states + 2 * kT * Tile::kStatePitch;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      delta[i] = units.template at<const T>(a.delta, i);
      u[i] = units.template at<const T>(a.u, i);
    }
#pragma unroll
    for (int i = 0; i < kStateUnits; ++i) {
      // Neighbouring threads take neighbouring states, or steps.
      const int k = (thread + i * Tile::kInputs) % (kT * kGroups);
      state_step[i] = a.state_quads ? k / kGroups : k % kT;
      first_state[i] = 4 * (a.state_quads ? k % kGroups : k / kT);
      const scan::GroupView view = is_C(i) ? a.C : a.B;
      next_states[i] = static_cast<const T*>(view.data) + place.segment.batch * view.batch +
                       (place.segment.first + state_step[i]) * view.step +
                       place.group * view.group + (a.first_state + first_state[i]) * view.state;
    }
  }
  __device__ __forceinline__ bool is_C(int i) const {
    return thread + i * Tile::kInputs >= kT * kGroups;
  }
  __device__ __forceinline__ bool some_states(int i) const {
    return thread + i * Tile::kInputs < 2 * kT * kGroups;
  }

  // Asks for the next tile, if there is one.
  __device__ __forceinline__ void request(TileInFlight& held) {
    if (requested >= units.tiles) return;
    const int steps = units.steps_of(requested++);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      held.delta[i] = units.load(delta[i], a.delta, i, steps);
      held.u[i] = units.load(u[i], a.u, i, steps);
      delta[i] += kT * a.delta.step;
      u[i] += kT * a.u.step;
    }
#pragma unroll
    for (int i = 0; i < kStateUnits; ++i) {
      const int left = a.states - a.first_state - first_state[i];
      held.states[i] = Quad::zero();
      if (some_states(i) && state_step[i] < steps) {
        if (a.state_quads) {
          if (left > 0) held.states[i] = Quad::at(next_states[i]);
        } else {
          held.states[i] = Quad::at(next_states[i], is_C(i) ? a.C.state : a.B.state, left);
        }
      }
      next_states[i] += kT * (is_C(i) ? a.C.step : a.B.step);
    }
  }

  __device__ __forceinline__ void put(int tile, const TileInFlight& held) const {
    const int steps = units.steps_of(tile);
    float* out = inputs + (tile & 1) * kT * Tile::kPitch;
    float2 x[kUnits][4];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      float raw_delta[4], raw_u[4];
      held.delta[i].to_floats(raw_delta);
      held.u[i].to_floats(raw_u);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 dt = time_step<T>(raw_delta[k], Units::own(bias, i, k), a.softplus);
        x[i][k] = make_float2(dt.x, dt.y * raw_u[k]);
      }
    }
    if (steps < kT) {  // where there is nothing, the state stays as it is
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (units.step[i] + (Units::kTime ? k : 0) >= steps) x[i][k] = make_float2(0, 0);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (units.step[i] == kT) continue;
      float* to = out + units.step[i] * Tile::kPitch + units.channel[i] * 2;
      if (Units::kTime) {
#pragma unroll
        for (int k = 0; k < 4; ++k) *reinterpret_cast<float2*>(to + k * Tile::kPitch) = x[i][k];
      } else {
        reinterpret_cast<float4*>(to)[0] = make_float4(x[i][0].x, x[i][0].y, x[i][1].x, x[i][1].y);
        reinterpret_cast<float4*>(to)[1] = make_float4(x[i][2].x, x[i][2].y, x[i][3].x, x[i][3].y);
      }
    }
    float* state_out = states + (tile & 1) * kT * Tile::kStatePitch;
#pragma unroll
    for (int i = 0; i < kStateUnits; ++i) {
      if (!some_states(i)) continue;
      float v[4];
      held.states[i].to_floats(v);
      float* to = state_out + state_step[i] * Tile::kStatePitch;  // [B, C][state]
      store_four(to + is_C(i) * Tile::kStates + first_state[i], v);
    }
  }

  // Tile i + 1 comes while tile i is scanned.
  __device__ __forceinline__ void run() {
    TileInFlight held;
    request(held);
    units.load_own(a.bias, bias);
#pragma unroll 1
    for (int i = 0; i <= units.tiles; ++i) {
      if (i < units.tiles) put(i, held);
      request(held);
      __syncthreads();
    }
  }
};

// The threads that take outputs do this.
template <class T, class Tile, ScanLayout kLayout>
struct OutputStager {
  using Units = ForwardUnits<T, Tile, kLayout, Tile::kOutputs>;
  using Quad = ScanQuad<T>;
  static constexpr int kT = Tile::kT, kUnits = Units::kCount, kParts = Tile::kParts;
  struct TileInFlight {
    Quad u[kUnits], z[kUnits];
  };

  const ScanArgs& a;
  const Units units;
  const float* sums;
  int requested = 0;               // tiles
  const T *u[kUnits], *z[kUnits];  // of the next one
  T* y[kUnits];                    // of the next one that is put
  float D[Units::kOwnUnits][Units::kOwn];

  __device__ __forceinline__ OutputStager(const ScanArgs& args, const BlockChannels& place,
                                          int tiles, const float* shared)
      : a(args), units(args, place, tiles, static_cast<int>(threadIdx.x) - Tile::kInputs) {
    sums = shared + 2 * kT * (Tile::kStatePitch + Tile::kPitch);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      u[i] = units.template at<const T>(a.u, i);
      z[i] = units.template at<const T>(a.z, i);
      y[i] = units.template at<T>(a.y, i);
    }
  }

  __device__ __forceinline__ void request(TileInFlight& held) {
    if (requested >= units.tiles) return;
    const int steps = units.steps_of(requested++);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      held.u[i] = units.load(u[i], a.u, i, steps);
      if (a.z.data != nullptr) held.z[i] = units.load(z[i], a.z, i, steps);
      u[i] += kT * a.u.step;
      z[i] += kT * a.z.step;
    }
  }

  // Returns the sums over states of a unit.
  __device__ __forceinline__ void sums_of(int tile, int i, float (&out)[4]) const {
    const int step = units.step[i] < kT ? units.step[i] : 0, channel = units.channel[i];
    const float* from = sums + ((tile & 1) * kT + step) * Tile::kSumPitch +
                        channel / 4 * Tile::kQuadPitch + channel % 4 * kParts;
    float parts[4 * kParts];
    if constexpr (Units::kTime) {
#pragma unroll
      for (int k = 0; k < 4 * kParts; ++k) {
        parts[k] = from[k / kParts * Tile::kSumPitch + k % kParts];
      }
    } else {
#pragma unroll
      for (int k = 0; k < kParts; ++k) {
        const float4 v = reinterpret_cast<const float4*>(from)[k];
        parts[4 * k] = v.x;
        parts[4 * k + 1] = v.y;
        parts[4 * k + 2] = v.z;
        parts[4 * k + 3] = v.w;
      }
    }
#pragma unroll
    for (int distance = kParts / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int k = 0; k < 4 * kParts; ++k) {
        if (k % kParts < distance) parts[k] += parts[k + distance];
      }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) out[k] = parts[kParts * k];
  }
  // Adds the sums over the states of earlier launches, and leaves them for later ones.
  __device__ __forceinline__ void pass_sums(int tile, int i, int steps, float (&out)[4]) const {
    const BlockChannels& place = units.place;
    const int64_t at =
        a.sum_at(place.segment.batch, place.segment.first + int64_t{tile} * kT + units.step[i],
                 place.channel + units.channel[i]);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (units.step[i] >= steps || units.channel[i] + k >= place.channels) continue;
      if (a.sums_before != nullptr) out[k] += a.sums_before[at + k];
      if (a.sums_after != nullptr) a.sums_after[at + k] = out[k];
    }
  }

  __device__ __forceinline__ void put(int tile, const TileInFlight& held) {
    const int steps = units.steps_of(tile);
    float out[kUnits][4];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      sums_of(tile, i, out[i]);
      if (Units::kAny) pass_sums(tile, i, steps, out[i]);
      float skip[4];
      held.u[i].to_floats(skip);
#pragma unroll
      for (int k = 0; k < 4; ++k) out[i][k] = fmaf(Units::own(D, i, k), skip[k], out[i][k]);
    }
    if (a.z.data != nullptr) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        float gate[4];
        held.z[i].to_floats(gate);
#pragma unroll
        for (int k = 0; k < 4; ++k) out[i][k] = gated<T>(out[i][k], gate[k]);
      }
    }
    if (Units::kAny && a.sums_after != nullptr) return;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (units.step[i] < steps) {
        if constexpr (Units::kAny) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            if (units.channel[i] + k < units.place.channels) {
              y[i][k * a.y.channel] = from_float<T>(out[i][k]);
            }
          }
        } else {
          store(y[i], pack<T, 4>(out[i]));
        }
      }
      y[i] += kT * a.y.step;
    }
  }

  // Tile i goes after it was scanned.
  __device__ __forceinline__ void run() {
    if (a.y.data == nullptr && a.sums_after == nullptr) {
      for (int i = 0; i <= units.tiles; ++i) __syncthreads();
      return;
    }
    TileInFlight held;
    request(held);
    units.load_own(a.D, D);
    __syncthreads();  // the first inputs have come
#pragma unroll 1
    for (int i = 0; i < units.tiles; ++i) {
      __syncthreads();
      put(i, held);
      request(held);
    }
  }
};

}  // namespace fk::cuda
