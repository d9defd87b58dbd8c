// FP16 rows that cannot overflow: every row of a prefill activation carries one FP32 factor.
//
// The matrix product takes FP16. Real Qwen2 weights drive single activations past 65504, so a row is divided by
// absmax / 1024 first and its results are multiplied by that again, in FP32, by whoever reads them.
#pragma once

#include "ptx.cuh"

namespace nanoqwen {

constexpr float kRowPeak = 1024.0f;

// The factor to divide a row by, from the largest magnitude of the row. NaN or infinity stays visible in the factor.
__device__ __forceinline__ float row_factor(float absmax) { return absmax > 0.0f || !is_finite(absmax) ? absmax / kRowPeak : 1.0f; }

// max and sum over a CTA of `threads` threads; every thread gets both. All threads must call it; it may be called repeatedly.
template <int kThreads>
__device__ __forceinline__ float2 cta_max_sum(float largest, float sum) {
  __shared__ float maxima[kThreads / kWarp], sums[kThreads / kWarp];
  largest = warp_max(largest);
  sum = warp_sum(sum);
  __syncthreads();  // the last call's readers are done
  if (lane_id() == 0) maxima[warp_id()] = largest, sums[warp_id()] = sum;
  __syncthreads();
  const bool in = lane_id() < kThreads / kWarp;
  return make_float2(warp_max(in ? maxima[lane_id()] : 0.0f), warp_sum(in ? sums[lane_id()] : 0.0f));
}

}  // namespace nanoqwen
