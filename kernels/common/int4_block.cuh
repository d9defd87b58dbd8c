// Where a block of INT4 weights keeps what: 16 rows x one group, the unit in which projections are stored and multiplied.
//
//   block    [16 rows][group / 8 words of codes], then the scales [g = 0..7][rows g, g + 8], the two rows of a tensor-core lane side by side
//   matrix   its blocks in order, row tile by row tile, padded to whole bundles of four, which are whole 128-byte lines
//
// Any run of blocks is one contiguous piece, codes and scales together: a bundle for decode, any number of groups of a row tile for prefill.
// nanoqwen/cuda/weights.py writes this order.
#pragma once

#include "constants.cuh"
#include "ptx.cuh"

namespace nanoqwen {

// [int4_block]
struct Int4Block {
  static constexpr int kRows = 16, kCodeBytes = kRows * kGroup / 2, kScaleBytes = kRows * 2, kBytes = kCodeBytes + kScaleBytes;
  static_assert(kBytes % 16 == 0, "bulk copies and 16-byte loads begin at any block");

  // Bytes from the first block to the codes and the scales of block j.
  __device__ __forceinline__ static constexpr int codes(int j) { return j * kBytes; }
  __device__ __forceinline__ static constexpr int scales(int j) { return j * kBytes + kCodeBytes; }
};
// [/int4_block]

}  // namespace nanoqwen
