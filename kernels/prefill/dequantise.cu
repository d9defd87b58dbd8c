// dequantise: one INT4 projection to FP16, row-major, for the vendor's matrix product.
//
// Computes   w = code * scale, rounded to FP16 (the product of a 4-bit integer and an FP16 number needs at most 14 bits of mantissa, so the
//            rounding costs up to 2^-11 of a weight; the decode kernels do not round here).
// Moves      rows * cols * 2.5 bytes and the scales.
// Launch     a thread takes one ValueShuffle word (eight weights, one 16-byte store); ceil(words / 256) CTAs of 256 threads. No barrier.
#include "constants.cuh"
#include "ptx.cuh"

using namespace nanoqwen;

// codes and scales re-tiled as in gemv_int4.cu; out FP16 [rows][cols], row-major.
extern "C" __global__ void __launch_bounds__(256) dequantise(const u32* codes, const u16* scales, u16* out, int rows, int cols) {
  const long long index = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
  constexpr int kGroupWords = kGroup / 8;
  if (index >= static_cast<long long>(rows) * (cols / 8)) return;
  // In stored order: [tile][group][16 rows][words of a group].
  const int word = static_cast<int>(index % kGroupWords);
  const long long scale_at = index / kGroupWords;  // (tile * groups + group) * 16 + row within the tile
  const int groups = cols / kGroup;
  const int group = static_cast<int>(scale_at / 16 % groups);
  const long long row = scale_at / (16 * groups) * 16 + scale_at % 16;
  const u32 packed = codes[index];
  const float scale = half_to_float(scales[scale_at]);
  u32 pairs[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int even = static_cast<int>(packed << (28 - 4 * j)) >> 28, odd = static_cast<int>(packed << (12 - 4 * j)) >> 28;
    pairs[j] = pack_half2(even * scale, odd * scale);
  }
  reinterpret_cast<uint4*>(out)[row * (cols / 8) + group * kGroupWords + word] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}
