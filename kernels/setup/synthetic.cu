// synthetic: seeded random weights made on the card, bit for bit those of nanoqwen/synthetic.py.
//
// Computes   fill_words: ValueShuffle words, eight codes each, a code being popcount(14 bits) - 7
//            fill_values: FP16 values centre + size * (popcount(64 bits) - 32) / 4
//            Every element is a function of (key, index) alone: any launch shape gives the same bits.
// Moves      the bytes it writes.
// Launch     a thread an element, grid-stride, 256 threads. No barrier.
#include "constants.cuh"
#include "ptx.cuh"

namespace nanoqwen {

__device__ __forceinline__ u64 splitmix64(u64 x) {
  u64 z = x + 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

}  // namespace nanoqwen

using namespace nanoqwen;

extern "C" __global__ void __launch_bounds__(256) fill_words(u32* out, long long count, u64 key) {
  for (long long i = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x; i < count; i += static_cast<long long>(gridDim.x) * 256) {
    u32 word = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u64 bits = splitmix64(key + 2 * static_cast<u64>(i) + half);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int code = __popcll((bits >> (14 * j)) & 0x3FFF) - 7;
        constexpr int kShifts[8] = {0, 16, 4, 20, 8, 24, 12, 28};  // ValueShuffle
        word |= static_cast<u32>(code & 0xF) << kShifts[4 * half + j];
      }
    }
    out[i] = word;
  }
}

extern "C" __global__ void __launch_bounds__(256) fill_values(u16* out, long long count, u64 key, float size, float centre) {
  for (long long i = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x; i < count; i += static_cast<long long>(gridDim.x) * 256) {
    const float bell = static_cast<float>(__popcll(splitmix64(key + static_cast<u64>(i))) - 32) * 0.25f;
    // Two roundings, as numpy makes them: no fused multiply-add here.
    out[i] = float_to_half(__fadd_rn(centre, __fmul_rn(size, bell)));
  }
}
