// One head of the fused q/k/v projection: which it is, its bias, its rotation, its place in the cache.
#pragma once

#include "constants.cuh"
#include "kv_page.cuh"
#include "ptx.cuh"

namespace nanoqwen {

// Heads are numbered as the projection's rows are: query heads, then key heads, then value heads.
struct Head {
  int index;
  bool is_q, is_k;

  __device__ __forceinline__ explicit Head(int i) : index(i), is_q(i < kNumHeads), is_k(!is_q && i < kNumHeads + kNumKvHeads) {}

  __device__ __forceinline__ int kv_head() const { return (index - kNumHeads) % kNumKvHeads; }

  __device__ __forceinline__ const u16* bias(const u16* q_bias, const u16* k_bias, const u16* v_bias) const {
    return is_q ? q_bias + index * kHeadDim : (is_k ? k_bias + (index - kNumHeads) * kHeadDim : v_bias + (index - kNumHeads - kNumKvHeads) * kHeadDim);
  }
};

// RoPE, half-split: element i pairs with i + head_dim / 2. `turn` is the cosine and sine of the pair's angle.
__device__ __forceinline__ void rotate(float& a, float& b, float2 turn) {
  const float rotated = a * turn.x - b * turn.y;
  b = b * turn.x + a * turn.y;
  a = rotated;
}

// Elements i and i + head_dim / 2 of a key or value of `position`, rounded to FP16, into their row of a page.
__device__ __forceinline__ void store_pair(u16* row, int position, int i, float a, float b) {
  row[swizzled(i, position)] = float_to_half(a);
  row[swizzled(i + kHeadDim / 2, position)] = float_to_half(b);
}

// The end of a head's elements i and i + head_dim / 2 at `position`, bias added: q and k are rotated; q goes to q[head][head_dim] of its token, FP32, k and v
// into their row of `page` of their pool.
__device__ __forceinline__ void finish_pair(const Head& head, int position, int page, int i, float a, float b, float2 turn, float* q, u16* keys, u16* values) {
  if (head.is_q || head.is_k) rotate(a, b, turn);
  if (head.is_q) {
    q[head.index * kHeadDim + i] = a;
    q[head.index * kHeadDim + i + kHeadDim / 2] = b;
  } else {
    store_pair((head.is_k ? keys : values) + page_row(page, head.kv_head(), position % kPageTokens), position, i, a, b);
  }
}

}  // namespace nanoqwen
