// launching: kernels that do nothing of use, to see what it takes to launch one and what programmatic dependent launch changes.
//
// Computes   launch_nothing: nothing at all. launch_stages: two stretches of waiting, one for each half of a decode kernel. The first
//            (`prologue`) needs nothing of the kernel before, as asking for weights does; the second (`work`) does. Four time stamps a CTA say
//            when each began. Later CTAs work longer, up to twice as long as the first, so every kernel ends with idle SMs.
// Launch     launch_nothing: any. launch_stages: one CTA for each SM, one warp; the launch gives it more than half of an SM's shared memory, as
//            the GEMVs of the runtime have, so that an SM holds one CTA and the next kernel's comes when it leaves.
// Barriers   none.
#include "ptx.cuh"

using namespace nanoqwen;

extern "C" __global__ void launch_nothing() {
  allow_next_kernel();
  wait_for_previous_kernel();
}

// Nanoseconds, the same clock on all SMs; it ticks every 32.
__device__ __forceinline__ u64 now() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)::"memory");
  return t;
}

__device__ __forceinline__ void pass(u64 nanoseconds) {
  for (const u64 start = now(); now() - start < nanoseconds;) {}
}

// [stages]
// stamps[CTA][4]: start, ready (the prologue is over), released (the kernel before has finished), end.
extern "C" __global__ void __launch_bounds__(32) launch_stages(u64* stamps, int prologue_ns, int work_ns) {
  const u64 start = now();
  allow_next_kernel();
  pass(prologue_ns);
  const u64 ready = now();
  wait_for_previous_kernel();
  const u64 released = now();
  pass(work_ns + work_ns * blockIdx.x / gridDim.x);
  const u64 end = now();
  if (threadIdx.x == 0) {
    u64* mine = stamps + 4 * blockIdx.x;
    mine[0] = start, mine[1] = ready, mine[2] = released, mine[3] = end;
  }
}
// [/stages]
