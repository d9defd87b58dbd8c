// ceiling: reads a buffer once, as fast as the card can. What it reaches is the 100% of every MBU in the book.
//
// Computes   sums[thread] = the sum, modulo 2^32, of all words that the thread read. The host adds them up and compares with a sum made
//            by another library: then every word was read, and the compiler could drop no load.
// Moves      16 * count bytes, each once; 4 bytes a thread are written. The buffer must be many times the L2 (50 MB), or the L2 helps.
// Launch     persistent: kCeilingCtas CTAs of 256 threads on each SM, which walk over the buffer together, a tile of 16 KiB a CTA and
//            step. No barrier, no shared memory.
// Loads      16 bytes a lane, four in flight a thread: 64 KiB an SM, more than twice what latency times bandwidth asks for. Evict-first and
//            past L1, as the weights of a decode step are read.
#include "constants.cuh"
#include "ptx.cuh"

namespace nanoqwen {

constexpr int kCeilingThreads = 256, kCeilingCtas = 4, kInFlight = 4;  // nanoqwen/bench/ceiling.py launches 4 CTAs of 256 threads an SM

}  // namespace nanoqwen

using namespace nanoqwen;

// [ceiling]
extern "C" __global__ void __launch_bounds__(kCeilingThreads, kCeilingCtas) ceiling(const uint4* buffer, long long count, u32* sums) {
  constexpr int kTile = kCeilingThreads * kInFlight;
  const u64 policy = evict_first_policy();
  u32 sum = 0;
  const long long whole = count / kTile;
  for (long long tile = blockIdx.x; tile < whole; tile += gridDim.x) {
    const uint4* mine = buffer + tile * kTile + threadIdx.x;
    uint4 v[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) v[j] = load_stream(mine + j * kCeilingThreads, policy);
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) sum += v[j].x + v[j].y + v[j].z + v[j].w;
  }
  if (blockIdx.x == 0)  // what is left of a last, broken tile
    for (long long i = whole * kTile + threadIdx.x; i < count; i += kCeilingThreads) {
      const uint4 v = load_stream(buffer + i, policy);
      sum += v.x + v.y + v.z + v.w;
    }
  sums[blockIdx.x * kCeilingThreads + threadIdx.x] = sum;
}
// [/ceiling]
