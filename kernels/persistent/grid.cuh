// One grid that never ends: relaxed accesses to global memory, waits that give up, stamps.
//
// Everything that the persistent decoder asks of PTX beyond kernels/common stands here, so that the host emulation (emulate/) replaces
// this file, ptx.cuh, mbarrier.cuh and matrix.cuh and compiles the rest as it is.
#pragma once

#include "mbarrier.cuh"
#include "ptx.cuh"

namespace nanoqwen {

// ------------------------------------------------------------------------------- words that other SMs write while this kernel runs
// Relaxed at GPU scope: served by L2, never by this SM's L1, atomic a word, ordered with nothing. A vector is as many words.

__device__ __forceinline__ u32 load_relaxed(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_relaxed2(const u32* p) {
  uint2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint4 load_relaxed4(const u32* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_relaxed(u32* p, u32 v) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
__device__ __forceinline__ void store_relaxed2(u32* p, u32 a, u32 b) { asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(a), "r"(b) : "memory"); }

// A count of arrivals. `add_release` also publishes everything that happened before it in this thread (and, through barriers, its CTA).
__device__ __forceinline__ void add_relaxed(u32* p, u32 n) { asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(n) : "memory"); }
__device__ __forceinline__ void add_release(u32* p, u32 n) { asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(n) : "memory"); }
__device__ __forceinline__ u32 load_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// Between ordinary accesses and those of the copy engine to the same memory, in either direction. (For shared memory alone: `fence_for_copies`, which does not wait
// for what this thread has under way to global memory.)
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }

__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Named barrier 1: the consumer warps of a CTA, all lanes.
template <int kThreads>
__device__ __forceinline__ void consumers_sync() {
  __syncwarp();  // a named barrier counts 32 for each part of a warp that comes by itself: they must come together
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

__device__ __forceinline__ bool any_lane(bool p) { return __any_sync(kFullMask, p); }

// Tests of the exchange: sleep for up to four microseconds, now and then, each warp at other times.
template <bool kOn>
__device__ __forceinline__ void jitter() {
  if constexpr (kOn) {
    u32 h = clock() * 2654435761u ^ (blockIdx.x * 512 + threadIdx.x / 32 * 32) * 40503u;
    h ^= h >> 15;
    if ((h & 7) == 0) __nanosleep(h >> 8 & 4095);
  }
}

__device__ __forceinline__ u32 warp_max_bits(u32 v) {
  u32 r;
  asm("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(v));
  return r;
}

// NaN if either is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// Within one unit in the last place; x is not subnormal.
__device__ __forceinline__ float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// What lies at an address in shared memory: the other way round than shared_address (mbarrier.cuh). The compiler still knows that it is shared memory.
__device__ __forceinline__ void* shared_pointer(u32 address) { return __cvta_shared_to_generic(address); }

// ------------------------------------------------------------------------------------------------------------------ time

__device__ __forceinline__ u64 cycles() {
  u64 c;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(c));
  return c;
}
__device__ __forceinline__ u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// ------------------------------------------------------------------------------------------------------------------- a trap

// Ends the launch with an error.
__device__ __forceinline__ void trap() { asm volatile("trap;"); }

// A warp arrives: lane 0 for all lanes, behind what they have read and written, or each lane by itself (plan.cuh: kWarpArrivals). All lanes.
template <u32 kArrivals>
__device__ __forceinline__ void arrive_of_warp(Barrier* b, int lane) {
  static_assert(kArrivals == 1 || kArrivals == 32, "one lane arrives for all, or each for itself");
  __syncwarp();  // no lane is left in front of its accesses
  if (kArrivals > 1 || lane == 0) barrier_arrive(b);
}

__device__ __forceinline__ bool barrier_try(Barrier* b, u32 parity) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n" : "=r"(done) : "r"(shared_address(b)), "r"(parity) : "memory");
  return done;
}

}  // namespace nanoqwen
