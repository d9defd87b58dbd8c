// Shared-memory barriers that count bytes, and the bulk copies that they count.
//
// An mbarrier is a 64-bit word in shared memory with a phase bit, a count of arrivals still pending and a count of bytes still
// on their way. The phase flips when both reach zero, and both start again. Who waits, waits for the flip of a given phase
// (its parity, 0 or 1), so a barrier can be reused for ever as long as no waiter falls two phases behind.
//
// A barrier is named by a pointer, or by its address in shared memory where a kernel computes that itself.
#pragma once

#include "ptx.cuh"

namespace nanoqwen {

using Barrier = u64;

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// [mbarrier]
// One thread, before anybody uses the barrier. `arrivals` are the arrive calls that complete a phase.
__device__ __forceinline__ void barrier_init(u32 b, u32 arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(arrivals) : "memory"); }
__device__ __forceinline__ void barrier_init(Barrier* b, u32 arrivals) { barrier_init(shared_address(b), arrivals); }

// Makes the inits visible to the copy engine (the async proxy). After it, a __syncthreads makes them visible to the CTA.
__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// One arrival, which also announces `bytes` that copies will bring. The phase cannot end before they have landed.
__device__ __forceinline__ void barrier_arrive_expect(u32 b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive_expect(Barrier* b, u32 bytes) { barrier_arrive_expect(shared_address(b), bytes); }

// One arrival. Releases this thread's earlier reads and writes of shared memory to whoever waits for the phase.
__device__ __forceinline__ void barrier_arrive(u32 b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory"); }
__device__ __forceinline__ void barrier_arrive(Barrier* b) { barrier_arrive(shared_address(b)); }

// Wait until the phase with this parity has ended. A fresh barrier is in phase 0: waiting for parity 1 returns at once,
// as if a phase before the first had ended, which is how a producer finds all stages empty at the start.
__device__ __forceinline__ void barrier_wait(Barrier* b, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(b)), "r"(parity) : "memory");
}

// Copy `bytes` (a multiple of 16, both addresses 16-byte aligned) from global to shared memory. Returns at once; the copy
// engine takes the bytes off the barrier's count as they land. One thread issues it for all.
__device__ __forceinline__ void bulk_copy(u32 shared, const void* global, u32 bytes, u32 b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(b) : "memory");
}
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, u32 bytes, Barrier* b) { bulk_copy(shared_address(shared), global, bytes, shared_address(b)); }

// The same with a cache policy for L2 (ptx.cuh).
__device__ __forceinline__ void bulk_copy(u32 shared, const void* global, u32 bytes, u32 b, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(shared),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(b), "l"(policy) : "memory");
}
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, u32 bytes, Barrier* b, u64 policy) {
  bulk_copy(shared_address(shared), global, bytes, shared_address(b), policy);
}
// [/mbarrier]

// [refill]
// A place in shared memory that threads have read is filled again by a copy. Two things keep the copy behind the reads, and the kernels of this folder have both.
//   The fence   Loads and copies go through different proxies, and accesses of two proxies are ordered only across a fence: of each reader in front of the
//               __syncwarp or arrival that says "read", or of the thread that issues the copy behind the wait that hears it. Without it, copies were seen to overtake loads
//               (book/receipts/persistent_parts.json: refill).
//   The loads   A load has read when its value is there, and the machine waits for that only where the value is used. So whoever says "read" (an arrival, or the
//               copy itself in the same warp) uses it: `zero_behind` is made from a word of each load, and is added to an address or to what a condition asks.

// A word of each load that filled `value`, put together: a load is as wide as the type is aligned, or wider.
template <class T>
__device__ __forceinline__ u32 loaded_words(const T& value) {
  u32 all = 0;
#pragma unroll
  for (u32 i = 0; i < sizeof(T) / 4; i += alignof(T) / 4) all |= reinterpret_cast<const u32*>(&value)[i];
  return all;
}

// 0 in lane 0, which neither the compiler nor the machine knows before `read` is there. One lane's use is enough: a warp waits for its loads, not a lane for its own.
__device__ __forceinline__ u32 zero_behind(u32 read) {
  u32 r;
  asm volatile("and.b32 %0, %1, %2;" : "=r"(r) : "r"(read), "r"(lane_id()));
  return r;
}

// This thread's ordinary accesses to shared memory, and those that it knows of, come before the copies that it issues behind it.
__device__ __forceinline__ void fence_for_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Of a reader that says "read" to another thread, which has the fence behind its wait. racecheck only knows fences of readers: builds for it have both.
template <bool kReadersFence>
__device__ __forceinline__ void fence_of_reader() {
  if constexpr (kReadersFence) fence_for_copies();
}
// [/refill]

// [ring]
// A position in a ring of kStages buffers and the parity of its barriers: one helper for both sides, so that they cannot
// disagree. `full` is waited for with `parity`, `empty` with `parity ^ 1` (a stage is empty before it was ever full).
template <int kStages>
struct Ring {
  int stage = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};
// [/ring]

}  // namespace nanoqwen
