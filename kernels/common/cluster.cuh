// A cluster: CTAs on neighbouring SMs that can write into each other's shared memory and wait for each other.
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

// *p = value, where p is this CTA's address of a variable and the one meant is CTA `rank`'s. Its CTA must have started: a
// cluster_barrier has been passed.
__device__ __forceinline__ void store_to_cta(u64* p, u32 rank, u64 value) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(rank));
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(there), "l"(value) : "memory");
}

}  // namespace nanoqwen
