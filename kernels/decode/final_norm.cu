// final_norm: add the last projection to the residual, normalise, and hand the result to lm_head.
//
// Computes   the residual plus the sum of the parts (if any), in FP32; y = sum / rms * weight as two FP16 parts high + low whose sum carries
//            22 bits (lm_head.cu multiplies both). The norms inside the layers are part of the GEMV that follows them (gemv_input.cuh).
// Moves      about hidden * 22 bytes, all of it in L2: this kernel is latency, not bandwidth.
// Launch     one CTA of kRowThreads threads; a thread keeps its 4 x kPieces values in registers between the two passes.
// Barriers   one __syncthreads, all threads: every warp's sum of squares is in shared memory after it.
#include "constants.cuh"
#include "parts.cuh"
#include "ptx.cuh"

namespace nanoqwen {

constexpr int kPieces = (kHidden + 4 * kRowThreads - 1) / (4 * kRowThreads);

// The sum over the CTA of one value a thread. Every thread gets it; all threads must call it, once a kernel.
__device__ __forceinline__ float cta_sum(float v) {
  __shared__ float of_warp[kRowThreads / kWarp];
  v = warp_sum(v);
  if (lane_id() == 0) of_warp[warp_id()] = v;
  __syncthreads();
  return warp_sum(lane_id() < kRowThreads / kWarp ? of_warp[lane_id()] : 0.0f);
}

// y[piece][4] of this thread: elements 4 * (threadIdx.x + piece * kRowThreads) + 0..3.
__device__ __forceinline__ void add_and_normalise(const float* residual, const float* parts, int part_count, const u16* weight, float (&y)[kPieces][4]) {
  float squares = 0.0f;
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int i = 4 * (threadIdx.x + p * kRowThreads);
    float4 x = make_float4(0, 0, 0, 0);
    if (i < kHidden) {
      x = *reinterpret_cast<const float4*>(residual + i);
      if (part_count) {
        const float4 sum = sum_parts4(parts + i, kHidden, part_count);
        x = make_float4(x.x + sum.x, x.y + sum.y, x.z + sum.z, x.w + sum.w);
      }
    }
    y[p][0] = x.x, y[p][1] = x.y, y[p][2] = x.z, y[p][3] = x.w;
    squares += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
  }
  const float scale = rsqrtf(cta_sum(squares) / kHidden + kRmsEps);
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int i = 4 * (threadIdx.x + p * kRowThreads);
    if (i < kHidden) {
      const uint2 w = *reinterpret_cast<const uint2*>(weight + i);
      y[p][0] *= scale * low_half(w.x), y[p][1] *= scale * high_half(w.x);
      y[p][2] *= scale * low_half(w.y), y[p][3] *= scale * high_half(w.y);
    }
  }
}

}  // namespace nanoqwen

using namespace nanoqwen;

extern "C" __global__ void __launch_bounds__(kRowThreads, 1)
final_norm(const float* residual, const float* parts, int part_count, const u16* weight, u16* halves) {
  allow_next_kernel();
  wait_for_previous_kernel();
  float y[kPieces][4];
  add_and_normalise(residual, parts, part_count, weight, y);
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int i = 4 * (threadIdx.x + p * kRowThreads);
    if (i >= kHidden) continue;
    u32 high[2], low[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float a = y[p][2 * j], b = y[p][2 * j + 1];
      high[j] = pack_half2(a, b);
      low[j] = pack_half2(a - low_half(high[j]), b - high_half(high[j]));
    }
    u16* slice = halves + i / 32 * 64 + i % 32;  // [slice of 32][high, low][32]
    *reinterpret_cast<uint2*>(slice) = make_uint2(high[0], high[1]);
    *reinterpret_cast<uint2*>(slice + 32) = make_uint2(low[0], low[1]);
  }
}
