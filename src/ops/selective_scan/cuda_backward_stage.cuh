// The backward scan's tiles, what a block shares, and the half of its threads that stage: they
// bring a chunk's inputs into shared memory and take the sums over states out of it.
// cuda_backward.cuh has the other half.
#pragma once

#include "ops/selective_scan/cuda_forward.cuh"

namespace fk::cuda {

template <int kChannelsOfThread, int kStatesOfThread, int kLanesOfChannel, int kStateGroups,
          int kScanThreads, int kStageThreads, int kSteps, int kPieceSteps>
struct ReverseTile {
  static constexpr int kC = kChannelsOfThread, kS = kStatesOfThread, kLanes = kLanesOfChannel;
  static constexpr int kGroups = kStateGroups;
  static constexpr int kT = kSteps, kU = kPieceSteps;
  static constexpr int kScan = kScanThreads, kStage = kStageThreads, kThreads = kScan + kStage;
  static constexpr int kChannels = kC * kScan / kLanes / kGroups;
  static constexpr int kStates = kS * kLanes * kGroups;
  static constexpr int kE = kC * kS;
  static constexpr int kPieces = kT / kU;
  static constexpr int kPitch = kChannels + 1;
  static constexpr int kStatePitch = 2 * kStates + 4;
  static constexpr int kWarps = kScan / 32;
  static constexpr int kWarpStates = kS * kLanes;  // that a warp holds
  static constexpr int kWarpsOfGroup = kWarps / kGroups;
  static constexpr int kRows = 32 / kLanes;  // channel slots of a warp
  static constexpr int kRowPitch = 2 * kWarpStates + (kLanes * kS == 16 ? 16 : 0);
  // Shared memory, in floats; all multiples of 4.
  static constexpr int kStartFloats = (kPieces + 1) * kScan * kE;
  static constexpr int kStateFloats = 2 * kT * kStatePitch;
  static constexpr int kRowFloats = kWarps * kU * kRows * kRowPitch;
  static constexpr int kSumFloats = 2 * kWarps * kT * 2 * kWarpStates;
  static constexpr int kInputFloats = 2 * kT * kPitch * 2;
  static constexpr int kGradientFloats = 2 * kT * kPitch;
  // Sums over states: in place of the inputs, or one set per group of states.
  static constexpr int kSetFloats = kGroups == 1 ? 0 : 2 * kGroups * 3 * kT * kPitch;
  static constexpr int kSharedBytes = 4 * (kStartFloats + kStateFloats + kRowFloats + kSumFloats +
                                           kInputFloats + kGradientFloats + kSetFloats);
  static_assert(kLanes >= kC && kT % kU == 0 && kE % 4 == 0 && 2 * kWarpStates % 32 == 0);
};

template <class Tile>
struct ReverseShared {
  float* starts;     // [piece][kE / 4][thread][4]; piece 0 twice, at the end, one per buffer
  float* states;     // [buffer][step][group of kS states][B, C][kS]
  float* rows;       // [warp][step of a piece][row][B, C]: parts of dB and dC of one channel slot
  float* sums;       // [buffer][warp][step][B, C]: parts of a warp
  float2* inputs;    // [buffer][step][channel]: dt, dt u; then sums over states of g B and a g h A
  float* gradients;  // [buffer][step][channel]: dy silu(z); then the sum over states of C h
  float* sets;  // [buffer][group of states][3][step][channel]: the sums, where there are groups

  __device__ __forceinline__ explicit ReverseShared(char* shared) {
    starts = reinterpret_cast<float*>(shared);
    states = starts + Tile::kStartFloats;
    rows = states + Tile::kStateFloats;
    sums = rows + Tile::kRowFloats;
    inputs = reinterpret_cast<float2*>(sums + Tile::kSumFloats);
    gradients = reinterpret_cast<float*>(inputs) + Tile::kInputFloats;
    sets = gradients + Tile::kGradientFloats;
  }
  // Of thread `thread` before piece `piece`.
  __device__ __forceinline__ float* start(int piece, int buffer, int thread) const {
    return starts + (piece == 0 ? Tile::kPieces - 1 + buffer : piece - 1) * Tile::kScan * Tile::kE +
           thread * 4;
  }
};

// What the staging threads do.
template <class T, class Tile, bool kTime>
struct ReverseStager {
  static constexpr int kT = Tile::kT, kChannels = Tile::kChannels, kPitch = Tile::kPitch;
  using TileUnits = Units<T, kT, kChannels, Tile::kStage, kTime>;
  static constexpr int kWidth = TileUnits::kWidth, kCount = TileUnits::kCount;
  static constexpr int kOwn = TileUnits::kOwnChannels;
  static constexpr bool kAllAtOnce = sizeof(T) == 2;  // loads: floats would take too many registers
  static constexpr int kPart =
      kAllAtOnce || kCount == 1 ? kCount : kCount / 2;  // units, for outputs
  static_assert(kPart % TileUnits::kAcross == 0);
  using States = StagedStates<T, kT, Tile::kS, Tile::kStates, Tile::kStatePitch, Tile::kStage>;
  static constexpr int kStarts = Tile::kScan * Tile::kE / Tile::kStage;  // of a thread
  static_assert(Tile::kStage % kChannels == 0);

  const ReverseArgs& r;
  const Place& place;
  const ReverseShared<Tile>& shared;
  const TileUnits t;
  int thread, chunks;
  bool vectors;
  float bias[kOwn], D[kOwn], sum_D[kOwn], sum_bias[kOwn];
  float any_sum_D, any_sum_bias;  // of channel `thread` of the block: from elements one by one

  // What comes from global memory, on its way.
  template <int kUnits>
  struct Inputs {
    Raw<T, kUnits * kWidth> delta, u, dy, z;
  };
  struct Chunk {
    Inputs<kPart> in;  // the first part
    States bc;
    float start[kStarts];
  };

  __device__ __forceinline__ int64_t step_of(int i) const {
    return place.segment.first + int64_t{chunks - 1 - i} * kT;
  }
  __device__ __forceinline__ bool whole(int64_t step) const {
    return vectors && place.whole<kT, kChannels>(step);
  }
  template <int kFrom, int kUnits>
  __device__ __forceinline__ void load(int64_t step, Inputs<kUnits>& in) const {
    if (!whole(step)) return;
    const ScanArgs& a = r.scan;
    t.template load<kFrom, kUnits>(a.delta, place.at<const T>(a.delta, step), in.delta);
    t.template load<kFrom, kUnits>(a.u, place.at<const T>(a.u, step), in.u);
    t.template load<kFrom, kUnits>(a.dy, place.at<const T>(a.dy, step), in.dy);
    if (a.z.data != nullptr) {
      t.template load<kFrom, kUnits>(a.z, place.at<const T>(a.z, step), in.z);
    }
  }

  // The states before the chunk: threads run along channels, then states.
  __device__ __forceinline__ void load_start(int64_t step, float (&start)[kStarts]) const {
    const ScanArgs& a = r.scan;
    const int64_t row =
        a.kept.base(a.segments, place.segment) + (step - place.segment.begin) / a.kept.spacing;
#pragma unroll
    for (int i = 0; i < kStarts; ++i) {
      const int at = thread + i * Tile::kStage;
      const int c = at % Tile::kChannels, state = a.first_state + at / Tile::kChannels;
      start[i] = 0;
      if (c >= place.channels || state >= a.states) continue;
      if (step > place.segment.begin) {
        start[i] = a.kept.data[(row * a.states + state) * a.channels + place.channel + c];
      } else if (a.initial_state.data != nullptr) {
        const StateView& s = a.initial_state;
        start[i] = load_either<T>(s.data, s.is_float,
                                  place.segment.sequence * s.sequence +
                                      (place.channel + c) * s.channel + state * s.state);
      }
    }
  }
  // To where the scanning threads look for them.
  __device__ __forceinline__ void put_start(const float (&start)[kStarts], int buffer) const {
#pragma unroll
    for (int i = 0; i < kStarts; ++i) {
      const int at = thread + i * Tile::kStage, c = at % Tile::kChannels, n = at / Tile::kChannels;
      const int group = n / Tile::kWarpStates, lane = n % Tile::kWarpStates / Tile::kS;
      const int e = ((c % Tile::kC) ^ (lane % Tile::kC)) * Tile::kS + n % Tile::kS;
      const int scanner =
          group * (Tile::kScan / Tile::kGroups) + c / Tile::kC * Tile::kLanes + lane;
      shared.start(0, buffer, scanner)[e / 4 * 4 * Tile::kScan + e % 4] = start[i];
    }
  }

  __device__ __forceinline__ void load_chunk(int64_t step, Chunk& chunk) const {
    load<0, kPart>(step, chunk.in);
    chunk.bc.load(r.scan, place, step, place.steps<kT>(step), thread);
    load_start(step, chunk.start);
  }

  // One element to the place of its sums.
  __device__ __forceinline__ void put_input(int at, int buffer, float delta, float bias_value,
                                            float u, float dy, float z) const {
    const ScanArgs& a = r.scan;
    float dt = delta + bias_value;
    if (a.softplus) dt = softplus<T>(dt);
    shared.inputs[buffer * kT * kPitch + at] = make_float2(dt, dt * u);
    shared.gradients[buffer * kT * kPitch + at] = a.z.data == nullptr ? dy : dy * z * sigmoid(z);
  }
  __device__ __forceinline__ void put_chunk(int64_t step, int buffer, const Chunk& chunk) const {
    const ScanArgs& a = r.scan;
    put_start(chunk.start, buffer);
    chunk.bc.put(a, thread, shared.states + buffer * kT * Tile::kStatePitch);
    if (!whole(step)) {
      put_any_inputs(step, buffer);
      return;
    }
    put_inputs<0>(buffer, chunk.in);
    if constexpr (kPart < kCount) {
      Inputs<kPart> rest;
      load<kPart, kPart>(step, rest);
      put_inputs<kPart>(buffer, rest);
    }
  }
  template <int kFrom>
  __device__ __forceinline__ void put_inputs(int buffer, const Inputs<kPart>& in) const {
#pragma unroll
    for (int e = 0; e < kPart * kWidth; ++e) {
      const int i = kFrom + e / kWidth, k = e % kWidth;
      put_input(t.step(i, k) * kPitch + t.channel(i, k), buffer, in.delta[e], bias[t.own(i, k)],
                in.u[e], in.dy[e], in.z[e]);
    }
  }
  __device__ __forceinline__ void put_any_inputs(int64_t step, int buffer) const {
    const ScanArgs& a = r.scan;
    const int steps = place.steps<kT>(step);
#pragma unroll 1
    for (int i = thread; i < kT * kChannels; i += Tile::kStage) {
      const int l = i / kChannels, c = i % kChannels, at = l * kPitch + c;
      if (l < steps && c < place.channels) {
        put_input(at, buffer, value_at(a.delta, place.at<const T>(a.delta, step), l, c),
                  channel_value<T>(a.bias, place, c),
                  value_at(a.u, place.at<const T>(a.u, step), l, c),
                  value_at(a.dy, place.at<const T>(a.dy, step), l, c),
                  a.z.data == nullptr ? 0.f : value_at(a.z, place.at<const T>(a.z, step), l, c));
      } else {
        shared.inputs[buffer * kT * kPitch + at] = make_float2(0, 0);
        shared.gradients[buffer * kT * kPitch + at] = 0;
      }
    }
  }

  // Adds up the warps' parts of dB and dC.
  __device__ __forceinline__ void put_state_sums(int64_t step, int buffer, int steps) const {
    const ScanArgs& a = r.scan;
    constexpr int kValues = 2 * Tile::kStates, kWarpValues = 2 * Tile::kWarpStates;
    const float* sums = shared.sums + buffer * Tile::kWarps * Tile::kT * kWarpValues;
    float* out = r.partial_states +
                 (((place.block * a.batch + place.segment.batch) * a.length + step) * a.groups +
                  place.group) *
                     2 * a.states;
#pragma unroll 4
    for (int i = thread; i < Tile::kT * kValues; i += Tile::kStage) {
      const int l = i / kValues, kind = i % kValues / Tile::kStates, n = i % Tile::kStates;
      const int group = n / Tile::kWarpStates;
      if (l >= steps || a.first_state + n >= a.states) continue;
      float x = 0;
#pragma unroll
      for (int w = 0; w < Tile::kWarpsOfGroup; ++w) {
        x += sums[((group * Tile::kWarpsOfGroup + w) * Tile::kT + l) * kWarpValues +
                  kind * Tile::kWarpStates + n % Tile::kWarpStates];
      }
      out[int64_t{l} * a.groups * 2 * a.states + kind * a.states + a.first_state + n] = x;
    }
  }

  struct StateSums {
    float gB, aghA, Ch;
  };
  __device__ __forceinline__ StateSums state_sums(int l, int c, int buffer) const {
    const int at = l * Tile::kPitch + c;
    if constexpr (Tile::kGroups == 1) {
      const float2 v = shared.inputs[buffer * Tile::kT * Tile::kPitch + at];
      return {v.x, v.y, shared.gradients[buffer * Tile::kT * Tile::kPitch + at]};
    } else {
      StateSums s = {0, 0, 0};
#pragma unroll
      for (int g = 0; g < Tile::kGroups; ++g) {
        const float* set = shared.sets + (buffer * Tile::kGroups + g) * 3 * Tile::kT * Tile::kPitch;
        s.gB += set[at];
        s.aghA += set[Tile::kT * Tile::kPitch + at];
        s.Ch += set[2 * Tile::kT * Tile::kPitch + at];
      }
      return s;
    }
  }

  struct Gradients {
    float du, ddelta, dz;
  };
  __device__ __forceinline__ Gradients gradients(const StateSums& s, float delta, float bias_value,
                                                 float D_value, float u, float dy, float z,
                                                 float& of_D, float& of_bias) const {
    const ScanArgs& a = r.scan;
    Gradients out;
    float dt = delta + bias_value, slope = 1;
    if (a.softplus) {
      slope = sigmoid(dt);
      dt = softplus<T>(dt);
    }
    out.dz = 0;
    if (a.z.data != nullptr) {
      const float gate = sigmoid(z);
      out.dz = dy * fmaf(D_value, u, s.Ch) * gate * fmaf(z, 1.f - gate, 1.f);
      dy *= z * gate;
    }
    out.du = fmaf(dt, s.gB, D_value * dy);
    out.ddelta = fmaf(u, s.gB, kLn2 * s.aghA) * slope;
    of_D = fmaf(dy, u, of_D);
    of_bias += out.ddelta;
    return out;
  }

  // `in` is the first part of the inputs.
  __device__ __forceinline__ void put_outputs(int64_t step, int buffer, const Inputs<kPart>& in) {
    const ScanArgs& a = r.scan;
    put_state_sums(step, buffer, place.steps<kT>(step));
    if (!whole(step) || a.sums_before != nullptr || a.sums_after != nullptr) {
      put_any_outputs(step, buffer);
      return;
    }
    put_part<0>(step, buffer, in);
    if constexpr (kPart < kCount) {
      Inputs<kPart> rest;
      load<kPart, kPart>(step, rest);
      put_part<kPart>(step, buffer, rest);
    }
  }
  template <int kFrom>
  __device__ __forceinline__ void put_part(int64_t step, int buffer, const Inputs<kPart>& in) {
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      float du[kWidth], ddelta[kWidth], dz[kWidth];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const int e = i * kWidth + k, own = t.own(i, k);
        const Gradients v = gradients(
            state_sums(t.step(kFrom + i, k), t.channel(kFrom + i, k), buffer), in.delta[e],
            bias[own], D[own], in.u[e], in.dy[e], in.z[e], sum_D[own], sum_bias[own]);
        du[k] = v.du;
        ddelta[k] = v.ddelta;
        dz[k] = v.dz;
      }
      if (r.du.data != nullptr) t.save(r.du, place.at<T>(r.du, step), kFrom + i, du);
      if (r.ddelta.data != nullptr)
        t.save(r.ddelta, place.at<T>(r.ddelta, step), kFrom + i, ddelta);
      if (r.dz.data != nullptr) t.save(r.dz, place.at<T>(r.dz, step), kFrom + i, dz);
    }
  }
  __device__ __forceinline__ void put_any_outputs(int64_t step, int buffer) {
    const ScanArgs& a = r.scan;
    const int steps = place.steps<kT>(step);
    const auto put = [&](const scan::View& view, int l, int c, float value) {
      if (view.data == nullptr) return;
      place.at<T>(view, step)[l * view.step + c * view.channel] = from_float<T>(value);
    };
#pragma unroll 1
    for (int i = thread; i < kT * kChannels; i += Tile::kStage) {
      const int l = i / kChannels, c = i % kChannels;
      if (l >= steps || c >= place.channels) continue;
      StateSums s = state_sums(l, c, buffer);
      const int64_t at = a.sum_at(place.segment.batch, step + l, place.channel + c);
      if (a.sums_before != nullptr) {
        s.gB += a.sums_before[at];
        s.aghA += a.sums_before[r.sums_stride + at];
        s.Ch += a.sums_before[2 * r.sums_stride + at];
      }
      if (a.sums_after != nullptr) {
        a.sums_after[at] = s.gB;
        a.sums_after[r.sums_stride + at] = s.aghA;
        a.sums_after[2 * r.sums_stride + at] = s.Ch;
        continue;
      }
      const Gradients v =
          gradients(s, value_at(a.delta, place.at<const T>(a.delta, step), l, c),
                    channel_value<T>(a.bias, place, c), channel_value<T>(a.D, place, c),
                    value_at(a.u, place.at<const T>(a.u, step), l, c),
                    value_at(a.dy, place.at<const T>(a.dy, step), l, c),
                    a.z.data == nullptr ? 0.f : value_at(a.z, place.at<const T>(a.z, step), l, c),
                    any_sum_D, any_sum_bias);
      put(r.du, l, c, v.du);
      put(r.ddelta, l, c, v.ddelta);
      put(r.dz, l, c, v.dz);
    }
  }

  // Sums over the threads that share a channel, in a fixed order; `scratch` is nobody else's any
  // more.
  __device__ __forceinline__ void put_channel_sums(float* scratch) {
    const ScanArgs& a = r.scan;
    constexpr int kChannels = Tile::kChannels;
    if constexpr (kTime) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
#pragma unroll
        for (int mask = 1; mask < 4; mask *= 2) {
          sum_D[i] += __shfl_xor_sync(0xffffffffu, sum_D[i], mask);
          sum_bias[i] += __shfl_xor_sync(0xffffffffu, sum_bias[i], mask);
        }
      }
    }
    // Threads that meet the same channels stand a whole number of rows apart.
    constexpr int kRowThreads = !kTime                         ? kChannels / 2
                                : 4 * kChannels < Tile::kStage ? 4 * kChannels
                                                               : Tile::kStage;
    constexpr int kRows = Tile::kStage / kRowThreads, kAnyRows = Tile::kStage / kChannels;
    float* row = scratch + thread / kRowThreads * 2 * kChannels;
    if (!kTime || thread % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        row[t.own_channel(i)] = sum_D[i];
        row[kChannels + t.own_channel(i)] = sum_bias[i];
      }
    }
    row = scratch + (kRows + thread / kChannels) * 2 * kChannels;
    row[thread % kChannels] = any_sum_D;
    row[kChannels + thread % kChannels] = any_sum_bias;
    barrier();
    for (int i = thread; i < 2 * kChannels; i += Tile::kStage) {
      float x = 0;
#pragma unroll
      for (int k = 0; k < kRows + kAnyRows; ++k) x += scratch[k * 2 * kChannels + i];
      if (i % kChannels < place.channels) {
        r.partial_channels[(place.slot * 2 + i / kChannels) * a.channels + place.channel +
                           i % kChannels] = x;
      }
    }
  }

  // Of the staging threads alone.
  __device__ __forceinline__ static void barrier() {
    asm volatile("bar.sync 1, %0;" ::"n"(Tile::kStage) : "memory");
  }

  __device__ __forceinline__ void run() {
    any_sum_D = any_sum_bias = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      bias[i] = channel_value<T>(r.scan.bias, place, t.own_channel(i));
      D[i] = channel_value<T>(r.scan.D, place, t.own_channel(i));
      sum_D[i] = sum_bias[i] = 0;
    }
    if (chunks > 0) {
      Chunk chunk;
      load_chunk(step_of(0), chunk);
      put_chunk(step_of(0), 0, chunk);
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < chunks; ++i) {
      // Sums are taken out of a place before the next inputs are put there.
      if constexpr (kAllAtOnce) {
        Chunk next;
        Inputs<kPart> before;
        if (i > 0) load<0, kPart>(step_of(i - 1), before);
        if (i + 1 < chunks) load_chunk(step_of(i + 1), next);
        if (i > 0) put_outputs(step_of(i - 1), (i - 1) & 1, before);
        barrier();
        if (i + 1 < chunks) put_chunk(step_of(i + 1), (i + 1) & 1, next);
      } else {
        if (i > 0) {
          Inputs<kPart> before;
          load<0, kPart>(step_of(i - 1), before);
          put_outputs(step_of(i - 1), (i - 1) & 1, before);
        }
        barrier();
        if (i + 1 < chunks) {
          Chunk next;
          load_chunk(step_of(i + 1), next);
          put_chunk(step_of(i + 1), (i + 1) & 1, next);
        }
      }
      __syncthreads();
    }
    if (chunks > 0) {
      Inputs<kPart> before;
      load<0, kPart>(step_of(chunks - 1), before);
      put_outputs(step_of(chunks - 1), (chunks - 1) & 1, before);
    }
    put_channel_sums(shared.starts);
  }
};

}  // namespace fk::cuda
