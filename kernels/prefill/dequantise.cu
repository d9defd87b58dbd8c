// dequantise: one INT4 projection to FP16, row-major, for the vendor's matrix product.
//
// Computes   w = code * scale, rounded to FP16 (the product of a 4-bit integer and an FP16 number needs at most 14 bits of mantissa, so the
//            rounding costs up to 2^-11 of a weight; the decode kernels do not round here).
// Moves      rows * cols * 2.5 bytes and the scales.
// Launch     a thread takes one ValueShuffle word (eight weights, one 16-byte store); ceil(words / 256) CTAs of 256 threads. No barrier.
#include "constants.cuh"
#include "ptx.cuh"

using namespace nanoqwen;

// bundles: re-tiled codes and scales (gemv_int4.cu); out FP16 [rows][cols], row-major.
extern "C" __global__ void __launch_bounds__(256) dequantise(const u32* bundles, u16* out, int rows, int cols) {
  const long long index = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;  // a word of codes, bundles' scales not counted
  constexpr int kRowWords = kGroup / 8, kCodeWords = 16 * kRowWords, kBundleWords = 4 * (kCodeWords + 8);
  if (index >= static_cast<long long>(rows) * (cols / 8)) return;
  const int groups = cols / kGroup;
  const long long block = index / kCodeWords;  // tile * groups + group
  const int within = static_cast<int>(index % kCodeWords), row = within / kRowWords, word = within % kRowWords, j = block % 4;
  const u32* mine = bundles + block / 4 * kBundleWords;
  const u32 packed = mine[j * kCodeWords + within], pair = mine[4 * kCodeWords + 8 * j + row % 8];
  const float scale = row < 8 ? low_half(pair) : high_half(pair);
  u32 pairs[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int even = static_cast<int>(packed << (28 - 4 * k)) >> 28, odd = static_cast<int>(packed << (12 - 4 * k)) >> 28;
    pairs[k] = pack_half2(even * scale, odd * scale);
  }
  const long long at = (block / groups * 16 + row) * (cols / 8) + block % groups * kRowWords + word;
  reinterpret_cast<uint4*>(out)[at] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}
