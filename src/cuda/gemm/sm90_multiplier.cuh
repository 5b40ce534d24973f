// The warpgroups of Hopper's matrix product that multiply, and their epilogue.
#pragma once

#include "cuda/gemm/sm90_plan.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

namespace fk::cuda_sm90 {

// A warpgroup that multiplies.
template <class T, class Plan, cuda::Major kA, cuda::Major kB>
struct Multiplier {
  const ProductArguments& a;
  char* const shared;
  ProductBarriers<Plan>* const barriers;
  const int warpgroup;
  const int thread = threadIdx.x % 128;
  const int warp = thread / 32, lane = thread % 32;

  Turn<Plan::kStages> turn;
  uint32_t residual_phases = 0;  // a bit for each place
  int row, column;               // where the tile begins
  int split;

  __device__ __forceinline__ void sync() const { cuda::named_barrier_sync(1 + warpgroup, 128); }
  // The warpgroups take turns with the main loop. They must: a barrier tells only whether its last
  // phase is over, so nobody may wait for a stage of the tile after next.
  __device__ __forceinline__ void wait_for_turn() const {
    cuda::named_barrier_sync(3 + warpgroup, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    cuda::named_barrier_arrive(3 + (warpgroup ^ 1), 256);
  }
  // Each warp says for itself that it has read a stage.
  __device__ __forceinline__ void release(int place) const {
    __syncwarp();
    if (lane == 0 || cuda::kEveryLaneArrives) cuda::barrier_arrive(&barriers->empty[place]);
  }
  __device__ __forceinline__ char* piece(int place, int c) const {
    const int set = warpgroup * Plan::kRoom + place;
    return shared + Plan::kPiecesAt + (set * Plan::kPieces + c) * Plan::kPieceBytes;
  }
  __device__ __forceinline__ float* bias() const {
    return reinterpret_cast<float*>(shared + Plan::kBiasAt) + warpgroup * Plan::kColumns;
  }

  template <cuda::Major kMajor>
  __device__ __forceinline__ static uint64_t descriptor(const char* tile) {
    return kMajor == cuda::Major::kK ? cuda::k_major(tile) : cuda::outer_major(tile, 64 * 128);
  }

  // `slices` of K.
  __device__ __forceinline__ void multiply_tile(float (&sum)[Plan::kBlocks][Plan::kColumns / 2],
                                                int slices) {
    constexpr uint32_t kAStep = kA == cuda::Major::kK ? 32 : 2048;
    constexpr uint32_t kBStep = kB == cuda::Major::kK ? 32 : 2048;
    const int rows_at = Plan::kShared ? warpgroup * Plan::kBlocks * 64 * 128 : 0;
    int last = turn.place;
    if (!Plan::kShared) wait_for_turn();
#pragma unroll 1
    for (int k = 0; k < slices; ++k) {
      cuda::barrier_wait(&barriers->full[turn.place], turn.phase);
      const char* const stage = shared + turn.place * Plan::kStageBytes;
      const uint64_t left = descriptor<kA>(stage + rows_at);
      const uint64_t right = descriptor<kB>(stage + Plan::kABytes);
      cuda::warpgroup_fence();
#pragma unroll
      for (int i = 0; i < Plan::kDepth / 16; ++i) {
#pragma unroll
        for (int r = 0; r < Plan::kBlocks; ++r) {
          cuda::multiply<T, kA, kB>(sum[r], cuda::advance(left, r * 64 * 128 + i * kAStep),
                                    cuda::advance(right, i * kBStep), k > 0 || i > 0);
        }
      }
      cuda::warpgroup_commit();
      cuda::warpgroup_wait<1>();
      if (k > 0) release(last);
      last = turn.place;
      turn.next();
    }
    if (!Plan::kShared) pass_turn();
    cuda::warpgroup_wait<0>();
#pragma unroll
    for (int r = 0; r < Plan::kBlocks; ++r) cuda::keep_registers(sum[r]);
    release(last);
  }

  // Results leave in steps of 64 rows: those of `before`, where it is wanted, and of the output in
  // turn. Step s goes through place s % kRoom.
  __device__ __forceinline__ int steps_each() const {
    return !Plan::kOutputAlone && a.has_before ? 2 : 1;
  }
  __device__ __forceinline__ bool takes_residual(int step) const {
    return a.has_residual && step % steps_each() == steps_each() - 1;
  }
  __device__ __forceinline__ void load_residual(int step) {
    if (!takes_residual(step) || step >= Plan::kBlocks * steps_each()) return;
    const int place = step % Plan::kRoom;
    uint64_t* const barrier = &barriers->residual[warpgroup][place];
    cuda::barrier_arrive_expect(barrier, Plan::kPieces * Plan::kPieceBytes);
#pragma unroll
    for (int c = 0; c < Plan::kPieces; ++c) {
      cuda::tensor_load(piece(place, c), &a.residual, barrier, column + 64 * c,
                        row + 64 * (step / steps_each()));
    }
  }

  // Before the main loop: what it hides. The bias of a tile stays in registers until then, as it
  // lies in memory; a residual's places must have sent what they held.
  static constexpr int kBiases = (Plan::kColumns + 127) / 128;  // of a thread
  __device__ __forceinline__ void begin_tile(uint32_t (&biases)[kBiases]) {
#pragma unroll
    for (int i = 0; i < kBiases; ++i) {
      const int at = column + thread + 128 * i;
      biases[i] = 0;
      if (a.epilogue.bias == nullptr || at >= a.columns) continue;
      const int64_t place = at * a.epilogue.bias_stride;
      biases[i] = a.epilogue.float_bias ? static_cast<const uint32_t*>(a.epilogue.bias)[place]
                                        : static_cast<const uint16_t*>(a.epilogue.bias)[place];
    }
    if (a.has_residual && thread == 0) {
      cuda::bulk_wait_read<0>();
      for (int step = 0; step < Plan::kRoom; ++step) load_residual(step);
    }
  }
  // This is called behind the main loop. All have read the last tile's bias: they met since, in
  // wait_for_turn or, where both warpgroups share a tile, behind what they stored of it.
  __device__ __forceinline__ void begin_epilogue(const uint32_t (&biases)[kBiases]) const {
#pragma unroll
    for (int i = 0; i < kBiases; ++i) {
      if (thread + 128 * i >= Plan::kColumns) continue;
      const auto half = static_cast<unsigned short>(biases[i]);
      T value;
      memcpy(&value, &half, sizeof(value));
      bias()[thread + 128 * i] =
          a.epilogue.float_bias ? __uint_as_float(biases[i]) : cuda::to_float(value);
    }
    if (thread == 0 && !a.has_residual) cuda::bulk_wait_read<0>();
    sync();
  }

  // Waits until the place of a step is free, and holds the residual if it is to have one.
  __device__ __forceinline__ void wait_for_place(int step) {
    const int place = step % Plan::kRoom;
    if (step >= Plan::kRoom && thread == 0) {
      cuda::bulk_wait_read<Plan::kRoom - 1>();
      load_residual(step);
    }
    if (takes_residual(step)) {
      cuda::barrier_wait(&barriers->residual[warpgroup][place], (residual_phases >> place) & 1);
      residual_phases ^= 1u << place;
    } else if (step >= Plan::kRoom) {
      sync();
    }
  }

  // Where this lane's row of the four 8 x 8 matrices of 16 columns lies.
  __device__ __forceinline__ char* matrices(char* piece, int i) const {
    const int r = 16 * warp + lane % 16;
    return piece + r * 128 + (((2 * i + lane / 16) ^ (r % 8)) * 16);
  }
  __device__ __forceinline__ static uint32_t pack(float x, float y) {
    const cuda::Vec<T, 2> pair = cuda::pack<T>({x, y});
    uint32_t word;
    memcpy(&word, &pair, sizeof(word));
    return word;
  }
  __device__ __forceinline__ void put_piece(const float (&x)[32], char* to) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      cuda::store_matrices(matrices(to, i), pack(x[8 * i], x[8 * i + 1]),
                           pack(x[8 * i + 2], x[8 * i + 3]), pack(x[8 * i + 4], x[8 * i + 5]),
                           pack(x[8 * i + 6], x[8 * i + 7]));
    }
  }
  __device__ __forceinline__ void add_piece(float (&x)[32], char* from) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t words[4];
      cuda::load_matrices(words, cuda::shared_address(matrices(from, i)));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        cuda::Vec<T, 2> pair;
        memcpy(&pair, &words[j], sizeof(pair));
        float two[2];
        cuda::unpack(pair, two);
        x[8 * i + 2 * j] += two[0];
        x[8 * i + 2 * j + 1] += two[1];
      }
    }
  }
  // Stores the pieces of a step, all of which were put.
  __device__ __forceinline__ void send(const CUtensorMap* map, int step, int at_row) const {
    cuda::fence_async_shared();
    sync();
    if (thread == 0) {
#pragma unroll
      for (int c = 0; c < Plan::kPieces; ++c) {
        cuda::tensor_store(map, piece(step % Plan::kRoom, c), column + 64 * c, at_row);
      }
      cuda::bulk_commit();
    }
  }
  // The same of two results of 64 columns each, or of one.
  __device__ __forceinline__ void send_halves(const CUtensorMap* first, const CUtensorMap* second,
                                              int step, int at_row) const {
    cuda::fence_async_shared();
    sync();
    if (thread == 0) {
      cuda::tensor_store(first, piece(step % Plan::kRoom, 0), column / 2, at_row);
      if (second != nullptr) {
        cuda::tensor_store(second, piece(step % Plan::kRoom, 1), column / 2, at_row);
      }
      cuda::bulk_commit();
    }
  }

  __device__ __forceinline__ void add_bias(float (&x)[32], int c) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 b = *reinterpret_cast<const float2*>(bias() + 64 * c + 8 * i + 2 * (lane % 4));
      x[4 * i] += b.x;
      x[4 * i + 1] += b.y;
      x[4 * i + 2] += b.x;
      x[4 * i + 3] += b.y;
    }
  }
  template <int kCount>
  __device__ __forceinline__ void activate(float (&x)[kCount]) const {
    cuda::with_activation(a.epilogue.activation, [&](auto kind) {
#pragma unroll
      for (float& value : x) value = cuda::activate<decltype(kind)::value, false>(value);
    });
  }

  // Where K was split, sums leave as they are: four lanes have 32 bytes of a row.
  __device__ __forceinline__ void put_partials(const float (&x)[32], int at_row,
                                               int at_column) const {
    float* const to = a.partials + int64_t{split} * a.rows * a.partial_width;
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const int r = at_row + 16 * warp + lane / 4 + i / 2 % 2 * 8;
      const int c = at_column + i / 4 * 8 + 2 * (lane % 4);
      if (r >= a.rows || c >= a.partial_width) continue;
      *reinterpret_cast<float2*>(to + r * a.partial_width + c) = make_float2(x[i], x[i + 1]);
    }
  }

  // 64 rows of gates and of what these are multiplied with: a thread has both of a pair.
  __device__ __forceinline__ void finish_pairs(float (&gate)[32], float (&up)[32], int r) {
    const int at_row = row + 64 * r;
    int step = r * steps_each();
    if (a.has_before) {
      wait_for_place(step);
      put_piece(gate, piece(step % Plan::kRoom, 0));
      put_piece(up, piece(step % Plan::kRoom, 1));
      send_halves(&a.before, &a.before_up, step, at_row);
      ++step;
    }
    activate(gate);
#pragma unroll
    for (int i = 0; i < 32; ++i) gate[i] *= up[i];
    wait_for_place(step);
    put_piece(gate, piece(step % Plan::kRoom, 0));
    send_halves(&a.out, nullptr, step, at_row);
  }

  // 64 rows of sums: the r-th of the tile.
  __device__ __forceinline__ void finish_rows(float (&sum)[Plan::kColumns / 2], int r) {
    const auto each = [&](const auto& body) {
#pragma unroll
      for (int c = 0; c < Plan::kPieces; ++c) {
        body(c, reinterpret_cast<float(&)[32]>(sum[32 * c]));
      }
    };
    const int at_row = row + 64 * r;
    // Tiles of 192 columns have neither parts of K nor gates.
    if constexpr (!Plan::kOutputAlone && Plan::kPieces == 2) {
      if (a.partials != nullptr) {
        each([&](int c, float(&x)[32]) { put_partials(x, at_row, column + 64 * c); });
        return;
      }
      if (a.gated) {
        finish_pairs(reinterpret_cast<float(&)[32]>(sum[0]),
                     reinterpret_cast<float(&)[32]>(sum[32]), r);
        return;
      }
    }
    each([&](int c, float(&x)[32]) { add_bias(x, c); });
    if (a.plain_out.data != nullptr) {
      each([&](int c, float(&x)[32]) { finish_plain(x, at_row, column + 64 * c); });
      return;
    }
    int step = r * steps_each();
    if (!Plan::kOutputAlone && a.has_before) {
      wait_for_place(step);
      each([&](int c, float(&x)[32]) { put_piece(x, piece(step % Plan::kRoom, c)); });
      send(&a.before, step, at_row);
      ++step;
    }
    activate(sum);
    wait_for_place(step);
    each([&](int c, float(&x)[32]) {
      char* const place = piece(step % Plan::kRoom, c);
      if (a.has_residual) add_piece(x, place);
      put_piece(x, place);
    });
    send(&a.out, step, at_row);
  }

  // A loop, so that its instructions are fetched once: those of all of a tile's elements, one after
  // another, are more than caches of instructions hold next to the main loop. Tiles of 192 columns
  // have no registers left for that.
  __device__ __forceinline__ void finish_tile(float (&sum)[Plan::kBlocks][Plan::kColumns / 2]) {
    if constexpr (Plan::kPieces > 2) {
#pragma unroll
      for (int r = 0; r < Plan::kBlocks; ++r) finish_rows(sum[r], r);
    } else {
#pragma unroll 1
      for (int r = 0; r < Plan::kBlocks; ++r) {
        finish_rows(sum[0], r);
#pragma unroll
        for (int i = 0; i < Plan::kColumns / 2; ++i) sum[0][i] = sum[Plan::kBlocks - 1][i];
      }
    }
  }

  // Through shared memory as well, as floats, for a loop that is rarely run to be short.
  __device__ __forceinline__ void finish_plain(const float (&x)[32], int at_row, int at_column) {
    static_assert(64 * 64 * 4 <= Plan::kRoom * Plan::kPieces * Plan::kPieceBytes);
    // Neighbouring rows are in other banks.
    const auto at = [](int r, int c) { return r * 64 + (c ^ r % 8 * 8); };
    float* const floats = reinterpret_cast<float*>(piece(0, 0));
    sync();
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const int r = 16 * warp + lane / 4 + i / 2 % 2 * 8, c = i / 4 * 8 + 2 * (lane % 4);
      *reinterpret_cast<float2*>(floats + at(r, c)) = make_float2(x[i], x[i + 1]);
    }
    sync();
    const bool is_float = a.plain_out.dtype == DType::kFloat32;
    const bool residual_is_float = a.plain_residual.dtype == DType::kFloat32;
#pragma unroll 1
    for (int i = thread; i < 64 * 64; i += 128) {
      const int64_t r = at_row + i / 64, c = at_column + i % 64;
      if (r >= a.rows || c >= a.columns) continue;
      const auto place = [&](const cuda::PlainMatrix& m) { return r * m.row + c * m.column; };
      float value = floats[at(i / 64, i % 64)];
      if (a.plain_before.data != nullptr) {
        cuda::store_either<T>(a.plain_before.data, false, place(a.plain_before), value);
      }
      cuda::with_activation(a.epilogue.activation, [&](auto kind) {
        value = cuda::activate<decltype(kind)::value, false>(value);
      });
      if (a.plain_residual.data != nullptr) {
        value +=
            cuda::load_either<T>(a.plain_residual.data, residual_is_float, place(a.plain_residual));
      }
      cuda::store_either<T>(a.plain_out.data, is_float, place(a.plain_out), value);
    }
  }

  __device__ __forceinline__ void run() {
    float sum[Plan::kBlocks][Plan::kColumns / 2];
    bool mine = Plan::kShared || warpgroup == 0;
    if (!mine) pass_turn();
    for (int index = blockIdx.x; index < a.items(); index += gridDim.x, mine ^= !Plan::kShared) {
      const ProductItem item(a, index);
      if (!mine) {
        turn.skip(item.count());
        continue;
      }
      row = item.row * Plan::kRows + (Plan::kShared ? warpgroup * Plan::kBlocks * 64 : 0);
      column = item.column * Plan::kColumns;
      split = item.split;
      uint32_t biases[kBiases];
      begin_tile(biases);
      multiply_tile(sum, item.count());
      begin_epilogue(biases);
      finish_tile(sum);
    }
    if (thread == 0) cuda::bulk_wait_read<0>();
  }
};

}  // namespace fk::cuda_sm90

#endif
