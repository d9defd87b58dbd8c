// rope_append: finish q, k, v of the new token; k and v go into their page.
//
// Computes   the sum of the parts + bias of the fused q/k/v projection; RoPE (half-split: element i pairs with i + head_dim / 2) on q and k;
//            q as FP32; k and v as FP16 into the page that holds the token's position.
// Moves      a few tens of kilobytes, all in L2.
// Launch     one warp a head: heads + 2 * kv_heads CTAs of 32 threads. No barrier, no shared memory.
// Page       [kv_head][token][head_dim] FP16; inside a row, the 16-byte chunk c of token r lies at chunk c ^ (r % 8), so that the
//            attention kernel's ldmatrix finds the same chunk of eight tokens in eight different banks (paged_attention.cu).
#include "constants.cuh"
#include "head.cuh"
#include "parts.cuh"
#include "ptx.cuh"
#include "step.cuh"

using namespace nanoqwen;

extern "C" __global__ void __launch_bounds__(kWarp)
rope_append(const float* parts, const u16* q_bias, const u16* k_bias, const u16* v_bias, const float2* rope_table, const Step* step,
            const int* block_table, u16* keys, u16* values, float* q) {
  constexpr int kHalf = kHeadDim / 2, kPairs = kHalf / kWarp;
  static_assert(kHalf % kWarp == 0, "a lane owns whole pairs");
  allow_next_kernel();

  // What does not come from the projection is here before it is finished: the step's scalars change between steps only.
  const Head head(blockIdx.x);
  const u16* bias = head.bias(q_bias, k_bias, v_bias);
  const int position = step->position, page = block_table[position / kPageTokens];
  float bias_a[kPairs], bias_b[kPairs];
  float2 turn[kPairs];
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    const int i = lane_id() + p * kWarp;
    bias_a[p] = half_to_float(bias[i]), bias_b[p] = half_to_float(bias[i + kHalf]);
    turn[p] = rope_table[static_cast<size_t>(position) * kHalf + i];
  }
  wait_for_previous_kernel();

#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    const int i = lane_id() + p * kWarp;
    const int first_row = head.index * kHeadDim + i, second_row = first_row + kHalf;
    constexpr int kRows = kQSize + 2 * kKvSize;
    float a = sum_parts<kQkvParts>(parts + first_row, kRows) + bias_a[p];
    float b = sum_parts<kQkvParts>(parts + second_row, kRows) + bias_b[p];
    finish_pair(head, position, page, i, a, b, turn[p], q, keys, values);
  }
}
