// How a block of cuda/forward_few.cuh or cuda/forward_short.cuh brings tiles from global to shared
// memory, and y back. u, delta, z and y go in units of four elements along the dimension that is
// contiguous, B and C in units of four states, or all element by element. Some warps bring inputs,
// some take outputs, some bring B and C.
#pragma once

#include "ops/selective_scan/cuda/forward_stage.cuh"

namespace fk::cuda {

// In shared memory each number's steps are side by side. Three tiles of inputs (B's states, C's,
// log2(e) dt, dt u), two of y, whose sums over states come in kParts parts.
template <int kSteps, int kScanWarps>
struct RowTile {
  static constexpr int kS = 2, kLanes = 8, kParts = kLanes, kStates = kS * kLanes;
  static constexpr int kT = kSteps, kBetween = 32, kBuffers = 3, kLead = kBuffers - 1;
  static constexpr int kWarpChannels = 4, kChannels = kWarpChannels * kScanWarps;
  static constexpr int kUnits = kT / 32;  // of a thread and tile
  // So many threads bring inputs, as many take outputs, and so many bring B and C.
  static constexpr int kUnitThreads = 32 * kScanWarps, kStateThreads = 2 * kT;
  template <ScanPass kPass>
  static constexpr int kStage = kStateThreads +
                                (kPass == ScanPass::kOutputs ? 2 * kUnitThreads : kUnitThreads);
  static constexpr int kThreads = 3 * kUnitThreads + kStateThreads;
  // Pitches count floats, and spread rows over the banks.
  static constexpr int kPitch = kT + 4;                   // of a channel
  static constexpr int kStatePitch = kPitch;              // of a state
  static constexpr int kPartPitch = kPitch;               // of a part of a channel's sums
  static constexpr int kSumPitch = kParts * kPitch + 16;  // of those
  static constexpr int kQuadPitch = 4 * kPitch + 28;      // of four channels
  static constexpr int kSumQuadPitch = 4 * kSumPitch + 12;
  static constexpr int kTimes = 2 * kStates * kPitch + 2 * kStates / 4 * 8;
  static constexpr int kValues = kScanWarps * kQuadPitch;  // behind the times
  static constexpr int kInputFloats = kTimes + 2 * kValues;
  static constexpr int kSums = kBuffers * kInputFloats;
  static constexpr int kSumFloats = kScanWarps * kSumQuadPitch;
  static constexpr int kSharedBytes = 4 * (kSums + 2 * kSumFloats);
  static_assert(kT % 32 == 0);

  __device__ __forceinline__ static int step_at(int step) { return step; }
  // B's states come first, then C's.
  __host__ __device__ static constexpr int state_at(int n) { return n * kPitch + n / 4 * 8; }
  __device__ __forceinline__ static int channel_at(int channel) {
    return channel / 4 * kQuadPitch + channel % 4 * kPitch;
  }
  __device__ __forceinline__ static int sum_at(int channel) {
    return channel / 4 * kSumQuadPitch + channel % 4 * kSumPitch;
  }
};

template <class Tile>
__device__ __forceinline__ float* inputs_of(float* shared, int tile) {
  return shared + tile % Tile::kBuffers * Tile::kInputFloats;
}

// Says how many tiles a block scans, and how many steps the last one has.
struct RowSteps {
  int tiles, last_steps;

  template <class Tile>
  __device__ __forceinline__ static RowSteps of(const Segment& segment) {
    const int64_t length = segment.last - segment.first;
    const int tiles = static_cast<int>(ceil_div(length, Tile::kT));
    return {tiles, static_cast<int>(length - int64_t{tiles - 1} * Tile::kT)};
  }
  template <class Tile>
  __device__ __forceinline__ int in(int tile) const {
    return tile + 1 < tiles ? Tile::kT : last_steps;
  }
};

// Runs the threads that bring something. They put down tiles kLead ahead of the one that is
// scanned, and have two more on their way.
template <class Tile, class TileInFlight, class Ask, class Put>
__device__ __forceinline__ void bring_tiles(const RowSteps& steps, TileInFlight (&held)[2],
                                            const Ask& ask, const Put& put) {
  ask(0, held[0]);
  ask(1, held[1]);
#pragma unroll 1
  for (int i = 0; i < steps.tiles + Tile::kLead; i += 2) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (i + j >= steps.tiles + Tile::kLead) break;
      if (i + j < steps.tiles) put(i + j, held[j]);
      ask(i + j + 2, held[j]);
      if (i + j + 1 >= Tile::kLead) __syncthreads();
    }
  }
}

template <class T, int kUnits>
struct HeldUnits {
  ScanQuad<T> u[kUnits], other[kUnits];  // delta or z
};

// The threads that bring u and delta, or take y, do this. A thread's units are of four neighbouring
// channels of a step or steps of a channel, one step or `across` channels apart.
template <class T, class Tile, ScanLayout kLayout>
struct UnitStager {
  using Quad = ScanQuad<T>;
  static constexpr int kT = Tile::kT, kUnits = Tile::kUnits;
  static constexpr bool kTime = kLayout == ScanLayout::kSteps;
  static constexpr bool kAny = kLayout == ScanLayout::kAny;
  using TileInFlight = HeldUnits<T, kUnits>;

  const ScanArgs& a;
  const BlockChannels& place;
  const RowSteps steps;
  float* const shared;
  const int quads, across;
  int step, channel;              // of the first unit, within the tile
  const T *u, *other;             // of the tile that is asked for next
  T* y;                           // of the next one that is put
  float own[kTime ? kUnits : 4];  // delta_bias or D of the units' channels
  TileInFlight held[2];

  __device__ __forceinline__ UnitStager(const ScanArgs& args, const BlockChannels& block,
                                        const RowSteps& count, float* floats, int thread,
                                        bool for_outputs)
      : a(args),
        place(block),
        steps(count),
        shared(floats),
        quads(args.block_channels / 4),
        across(4 * quads / kUnits) {
    step = kTime ? thread % (kT / 4) * 4 : thread / quads * kUnits;
    channel = kTime ? thread / (kT / 4) : thread % quads * 4;
    if (thread >= kT / kUnits * quads) channel = Tile::kChannels;  // nothing to do
    const auto at = [&](const StepView& view) {
      return place.template at<T>(view, place.segment.first) + step * view.step +
             channel * view.channel;
    };
    u = at(a.u);
    other = for_outputs ? at(a.z) : at(a.delta);
    y = at(a.y);
    const ChannelView& view = for_outputs ? a.D : a.bias;
#pragma unroll
    for (int k = 0; k < (kTime ? kUnits : 4); ++k) {
      own[k] = channel_value<T>(view, place, channel + k * (kTime ? across : 1));
    }
  }
  // Returns the distance from one unit to the next.
  __device__ __forceinline__ int64_t apart(const StepView& view) const {
    return kTime ? across * view.channel : view.step;
  }
  __device__ __forceinline__ int channel_of(int i) const {
    return channel + (kTime ? i * across : 0);
  }
  __device__ __forceinline__ int step_of(int i) const { return step + (kTime ? 0 : i); }
  __device__ __forceinline__ bool exists(int i, int count) const {
    return channel_of(i) < place.channels && step_of(i) < count;
  }
  // Loads a tile at `from`, which then is the next one.
  __device__ __forceinline__ void load(Quad (&to)[kUnits], const T*& from, const StepView& view,
                                       int count) const {
    if (!kAny && count == kT && place.channels == 4 * quads) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) to[i] = Quad::at(from + i * apart(view));
    } else {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        const T* p = from + i * apart(view);
        to[i] = Quad::zero();
        if (!exists(i, count)) continue;
        to[i] = kAny ? Quad::at(p, view.channel, place.channels - channel) : Quad::at(p);
      }
    }
    from += kT * view.step;
  }

  // Tiles are asked for in order.
  __device__ __forceinline__ void ask_inputs(int tile, TileInFlight& to) {
    if (tile >= steps.tiles) return;
    load(to.other, other, a.delta, steps.in<Tile>(tile));
    load(to.u, u, a.u, steps.in<Tile>(tile));
  }
  __device__ __forceinline__ void ask_outputs(int tile, TileInFlight& to) {
    if (tile >= steps.tiles) return;
    load(to.u, u, a.u, steps.in<Tile>(tile));
    if (a.z.data != nullptr) load(to.other, other, a.z, steps.in<Tile>(tile));
  }

  __device__ __forceinline__ void put_inputs(int tile, const TileInFlight& from) const {
    const int count = steps.in<Tile>(tile);
    float* out = inputs_of<Tile>(shared, tile) + Tile::kTimes;
    float time[kUnits][4], input[kUnits][4];
    const auto make = [&](auto softplus) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        float raw_delta[4], raw_u[4];
        from.other[i].to_floats(raw_delta);
        from.u[i].to_floats(raw_u);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float2 dt =
              time_step<T>(raw_delta[k], own[kTime ? i : k], decltype(softplus)::value);
          time[i][k] = dt.x;
          input[i][k] = dt.y * raw_u[k];
        }
      }
    };
    if (a.softplus) {
      make(std::true_type());
    } else {
      make(std::false_type());
    }
    if (count < kT) {  // where there is nothing, the state stays as it is
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (step_of(i) + (kTime ? k : 0) >= count) time[i][k] = input[i][k] = 0;
        }
      }
    }
    if constexpr (kTime) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        float* to = out + Tile::channel_at(channel_of(i)) + Tile::step_at(step);
        store_four(to, time[i]);
        store_four(to + Tile::kValues, input[i]);
      }
    } else {
      float* to = out + Tile::channel_at(channel) + Tile::step_at(step);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if constexpr (kUnits == 2) {
          *reinterpret_cast<float2*>(to + k * Tile::kPitch) = make_float2(time[0][k], time[1][k]);
          *reinterpret_cast<float2*>(to + k * Tile::kPitch + Tile::kValues) =
              make_float2(input[0][k], input[1][k]);
        } else {
          to[k * Tile::kPitch] = time[0][k];
          to[k * Tile::kPitch + Tile::kValues] = input[0][k];
        }
      }
    }
  }

  // Adds the sums over the states of earlier launches, and leaves them for later ones.
  __device__ __forceinline__ void pass_sums(int tile, int i, float (&out)[4]) const {
    const int64_t at =
        a.sum_at(place.segment.batch, place.segment.first + int64_t{tile} * kT + step_of(i),
                 place.channel + channel);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (channel + k >= place.channels) continue;
      if (a.sums_before != nullptr) out[k] += a.sums_before[at + k];
      if (a.sums_after != nullptr) a.sums_after[at + k] = out[k];
    }
  }
  __device__ __forceinline__ void put_unit(T* to, const float (&out)[4]) const {
    if constexpr (kAny) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (channel + k < place.channels) to[k * a.y.channel] = from_float<T>(out[k]);
      }
    } else {
      store(to, pack<T, 4>(out));
    }
  }
  __device__ __forceinline__ void put_outputs(int tile, const TileInFlight& from) {
    const int count = steps.in<Tile>(tile);
    const float* sums = shared + Tile::kSums + (tile & 1) * Tile::kSumFloats;
    float out[kUnits][4];
#pragma unroll
    for (int p = 0; p < Tile::kParts; ++p) {
      float v[kUnits][4];
      if constexpr (kTime) {
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
          load_four(sums + Tile::sum_at(channel_of(i)) + Tile::step_at(step) + p * Tile::kPartPitch,
                    v[i]);
        }
      } else {
        const float* sum =
            sums + Tile::sum_at(channel) + Tile::step_at(step) + p * Tile::kPartPitch;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if constexpr (kUnits == 2) {
            const float2 w = *reinterpret_cast<const float2*>(sum + k * Tile::kSumPitch);
            v[0][k] = w.x;
            v[1][k] = w.y;
          } else {
            v[0][k] = sum[k * Tile::kSumPitch];
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
#pragma unroll
        for (int k = 0; k < 4; ++k) out[i][k] = p == 0 ? v[i][k] : out[i][k] + v[i][k];
      }
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (kAny && exists(i, count)) pass_sums(tile, i, out[i]);
      float raw_u[4];
      from.u[i].to_floats(raw_u);
#pragma unroll
      for (int k = 0; k < 4; ++k) out[i][k] = fmaf(own[kTime ? i : k], raw_u[k], out[i][k]);
    }
    if (a.z.data != nullptr) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        float raw_z[4];
        from.other[i].to_floats(raw_z);
#pragma unroll
        for (int k = 0; k < 4; ++k) out[i][k] = gated<T>(out[i][k], raw_z[k]);
      }
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (exists(i, count) && (!kAny || a.sums_after == nullptr))
        put_unit(y + i * apart(a.y), out[i]);
    }
    y += kT * a.y.step;
  }

  __device__ __forceinline__ void run_inputs() {
    if (channel >= 4 * quads) return run_nothing();  // whole warps: the others meet at barriers
    bring_tiles<Tile>(
        steps, held, [&](int tile, TileInFlight& to) { ask_inputs(tile, to); },
        [&](int tile, const TileInFlight& from) { put_inputs(tile, from); });
  }
  __device__ __forceinline__ void run_outputs() {
    if (channel >= 4 * quads || (a.y.data == nullptr && a.sums_after == nullptr)) {
      return run_nothing();
    }
    ask_outputs(0, held[0]);
    ask_outputs(1, held[1]);
    __syncthreads();  // the first inputs have come
#pragma unroll 1
    for (int i = 0; i < steps.tiles; i += 2) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (i + j >= steps.tiles) break;
        __syncthreads();
        put_outputs(i + j, held[j]);
        ask_outputs(i + j + 2, held[j]);
      }
    }
  }
  __device__ __forceinline__ void run_nothing() const {
    for (int i = 0; i <= steps.tiles; ++i) __syncthreads();
  }
};

// The threads that bring B and C do this: a thread takes four states of one of the two, every
// kApart-th step.
template <class T, class Tile>
struct StateStager {
  using Quad = ScanQuad<T>;
  static constexpr int kApart = Tile::kStateThreads / 8, kUnits = Tile::kT / kApart;
  struct TileInFlight {
    Quad states[kUnits];
  };

  const ScanArgs& a;
  const RowSteps steps;
  float* const shared;
  const bool is_C;
  const int first_state, step;
  const int64_t stride;
  const T* from;  // of the tile that is asked for next
  TileInFlight held[2];

  __device__ __forceinline__ StateStager(const ScanArgs& args, const BlockChannels& place,
                                         const RowSteps& count, float* floats, int thread)
      : a(args),
        steps(count),
        shared(floats),
        is_C(thread >= Tile::kStateThreads / 2),
        first_state(thread % 4 * 4),
        step(thread % (Tile::kStateThreads / 2) / 4),
        stride(is_C ? args.C.step : args.B.step) {
    const scan::GroupView& view = is_C ? a.C : a.B;
    from = static_cast<const T*>(view.data) + place.segment.batch * view.batch +
           place.group * view.group + (place.segment.first + step) * view.step +
           (a.first_state + first_state) * view.state;
  }
  __device__ __forceinline__ void ask(int tile, TileInFlight& to) {
    if (tile >= steps.tiles) return;
    const int count = steps.in<Tile>(tile), states = a.states - a.first_state - first_state;
    if (count == Tile::kT && a.state_quads && states > 0) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) to.states[i] = Quad::at(from + i * kApart * stride);
    } else {
      const int64_t apart = is_C ? a.C.state : a.B.state;
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        const T* p = from + i * kApart * stride;
        to.states[i] = Quad::zero();
        if (step + i * kApart >= count || states <= 0) continue;
        to.states[i] = a.state_quads ? Quad::at(p) : Quad::at(p, apart, states);
      }
    }
    from += Tile::kT * stride;
  }
  __device__ __forceinline__ void put(int tile, const TileInFlight& from_memory) const {
    float* to = inputs_of<Tile>(shared, tile) + Tile::state_at(is_C * Tile::kStates + first_state) +
                Tile::step_at(step);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      float v[4];
      from_memory.states[i].to_floats(v);
#pragma unroll
      for (int k = 0; k < 4; ++k) to[k * Tile::kStatePitch + Tile::step_at(i * kApart)] = v[k];
    }
  }
  __device__ __forceinline__ void run() {
    bring_tiles<Tile>(
        steps, held, [&](int tile, TileInFlight& to) { ask(tile, to); },
        [&](int tile, const TileInFlight& from_memory) { put(tile, from_memory); });
  }
};

}  // namespace fk::cuda
