// rope_append_rows: finish q, k, v of the tokens of a chunk; k and v go into their pages.
//
// Computes   product * factor + bias; RoPE (half-split) on q and k; q as FP32 [n][heads][head_dim]; k and v as FP16 pages (kv_page.cuh).
// Launch     (heads + 2 * kv_heads, n) CTAs of 32 threads. No barrier.
#include "constants.cuh"
#include "head.cuh"
#include "ptx.cuh"

using namespace nanoqwen;

extern "C" __global__ void __launch_bounds__(kWarp)
rope_append_rows(const float* product, const float* factor, const u16* q_bias, const u16* k_bias, const u16* v_bias, const float2* rope_table,
                 int first_position, const int* block_table, u16* keys, u16* values, float* q) {
  constexpr int kHalf = kHeadDim / 2, kRows = kQSize + 2 * kKvSize;
  const Head head(blockIdx.x);
  const int token = blockIdx.y, position = first_position + token;
  const u16* bias = head.bias(q_bias, k_bias, v_bias);
  const float* in = product + static_cast<size_t>(token) * kRows + head.index * kHeadDim;
  const float f = factor[token];
  for (int i = lane_id(); i < kHalf; i += kWarp) {
    float a = in[i] * f + half_to_float(bias[i]), b = in[i + kHalf] * f + half_to_float(bias[i + kHalf]);
    if (head.is_q || head.is_k) rotate(a, b, rope_table[static_cast<size_t>(position) * kHalf + i]);
    if (head.is_q) {
      float* out = q + (static_cast<size_t>(token) * kNumHeads + head.index) * kHeadDim;
      out[i] = a, out[i + kHalf] = b;
    } else {
      u16* pool = head.is_k ? keys : values;
      store_pair(pool + page_row(block_table[position / kPageTokens], head.kv_head(), position % kPageTokens), position, i, a, b);
    }
  }
}
