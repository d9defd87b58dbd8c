// A cluster: CTAs on neighbouring SMs that can read and write each other's shared memory and wait for each other.
#pragma once

#include "mbarrier.cuh"
#include "ptx.cuh"

namespace nanoqwen {

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Every thread of every CTA of the cluster. What they wrote before it, to any shared memory of the cluster, is visible after it.
// (Not the .aligned forms: those promise that a warp's lanes come together, and some have just been in a branch.)
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// The same in two halves, and without a fence: who has waited knows that every CTA of the cluster runs, and that its barriers are initialised if that was
// followed by fence_barrier_init. Other writes are not published.
__device__ __forceinline__ void cluster_arrive_started() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait_started() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// *p = value, where p is this CTA's address of a variable and the one meant is CTA `rank`'s. Its CTA must have started: a
// cluster_barrier has been passed.
__device__ __forceinline__ void store_to_cta(u64* p, u32 rank, u64 value) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(rank));
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(there), "l"(value) : "memory");
}

// *p = value in CTA `rank`'s shared memory, where p and b are this CTA's addresses of the same variables. Returns at once; 16 bytes go off the count of
// that CTA's barrier when they have landed, and who waits for its phase sees them. No fence: nothing else is published.
__device__ __forceinline__ void send_to_cta(float4* p, u32 rank, float4 value, Barrier* b) {
  asm volatile(
      "{.reg .b32 there, landed;\n"
      "mapa.shared::cluster.u32 there, %0, %2;\n"
      "mapa.shared::cluster.u32 landed, %1, %2;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [landed];}\n" ::"r"(shared_address(p)), "r"(shared_address(b)), "r"(rank),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w) : "memory");
}

// *p, and two floats from p on, where p is this CTA's address and the memory meant is CTA `rank`'s. As above: it has started, and has not left.
__device__ __forceinline__ float load_from_cta(const float* p, u32 rank) {
  u32 there;
  float v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there) : "memory");
  return v;
}
__device__ __forceinline__ float2 load_pair_from_cta(const float* p, u32 rank) {
  u32 there;
  float2 v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(rank));
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(there) : "memory");
  return v;
}

}  // namespace nanoqwen
