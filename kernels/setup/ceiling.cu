// ceiling: reads a buffer once, as fast as the card can. What it reaches is the 100% of every MBU in the book.
//
// Computes   sums[thread] = the sum, modulo 2^32, of all words that the thread read. The host adds them up and compares with a sum made
//            by another library: then every word was read, and the compiler could drop no load.
// Moves      16 * count bytes, each once; 4 bytes a thread are written. The buffer must be many times the L2 (50 MB), or the L2 helps.
// Launch     persistent: one CTA of 16 warps on each SM, dynamic shared memory kCeilingShared.
// Loads      as in the decode step's GEMV (stream_gemv.cuh): a ring of kCeilingStages chunks of 4 KiB a warp, bulk copies, evict-first. 192 KiB
//            are in flight on an SM.
// Walk       0: each warp reads one contiguous stretch, as a GEMV does; 1: all warps walk over the buffer together, a chunk each. The host
//            tries both and takes the faster.
// Barriers   full[w][s]: 1 + bytes, lane 0 of warp w arrives (expect_tx), warp w waits. One __syncwarp a chunk: all lanes have read it (mbarrier.cuh: refill).
// Lost       16-byte loads to registers, four in flight a thread, 4 CTAs of 256 threads an SM: a little slower than the lm_head it was
//            to be the limit of.
#include "constants.cuh"
#include "mbarrier.cuh"
#include "ptx.cuh"

namespace nanoqwen {

constexpr int kCeilingWarps = 16, kCeilingStages = 3, kChunk = 256;  // a chunk in units of 16 bytes; nanoqwen/bench/ceiling.py has the same

}  // namespace nanoqwen

using namespace nanoqwen;

// [ceiling]
extern "C" __global__ void __launch_bounds__(kCeilingWarps * kWarp, 1) ceiling(const uint4* buffer, long long count, int together, u32* sums) {
  extern __shared__ __align__(128) uint4 chunks[];  // [warp][stage][kChunk]
  __shared__ Barrier barriers[kCeilingWarps][kCeilingStages];
  const int warp = static_cast<int>(warp_id()), lane = static_cast<int>(lane_id());
  const long long whole = count / kChunk, warps = static_cast<long long>(gridDim.x) * kCeilingWarps, me = blockIdx.x * kCeilingWarps + warp;
  const long long first = together ? me : whole * me / warps, step = together ? warps : 1, end = together ? whole : whole * (me + 1) / warps;
  uint4* mine = chunks + warp * kCeilingStages * kChunk;
  Barrier* full = barriers[warp];
  const u64 policy = evict_first_policy();
  const auto fill = [&](int stage, long long chunk) {
    barrier_arrive_expect(&full[stage], kChunk * 16);
    bulk_copy(mine + stage * kChunk, buffer + chunk * kChunk, kChunk * 16, &full[stage], policy);
  };
  if (lane == 0) {
    for (int s = 0; s < kCeilingStages; ++s) barrier_init(&full[s], 1);
    fence_barrier_init();
    for (int s = 0; s < kCeilingStages; ++s)
      if (first + s * step < end) fill(s, first + s * step);
  }
  __syncwarp();

  u32 sum = 0;
  Ring<kCeilingStages> ring;
  for (long long chunk = first; chunk < end; chunk += step, ring.advance()) {
    barrier_wait(&full[ring.stage], ring.parity);
#pragma unroll
    for (int j = 0; j < kChunk / static_cast<int>(kWarp); ++j) {
      const uint4 v = mine[ring.stage * kChunk + j * kWarp + lane];
      sum += v.x + v.y + v.z + v.w;
    }
    const long long next = chunk + kCeilingStages * step + zero_behind(sum);
    fence_for_copies();
    __syncwarp();
    if (lane == 0 && next < end) fill(ring.stage, next);
  }
  if (blockIdx.x == 0)  // what is left of a last, broken chunk
    for (long long i = whole * kChunk + threadIdx.x; i < count; i += kCeilingWarps * kWarp) sum += buffer[i].x + buffer[i].y + buffer[i].z + buffer[i].w;
  sums[blockIdx.x * kCeilingWarps * kWarp + threadIdx.x] = sum;
}
// [/ceiling]
