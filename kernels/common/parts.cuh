// The reader's side of the streaming GEMV: add the parts of a result (stream_gemv.cuh), always in the same order.
#pragma once

#include "ptx.cuh"

namespace nanoqwen {

// One element. `stride` is the rows of a part.
template <int kParts>
__device__ __forceinline__ float sum_parts(const float* first, int stride) {
  float sum = first[0];
#pragma unroll
  for (int p = 1; p < kParts; ++p) sum += first[p * stride];
  return sum;
}

// Four neighbouring elements; `count` is known at launch only where one kernel reads after two different projections.
__device__ __forceinline__ float4 sum_parts4(const float* first, int stride, int count) {
  float4 sum = *reinterpret_cast<const float4*>(first);
#pragma unroll 4
  for (int p = 1; p < count; ++p) {
    const float4 more = *reinterpret_cast<const float4*>(first + static_cast<size_t>(p) * stride);
    sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
  }
  return sum;
}

}  // namespace nanoqwen
