// A page in shared memory as operands of mma.sync: what attention at batch 1 knows about its layout.
//
// A page is 16 tokens of one KV head, [token][head_dim] FP16, chunks of a row swizzled (kv_page.cuh). Eight lanes of an ldmatrix name
// the same chunk of eight consecutive tokens; the swizzle puts these into eight different groups of banks.
#pragma once

#include "kv_page.cuh"
#include "matrix.cuh"

namespace nanoqwen {

// B fragments of q . K for dims 16 * step .. + 15: b[0], b[1] for tokens 0..7, b[2], b[3] for tokens 8..15.
__device__ __forceinline__ void key_fragments(u32 (&b)[4], const u16* page, int step) {
  const int token = lane_id() % 8 + (lane_id() / 16) * 8, chunk = 2 * step + (lane_id() / 8) % 2;
  ldmatrix(b, page + token * kHeadDim + swizzled(8 * chunk, token));
}

// B fragments of p . V for all 16 tokens: b[0], b[1] for dims 8 * chunk .. + 7, b[2], b[3] for the eight after them.
__device__ __forceinline__ void value_fragments(u32 (&b)[4], const u16* page, int chunk) {
  const int token = lane_id() % 16;
  ldmatrix_transposed(b, page + token * kHeadDim + swizzled(8 * (chunk + static_cast<int>(lane_id()) / 16), token));
}

}  // namespace nanoqwen
