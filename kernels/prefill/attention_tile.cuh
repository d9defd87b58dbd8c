// The arithmetic of prefill attention: what a consumer warp holds of its 16 queries, and how a step of 64 tokens goes through it.
//
// Roundings are two, both to FP16 and to nearest: of q, once, before anything is multiplied, and of each share (the exponential of a score, between
// 0 and 1) in front of the product with the values. Keys and values are FP16 in the cache. Scores, maxima, denominators (of the shares before they are
// rounded) and all sums are FP32. The scale of the scores, 1 / sqrt(head_dim), is applied to FP32 scores, in the instruction that subtracts the maximum.
// A query beyond FP16's range becomes infinite, as a key does in the cache.
//
// Products: A (queries, shares) in registers, B (keys, values) in shared memory, pages as they lie in the cache. A tensor copy (tensor_map.cuh) puts 64
// dimensions of a token into 128 bytes of shared memory, tokens one after the other; the cache's own swizzle, chunk c of a row at c ^ (token % 8), is the
// 128-byte swizzle of wgmma.
//   keys     K-major (b_descriptor, wgmma.cuh): N is tokens, K is dimensions. Eight tokens are 1024 bytes; the next 16 dimensions are 32 bytes further.
//   values   MN-major, "transposed": N is dimensions, K is tokens. A block of 64 dimensions by 8 tokens is 1024 bytes; the next 8 tokens follow,
//            the next 64 dimensions are a half tile further.
#pragma once

#include "constants.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"

namespace nanoqwen {

constexpr int kStepPages = 4, kStep = kStepPages * kPageTokens;  // tokens that are multiplied together
constexpr int kQueries = 64;                                     // of a warpgroup: 16 a warp
constexpr int kDimSteps = kHeadDim / 16, kDimTiles = kHeadDim / 8, kHalves = kHeadDim / kBoxColumns, kTokenSteps = kStep / 16;
constexpr int kHalfBytes = kStepPages * kBoxBytes, kTileBytes = kHalves * kHalfBytes;  // of a step's keys, or values: [half of the dimensions][token][64]
static_assert(kHeadDim == 64 || kHeadDim == 128, "one or two columns of boxes");

// exp(x / sqrt(head_dim)) = exp2(kScoreScale * x)
constexpr float kScoreScale = 1.4426950408889634f * (kHeadDim == 64 ? 0.125f : 0.08838834764831845f);

__device__ __forceinline__ float exp2_fast(float x) {  // 2 units of the last place; results below 2^-126 are 0
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Descriptor of values: `half_bytes` from 64 dimensions to the next 64, 1024 from 8 tokens to the next 8, swizzle 128. The next 16 tokens begin
// 2048 bytes later.
__device__ __forceinline__ u64 value_descriptor(u32 address, u32 half_bytes) {
  return (1ull << 62) | (64ull << 32) | (static_cast<u64>(half_bytes / 16) << 16) | ((address & 0x3FFFF) >> 4);
}

// Of lane (g, t): rows g and g + 8 of the warp's 16 queries, called half 0 and 1.
struct QueryTile {
  u32 q[kDimSteps][4];           // A fragments
  float sums[kHeadDim / 2];      // [4 * tile + 2 * half + e]: dimension 8 * tile + 2 t + e
  float s[kStep / 2];            // scores, then shares: the same with tokens for dimensions
  u32 share[kTokenSteps][4];     // the shares as A fragments
  float maximum[2];              // of the scores so far, times kScoreScale
  float denominator[2];          // of this lane's tokens only
  float correction[2];           // what the step's new maximum makes of sums before it

  // Queries `row` and `row + 8` of `head`, from FP32 [n][heads][head_dim]. Rows from n on are zeros, and nobody stores what comes of them.
  __device__ __forceinline__ void load(const float* queries, int n, int head, int row) {
#pragma unroll
    for (int k = 0; k < kDimSteps; ++k)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int query = row + 8 * (r % 2), dim = 16 * k + 2 * (lane_id() % 4) + 8 * (r / 2);
        const float2 x = query < n ? *reinterpret_cast<const float2*>(queries + (static_cast<size_t>(query) * kNumHeads + head) * kHeadDim + dim) : make_float2(0, 0);
        q[k][r] = pack_half2(x.x, x.y);
      }
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) sums[i] = 0.0f;
    maximum[0] = maximum[1] = -infinity();
    denominator[0] = denominator[1] = 0.0f;
  }

  // s = q . K, not waited for.
  __device__ __forceinline__ void multiply_keys(u32 keys) {
    const u64 b = b_descriptor(keys);
    wgmma_fence();
    wgmma<false>(s, q[0], b);
#pragma unroll
    for (int k = 1; k < kDimSteps; ++k) wgmma(s, q[k], b + k / 4 * (kHalfBytes / 16) + k % 4 * 2);
    wgmma_commit();
  }

  // sums += shares . V, not waited for.
  __device__ __forceinline__ void multiply_values(u32 values) {
    const u64 b = value_descriptor(values, kHalfBytes);
    pin_shares();
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTokenSteps; ++k) wgmma<true, true>(sums, share[k], b + k * (kBoxBytes / 16));
    wgmma_commit();
  }

  // After the wait for a product: nothing that reads or writes these registers moves up across it.
  __device__ __forceinline__ void pin_scores() {
#pragma unroll
    for (int i = 0; i < kStep / 2; ++i) pin(s[i]);
  }
  __device__ __forceinline__ void pin_sums() {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) pin(sums[i]);
    pin_shares();
  }
  __device__ __forceinline__ void pin_shares() {
#pragma unroll
    for (int k = 0; k < kTokenSteps; ++k)
#pragma unroll
      for (int r = 0; r < 4; ++r) pin(share[k][r]);
  }

  // Tokens of the step behind `position`, that of row g, get minus infinity. `first` is the step's first token.
  __device__ __forceinline__ void mask(int position, int first) {
#pragma unroll
    for (int i = 0; i < kStep / 2; ++i) {
      const int token = first + 8 * (i / 4) + 2 * static_cast<int>(lane_id() % 4) + i % 2;
      if (token > position + 8 * (i / 2 % 2)) s[i] = -infinity();
    }
  }

  // Scores become shares, relative to the new maximum. Returns whether any row of the warp has a correction that is not 1.
  __device__ __forceinline__ bool softmax() {
    bool moved = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest[2] = {s[2 * half], s[2 * half + 1]};
#pragma unroll
      for (int i = 4; i < kStep / 2; i += 4) {
        largest[0] = fmaxf(largest[0], s[i + 2 * half]);
        largest[1] = fmaxf(largest[1], s[i + 2 * half + 1]);
      }
      float now = fmaxf(largest[0], largest[1]);
      now = fmaxf(now, __shfl_xor_sync(kFullMask, now, 1));
      now = fmaxf(now, __shfl_xor_sync(kFullMask, now, 2));
      now = fmaxf(now * kScoreScale, maximum[half]);
      const float from = now == -infinity() ? 0.0f : now;  // a row that has seen no token yet: shares of 0, not NaN
      correction[half] = exp2_fast(maximum[half] - from);
      moved |= now != maximum[half];
      maximum[half] = now;
      float sum[2] = {0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < kStep / 2; i += 4)
#pragma unroll
        for (int e = 0; e < 2; ++e) sum[e] += s[i + 2 * half + e] = exp2_fast(fmaf(s[i + 2 * half + e], kScoreScale, -from));
      denominator[half] = denominator[half] * correction[half] + (sum[0] + sum[1]);
    }
    return __any_sync(kFullMask, moved);
  }

  __device__ __forceinline__ void rescale() {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) sums[i] *= correction[i / 2 % 2];
  }

  // The accumulators of q . K are in the order of A fragments already.
  __device__ __forceinline__ void make_fragments() {
#pragma unroll
    for (int k = 0; k < kTokenSteps; ++k)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int i = 4 * (2 * k + r / 2) + 2 * (r % 2);
        share[k][r] = pack_half2(s[i], s[i + 1]);
      }
  }
};

}  // namespace nanoqwen
