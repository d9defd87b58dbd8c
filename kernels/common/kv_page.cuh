// Where an element of the KV cache lies.
//
// A layer has one pool of pages for keys and one for values: [page][kv_head][token][head_dim], FP16. One (page, kv_head) slice is
// contiguous and a multiple of 128 bytes, so one bulk copy brings it (4 KiB for the 7B; the page is 16 KiB).
// The order inside a token's row is swizzled: its 16-byte chunk c lies at chunk c ^ (token % 8). Reading chunk c of eight
// consecutive tokens, as ldmatrix does, then touches eight different groups of banks instead of one.
#pragma once

#include "constants.cuh"
#include "ptx.cuh"

namespace nanoqwen {

constexpr int kSliceHalves = kPageTokens * kHeadDim;  // one KV head of one page
constexpr int kPageHalves = kNumKvHeads * kSliceHalves;
constexpr int kSliceBytes = 2 * kSliceHalves;
static_assert(2 * kPageHalves % kPageAlignBytes == 0, "a page is a whole number of L2 lines");
static_assert(kSliceBytes % 128 == 0, "a bulk copy of a slice starts and ends on a line");
static_assert(kPageTokens == 16, "one page is one m16 or k16 tile of the attention kernel");

// Splits of a sequence that get pages when `splits` are launched for a decode step. A split takes kSplitPages at least (one stage of
// paged_attention's ring), so that a short sequence leaves attention_combine few results to join.
constexpr int kSplitPages = 3;
__device__ __forceinline__ int active_splits(int pages, int splits) { return min((pages + kSplitPages - 1) / kSplitPages, splits); }

// First half of the row of `token` (0..15) of `kv_head` in `page`.
__device__ __forceinline__ size_t page_row(int page, int kv_head, int token) {
  return static_cast<size_t>(page) * kPageHalves + kv_head * kSliceHalves + token * kHeadDim;
}

// Element `i` of a row, as it is stored for `token` (any number congruent modulo 8).
__device__ __forceinline__ int swizzled(int i, int token) { return (((i / 8) ^ (token % 8)) * 8) + i % 8; }

}  // namespace nanoqwen
