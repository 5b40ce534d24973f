// The copy engine's tensor instructions (TMA), and the barriers, fences and cluster instructions
// that go with them: one PTX instruction per function. They need sm_90; a kernel that calls them
// has its body under `#if __CUDA_ARCH__ >= 900` (or sm_90a's own macro, see wgmma.cuh). One thread
// calls a copy for its whole block.
//
// Coordinates are in elements, the fastest dimension first, as in TensorMapShape.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cstring>

#include "cuda/async_copy.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

namespace fk::cuda {

// A warp's first lane arrives at a barrier for the whole warp, which is enough after __syncwarp.
// But compute-sanitizer's racecheck follows every lane by itself, so in a build for it all lanes
// arrive.
#ifdef FK_RACECHECK
constexpr bool kEveryLaneArrives = true;
#else
constexpr bool kEveryLaneArrives = false;
#endif
// Initialises a barrier at which `warps` warps arrive in this way.
__device__ __forceinline__ void barrier_init_for_warps(uint64_t* barrier, uint32_t warps) {
  barrier_init(barrier, kEveryLaneArrives ? 32 * warps : warps);
}

// Arrives at a barrier of this block.
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Arrives at the barrier that has the same address in the shared memory of block `rank` of the
// cluster.
__device__ __forceinline__ void barrier_arrive_remote(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n}\n" ::"r"(
          shared_address(barrier)),
      "r"(rank)
      : "memory");
}

// Adds `bytes` to what the barrier's current phase waits for, without arriving.
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Returns whether the phase of the given parity is complete. The hardware may wait a while before
// it says no.
__device__ __forceinline__ bool barrier_try_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// Makes initialised barriers visible to the other blocks of the cluster.
__device__ __forceinline__ void fence_barrier_init_cluster() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Makes what this thread stored in shared memory visible to the copy engine and to the warpgroup's
// multiplications.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Named barriers of the block, number 1 to 15, for `threads` of its threads, a multiple of 32:
// `sync` arrives and waits until all have arrived, `arrive` arrives and goes on.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Returns this block's number in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Arrives at the cluster's barrier; what this thread wrote before is visible to those that wait.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Arrives at the cluster's barrier without making anything visible beyond what a fence already has.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
// Waits until all threads of the cluster have arrived.
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Stores a value in another block's shared memory, in the background, and completes on a barrier
// there by its bytes. `to` and `barrier` are addresses from remote_address.
__device__ __forceinline__ void store_remote(uint32_t to, int value, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
      "r"(value), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void store_remote(uint32_t to, float value, uint32_t barrier) {
  store_remote(to, __float_as_int(value), barrier);
}
__device__ __forceinline__ void store_remote(uint32_t to, float4 value, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "r"(__float_as_uint(value.x)), "r"(__float_as_uint(value.y)), "r"(__float_as_uint(value.z)),
      "r"(__float_as_uint(value.w)), "r"(barrier)
      : "memory");
}
// Returns the address, for store_remote, of what block `rank` of the cluster has at the same place
// in its shared memory as this block has at p.
__device__ __forceinline__ uint32_t remote_address(const void* p, uint32_t rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote)
               : "r"(shared_address(p)), "r"(rank));
  return remote;
}

// Stores an element at the place of block `rank` of the cluster that `at` is in this block. It is
// visible there behind the cluster's barrier.
template <class T>
__device__ __forceinline__ void store_in_block(T* at, uint32_t rank, T value) {
  const uint32_t to = remote_address(at, rank);
  if constexpr (sizeof(T) == 2) {
    uint16_t bits;
    memcpy(&bits, &value, sizeof(bits));
    asm volatile("st.shared::cluster.b16 [%0], %1;" ::"r"(to), "h"(bits) : "memory");
  } else {
    static_assert(sizeof(T) == 4);
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(to), "r"(bits) : "memory");
  }
}

// Fetches a tensor map itself into the cache, ahead of its first use.
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Starts to load the box at coordinates c0, c1, ... into shared memory; completes on `barrier` by
// its bytes. There is one function for each number of dimensions.
__device__ __forceinline__ void tensor_load(void* to, const CUtensorMap* map, uint64_t* barrier,
                                            int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1)
      : "memory");
}
__device__ __forceinline__ void tensor_load(void* to, const CUtensorMap* map, uint64_t* barrier,
                                            int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
__device__ __forceinline__ void tensor_load(void* to, const CUtensorMap* map, uint64_t* barrier,
                                            int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
__device__ __forceinline__ void tensor_load(void* to, const CUtensorMap* map, uint64_t* barrier,
                                            int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Starts to bring the box at these coordinates into the L2 cache.
__device__ __forceinline__ void tensor_prefetch(const CUtensorMap* map, int c0, int c1) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(c0),
               "r"(c1)
               : "memory");
}
__device__ __forceinline__ void tensor_prefetch(const CUtensorMap* map, int c0, int c1, int c2,
                                                int c3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map),
               "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

// Loads one box into all blocks of the cluster whose bits are set in `blocks`: to the same place in
// the shared memory of each, and completing on each block's own barrier.
__device__ __forceinline__ void tensor_load_multicast(void* to, const CUtensorMap* map,
                                                      uint64_t* barrier, uint16_t blocks, int c0,
                                                      int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "h"(blocks), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// Starts to store one box from shared memory, as part of the batch that bulk_commit closes. What
// lies outside of the tensor is not stored.
__device__ __forceinline__ void tensor_store(const CUtensorMap* map, const void* from, int c0,
                                             int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(shared_address(from)), "r"(c0), "r"(c1)
      : "memory");
}
__device__ __forceinline__ void tensor_store(const CUtensorMap* map, const void* from, int c0,
                                             int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          map),
      "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// Starts to add one box from shared memory to what the tensor has there, each element atomically,
// as part of the batch that bulk_commit closes.
__device__ __forceinline__ void tensor_reduce_add(const CUtensorMap* map, const void* from, int c0,
                                                  int c1, int c2, int c3) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4, %5}], "
      "[%1];" ::"l"(map),
      "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// Starts to add `bytes` (a multiple of 16) of contiguous floats in shared memory to those in global
// memory, each atomically, as part of the batch that bulk_commit closes.
__device__ __forceinline__ void bulk_reduce_add(float* to, const void* from, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
      "r"(shared_address(from)), "r"(bytes)
      : "memory");
}

// Closes a batch of the stores and additions that this thread started.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's latest batches still read shared memory: then the
// memory of the others may be overwritten.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until at most kPending of this thread's latest batches are not yet in global memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Stores four 8 x 8 matrices of 2-byte elements in shared memory: lane i gives the address of row i
// % 8 of matrix i / 8, and word wi is this lane's pair of elements of matrix i. All lanes of the
// warp call it.
__device__ __forceinline__ void store_matrices(void* row, uint32_t w0, uint32_t w1, uint32_t w2,
                                               uint32_t w3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
      "r"(w0), "r"(w1), "r"(w2), "r"(w3)
      : "memory");
}

// Stores four matrices as store_matrices does, each transposed: lane i gives the address of column
// i % 8 of matrix i / 8.
__device__ __forceinline__ void store_matrices_transposed(void* column, uint32_t w0, uint32_t w1,
                                                          uint32_t w2, uint32_t w3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(column)),
               "r"(w0), "r"(w1), "r"(w2), "r"(w3)
               : "memory");
}

}  // namespace fk::cuda

#endif
