// How a block of cuda_forward_chunks.cuh brings tiles from global to shared memory, and y back. u,
// delta, z and y go in units of four elements along the dimension that is contiguous, B and C in
// units of four states, or all element by element. Some threads bring inputs, some take outputs,
// some bring B and C.
#pragma once

#include "ops/selective_scan/cuda_forward_stage.cuh"

namespace fk::cuda {

// kCount floats that lie side by side.
template <int kCount>
__device__ __forceinline__ void load_fours(const float* from, float (&to)[kCount]) {
#pragma unroll
  for (int k = 0; k < kCount; k += 4) {
    const float4 v = *reinterpret_cast<const float4*>(from + k);
    to[k] = v.x;
    to[k + 1] = v.y;
    to[k + 2] = v.z;
    to[k + 3] = v.w;
  }
}

template <int kCount>
__device__ __forceinline__ void store_fours(float* to, const float (&from)[kCount]) {
#pragma unroll
  for (int k = 0; k < kCount; k += 4) {
    *reinterpret_cast<float4*>(to + k) =
        make_float4(from[k], from[k + 1], from[k + 2], from[k + 3]);
  }
}

// Where a block's numbers lie in shared memory.
template <class Tile>
struct ChunkMemory {
  float *states, *times, *inputs, *sums;  // two tiles each
  float *A, *carried;                     // (state, channel): the states between two tiles

  __device__ __forceinline__ explicit ChunkMemory(float* shared) {
    states = shared;
    times = states + 2 * Tile::kStateFloats;
    inputs = times + 2 * Tile::kFloats;
    sums = inputs + 2 * Tile::kFloats;
    A = sums + 2 * Tile::kParts * Tile::kFloats;
    carried = A + Tile::kStates * Tile::kChannels;
  }
};

// How many tiles a block scans, and how many steps the last one has.
struct ChunkSteps {
  int tiles, last_steps;

  template <class Tile>
  __device__ __forceinline__ static ChunkSteps of(const Segment& segment) {
    const int64_t length = segment.last - segment.first;
    const int tiles = static_cast<int>((length + Tile::kT - 1) / Tile::kT);
    return {tiles, static_cast<int>(length - int64_t{tiles - 1} * Tile::kT)};
  }
  template <class Tile>
  __device__ __forceinline__ int in(int tile) const {
    return tile + 1 < tiles ? Tile::kT : last_steps;
  }
};

// What the threads do that bring u and delta, or take y. A thread's units are of four neighbouring
// channels of a step or steps of a channel, 32 steps or kApart channels apart.
template <class T, class Tile, ScanLayout kLayout>
struct UnitStager {
  using Quad = ScanQuad<T>;
  static constexpr int kT = Tile::kT, kUnits = Tile::kUnits;
  static constexpr bool kTime = kLayout == ScanLayout::kSteps;
  static constexpr bool kAny = kLayout == ScanLayout::kAny;
  static constexpr int kApart = Tile::kUnitThreads / (kT / 4);  // channels, along time

  const ScanArgs& a;
  const ChunkMemory<Tile> memory;
  const ChunkSteps steps;
  const int channels;                 // of the block that exist
  int step, channel;                  // of the first unit, within the tile
  const T *delta, *u, *z;             // of the tile that is asked for next
  T* y;                               // of the next one that is put
  float own[4];                       // delta_bias or D of the unit's channels, or of the units
  Quad held_u[kUnits], held[kUnits];  // the other is delta or z

  __device__ __forceinline__ UnitStager(const ScanArgs& args, const Place& place,
                                        const ChunkSteps& count, const ChunkMemory<Tile>& shared)
      : a(args), memory(shared), steps(count), channels(place.channels) {
    const int thread = (static_cast<int>(threadIdx.x) - Tile::kScanThreads) % Tile::kUnitThreads;
    step = kTime ? thread % (kT / 4) * 4 : thread / Tile::kQuads;
    channel = kTime ? thread / (kT / 4) : thread % Tile::kQuads * 4;
    const auto at = [&](const scan::View& view) {
      return place.template at<T>(view, place.segment.first) + step * view.step +
             channel * view.channel;
    };
    delta = at(a.delta);
    u = at(a.u);
    z = at(a.z);
    y = at(a.y);
  }
  // From one unit to the next.
  __device__ __forceinline__ static int64_t apart(const scan::View& view) {
    return kTime ? kApart * view.channel : 32 * view.step;
  }
  __device__ __forceinline__ bool exists(int i, int count) const {
    return kTime ? channel + i * kApart < channels && step < count
                 : channel < channels && step + 32 * i < count;
  }
  __device__ __forceinline__ int shared_at(int i) const {
    return kTime ? Tile::channel_at(channel + i * kApart) + Tile::step_at(step)
                 : Tile::channel_at(channel) + Tile::step_at(step) +
                       32 * i / Tile::kK * Tile::kChunkPitch;
  }
  __device__ __forceinline__ void load(Quad (&to)[kUnits], const T* from, const scan::View& view,
                                       int count) const {
    if (!kAny && count == kT && channels == Tile::kChannels) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) to[i] = Quad::at(from + i * apart(view));
      return;
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const T* p = from + i * apart(view);
      to[i] = Quad::zero();
      if (!exists(i, count)) continue;
      to[i] = kAny ? Quad::at(p, view.channel, channels - channel) : Quad::at(p);
    }
  }
  __device__ __forceinline__ void load_own(const ChannelView& view, const Place& place) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (kTime && k >= kUnits) continue;
      const int c = kTime ? channel + k * kApart : channel + k;
      own[k] = channel_value<T>(view, place, c);
    }
  }
  // Asks for the inputs of a tile; tiles come in order.
  __device__ __forceinline__ void request_inputs(int tile) {
    if (tile < steps.tiles) {
      const int count = steps.in<Tile>(tile);
      load(held, delta, a.delta, count);
      load(held_u, u, a.u, count);
    }
    delta += kT * a.delta.step;
    u += kT * a.u.step;
  }
  __device__ __forceinline__ void request_outputs(int tile) {
    if (a.y.data != nullptr && tile < steps.tiles) {
      const int count = steps.in<Tile>(tile);
      load(held_u, u, a.u, count);
      if (a.z.data != nullptr) load(held, z, a.z, count);
    }
    u += kT * a.u.step;
    z += kT * a.z.step;
  }

  __device__ __forceinline__ void put_inputs(int tile) const {
    if (tile >= steps.tiles) return;
    const int count = steps.in<Tile>(tile), buffer = (tile & 1) * Tile::kFloats;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      float raw_delta[4], raw_u[4], time[4], input[4];
      held[i].to_floats(raw_delta);
      held_u[i].to_floats(raw_u);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 dt = time_step<T>(raw_delta[k], own[kTime ? i : k], a.softplus);
        time[k] = dt.x;
        input[k] = dt.y * raw_u[k];
      }
      if (count < kT) {    // where there is nothing, the state stays as it is
        asm volatile("");  // a branch: this is asked at every tile
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (step + (kTime ? k : 32 * i) >= count) time[k] = input[k] = 0;
        }
      }
      float* times = memory.times + buffer + shared_at(i);
      float* inputs = memory.inputs + buffer + shared_at(i);
      if constexpr (kTime) {
        store_fours(times, time);
        store_fours(inputs, input);
      } else {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          times[k * Tile::kChannelPitch] = time[k];
          inputs[k * Tile::kChannelPitch] = input[k];
        }
      }
    }
  }

  __device__ __forceinline__ void put_unit(T* to, const float (&out)[4]) const {
    if constexpr (kAny) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (channel + k < channels) to[k * a.y.channel] = from_float<T>(out[k]);
      }
    } else {
      store(to, pack<T, 4>(out));
    }
  }
  __device__ __forceinline__ void put_outputs(int tile) {
    if (a.y.data == nullptr) return;
    const int count = steps.in<Tile>(tile);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const float* from = memory.sums + (tile & 1) * Tile::kParts * Tile::kFloats + shared_at(i);
      float out[4], raw_u[4];
#pragma unroll
      for (int p = 0; p < Tile::kParts; ++p) {
        float v[4];
        if constexpr (kTime) {
          load_fours(from + p * Tile::kFloats, v);
        } else {
#pragma unroll
          for (int k = 0; k < 4; ++k) v[k] = from[p * Tile::kFloats + k * Tile::kChannelPitch];
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) out[k] = p == 0 ? v[k] : out[k] + v[k];
      }
      held_u[i].to_floats(raw_u);
#pragma unroll
      for (int k = 0; k < 4; ++k) out[k] = fmaf(own[kTime ? i : k], raw_u[k], out[k]);
      if (a.z.data != nullptr) {
        float raw_z[4];
        held[i].to_floats(raw_z);
#pragma unroll
        for (int k = 0; k < 4; ++k) out[k] = gated<T>(out[k], raw_z[k]);
      }
      if (exists(i, count)) put_unit(y + i * apart(a.y), out);
    }
    y += kT * a.y.step;
  }

  __device__ __forceinline__ void run_inputs(const Place& place) {
    request_inputs(0);
    load_own(a.bias, place);
    put_inputs(0);
    request_inputs(1);
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < steps.tiles; ++i) {
      put_inputs(i + 1);
      request_inputs(i + 2);
      __syncthreads();
    }
  }
  __device__ __forceinline__ void run_outputs(const Place& place) {
    if (!kAny) request_outputs(0);
    load_own(a.D, place);
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < steps.tiles; ++i) {
      __syncthreads();
      if (kAny) request_outputs(i);  // element by element, registers hold no more
      put_outputs(i);
      if (!kAny) request_outputs(i + 1);
    }
  }
};

// What the threads do that bring B and C: a thread takes four states of one of the two, every
// eighth step.
template <class T, class Tile>
struct StateStager {
  using Quad = ScanQuad<T>;
  // A tile comes in batches that registers can hold.
  static constexpr int kBatches = Tile::kStateUnits * sizeof(T) > 32 ? 2 : 1;
  static constexpr int kUnits = Tile::kStateUnits / kBatches;

  const ScanArgs& a;
  const ChunkSteps steps;
  const bool is_C;
  const int first_state, step;
  const int64_t stride;
  const T* from;  // of the tile that is asked for next
  float* to;      // of the first tile
  Quad next[kUnits];

  __device__ __forceinline__ StateStager(const ScanArgs& args, const Place& place,
                                         const ChunkSteps& count, const ChunkMemory<Tile>& memory)
      : a(args),
        steps(count),
        is_C(threadIdx.x & 4),
        first_state(threadIdx.x % 4 * 4),
        step(threadIdx.x % 64 / 8),
        stride(is_C ? args.C.step : args.B.step) {
    const scan::GroupView& view = is_C ? a.C : a.B;
    from = static_cast<const T*>(view.data) + place.segment.batch * view.batch +
           place.group * view.group + (place.segment.first + step) * view.step +
           first_state * view.state;
    to = memory.states + Tile::state_at(first_state + is_C * Tile::kStates) + step;
  }
  __device__ __forceinline__ void request(int batch) {
    const int tile = batch / kBatches;
    if (tile + 1 < steps.tiles && a.state_quads && first_state < a.states) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) next[i] = Quad::at(from + 8 * i * stride);
    } else if (tile < steps.tiles) {
      const int left = steps.in<Tile>(tile) - step - batch % kBatches * 8 * kUnits;
      const int states = a.states - first_state;
      const int64_t apart = is_C ? a.C.state : a.B.state;
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        const T* p = from + 8 * i * stride;
        next[i] = Quad::zero();
        if (8 * i >= left || states <= 0) continue;
        next[i] = a.state_quads ? Quad::at(p) : Quad::at(p, apart, states);
      }
    }
    from += 8 * kUnits * stride;
  }
  __device__ __forceinline__ void put(int batch) const {
    const int tile = batch / kBatches;
    if (tile >= steps.tiles) return;
    float* out =
        to + (tile & 1) * Tile::kStateFloats + Tile::step_at(batch % kBatches * 8 * kUnits);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      float v[4];
      next[i].to_floats(v);
#pragma unroll
      for (int k = 0; k < 4; ++k) out[k * Tile::kRow + Tile::step_at(8 * i)] = v[k];
    }
  }
  __device__ __forceinline__ void run() {
    request(0);
#pragma unroll 1
    for (int i = 0; i <= steps.tiles; ++i) {  // tile i comes while the one before it is scanned
#pragma unroll
      for (int j = 0; j < kBatches; ++j) {
        put(i * kBatches + j);
        request(i * kBatches + j + 1);
      }
      __syncthreads();
    }
  }
};

}  // namespace fk::cuda
