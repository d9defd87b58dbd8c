// The order in which a prefill activation lies in memory: as the tensor cores read it, so that a plain bulk copy brings any tile.
//
//   x[slab][token][64]   FP16; a slab is 64 of K, `tokens` rows of 128 bytes (the workspace's chunk, whatever n is)
//
// Eight tokens are 1024 bytes: any number of tokens from a multiple of eight on is one contiguous piece of a slab, and lands in shared memory in
// the 128-byte-swizzled order of wgmma's B operand: chunk c (16 bytes) of token r is stored at chunk c ^ (r % 8).
//
// K is permuted inside each group of the weights. A weight fragment of the matrix product is what a lane of the decode layout holds anyway:
// lane t of a quad has kGroup / 4 consecutive columns of a row, as ValueShuffle words (gemv_int4.cu). Step s of the product (16 of K) takes the
// columns 4 s .. 4 s + 3 of each of the four lanes: columns 4 s, 4 s + 1 as its k = 2 t, 2 t + 1, and 4 s + 2, 4 s + 3 as its k = 8 + 2 t, 9 + 2 t. So
// column t * kGroup / 4 + 4 s + 2 h + e of a group is element 16 s + 8 h + 2 t + e. Who writes x writes that order; nobody else needs to know it.
//
// Columns beyond the matrix (K is padded to 128) must be finite: the weights there count as zero.
#pragma once

#include "constants.cuh"
#include "ptx.cuh"

namespace nanoqwen {

constexpr int kUnit = 128, kSlab = 64;  // columns

// Position of column k in the permuted row.
__device__ __forceinline__ int x_position(int k) {
  const int in = k % kGroup, of_lane = in % (kGroup / 4);
  return k - in + 16 * (of_lane / 4) + 8 * (of_lane % 4 / 2) + 2 * (in / (kGroup / 4)) + k % 2;
}

// The inverse.
__device__ __forceinline__ int x_column(int p) {
  const int in = p % kGroup, step = in / 16, within = in % 16;
  return p - in + (within % 8 / 2) * (kGroup / 4) + 4 * step + 2 * (within / 8) + p % 2;
}

// Halves between a slab's start and the 16-byte chunk of `token`.
__device__ __forceinline__ int x_chunk(int token, int chunk) { return token * kSlab + (chunk ^ (token & 7)) * 8; }

}  // namespace nanoqwen
