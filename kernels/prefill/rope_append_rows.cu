// rope_append_rows: finish q, k, v of the tokens of a chunk; k and v go into their pages.
//
// Computes   product * factor + bias; RoPE (half-split) on q and k; q as FP32 [n][heads][head_dim]; k and v as FP16 pages (kv_page.cuh).
// Launch     (heads + 2 * kv_heads, n) CTAs of 32 threads. No barrier.
#include "constants.cuh"
#include "kv_page.cuh"
#include "ptx.cuh"

using namespace nanoqwen;

extern "C" __global__ void __launch_bounds__(kWarp)
rope_append_rows(const float* product, const float* factor, const u16* q_bias, const u16* k_bias, const u16* v_bias, const float2* rope_table,
                 int first_position, const int* block_table, u16* keys, u16* values, float* q) {
  constexpr int kHalf = kHeadDim / 2, kRows = kQSize + 2 * kKvSize;
  const int head = blockIdx.x, token = blockIdx.y, position = first_position + token;
  const bool is_q = head < kNumHeads, is_k = !is_q && head < kNumHeads + kNumKvHeads;
  const u16* bias = is_q ? q_bias + head * kHeadDim : (is_k ? k_bias + (head - kNumHeads) * kHeadDim : v_bias + (head - kNumHeads - kNumKvHeads) * kHeadDim);
  const float* in = product + static_cast<size_t>(token) * kRows + head * kHeadDim;
  const float f = factor[token];
  for (int i = lane_id(); i < kHalf; i += kWarp) {
    float a = in[i] * f + half_to_float(bias[i]), b = in[i + kHalf] * f + half_to_float(bias[i + kHalf]);
    if (is_q || is_k) {
      const float2 turn = rope_table[static_cast<size_t>(position) * kHalf + i];
      const float rotated = a * turn.x - b * turn.y;
      b = b * turn.x + a * turn.y;
      a = rotated;
    }
    if (is_q) {
      float* out = q + (static_cast<size_t>(token) * kNumHeads + head) * kHeadDim;
      out[i] = a, out[i + kHalf] = b;
    } else {
      u16* row = (is_k ? keys : values) + page_row(block_table[position / kPageTokens], (head - kNumHeads) % kNumKvHeads, position % kPageTokens);
      row[swizzled(i, position)] = float_to_half(a);
      row[swizzled(i + kHalf, position)] = float_to_half(b);
    }
  }
}
