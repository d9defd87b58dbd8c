// Where a streaming GEMV's x comes from: two ways to put its records into shared memory (stream_gemv.cuh).
//
// An input is asked twice. `prepare` runs before the wait for the previous kernel and may touch only what no kernel of the step writes;
// `deliver` runs after it, by all threads of the CTA, and returns when all of them may read the records.
#pragma once

#include "activations.cuh"
#include "constants.cuh"
#include "mbarrier.cuh"
#include "parts.cuh"
#include "ptx.cuh"

namespace nanoqwen {

// x as the previous kernel wrote it: one bulk copy of all records.
template <int kBytes>
struct CopiedInput {
  const u8* from;
  Barrier* landed;  // in shared memory; initialised for one arrival by thread 0

  __device__ __forceinline__ void prepare() {}

  __device__ __forceinline__ void deliver(u8* records, float*) {
    if (threadIdx.x == 0) {
      barrier_arrive_expect(landed, kBytes);
      bulk_copy(records, from, kBytes, landed);
    }
    barrier_wait(landed, 0);  // all threads: each must see the landed bytes
  }
};

// [normed]
// x = RMSNorm(residual + parts) * gain, computed by every CTA for itself. All of them read the same few tens of kilobytes from L2, which
// takes about as long as copying finished records, and a kernel of one CTA between two GEMVs, with a start and an end of its own, is gone.
// The sum is the new residual; CTA 0 writes it to another buffer than the old one, which the other CTAs may still be reading.
template <int kWarps>
struct NormedInput {
  static constexpr int kChunks = (kHidden + 127) / 128, kPieces = (kChunks + kWarps - 1) / kWarps;  // a warp takes 128 elements at a time

  const float* residual;
  const float* parts;  // [part_count][hidden] of the projection before
  int part_count;      // 0: none before the first layer
  const u16* gain;
  float* sum_out;
  uint2 weight[kPieces];

  __device__ __forceinline__ static int element(int piece) { return (static_cast<int>(warp_id()) + piece * kWarps) * 128 + 4 * static_cast<int>(lane_id()); }

  __device__ __forceinline__ void prepare() {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) weight[p] = element(p) < kHidden ? *reinterpret_cast<const uint2*>(gain + element(p)) : make_uint2(0, 0);
  }

  // `of_warp`: kWarps floats of shared memory.
  __device__ __forceinline__ void deliver(u8* records, float* of_warp) {
    float4 x[kPieces];
    float squares = 0.0f;
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const int i = element(p);
      x[p] = make_float4(0, 0, 0, 0);
      if (i < kHidden) {
        x[p] = *reinterpret_cast<const float4*>(residual + i);
        if (part_count) {
          const float4 sum = sum_parts4(parts + i, kHidden, part_count);
          x[p] = make_float4(x[p].x + sum.x, x[p].y + sum.y, x[p].z + sum.z, x[p].w + sum.w);
        }
        if (blockIdx.x == 0) *reinterpret_cast<float4*>(sum_out + i) = x[p];
      }
      squares += x[p].x * x[p].x + x[p].y * x[p].y + x[p].z * x[p].z + x[p].w * x[p].w;
    }
    squares = warp_sum(squares);
    if (lane_id() == 0) of_warp[warp_id()] = squares;
    __syncthreads();  // all threads: every warp's sum is there
    const float total = warp_sum(lane_id() < kWarps ? of_warp[lane_id()] : 0.0f);
    const float scale = rsqrtf(total / kHidden + kRmsEps);
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const int i = element(p), first = i - 4 * static_cast<int>(lane_id());
      if (first >= kHidden) continue;  // the whole warp: write_digits needs all lanes of those that stay
      const float y[4] = {x[p].x * scale * low_half(weight[p].x), x[p].y * scale * high_half(weight[p].x),
                          x[p].z * scale * low_half(weight[p].y), x[p].w * scale * high_half(weight[p].y)};
      write_digits(y, first, i < kHidden, records);
    }
    __syncthreads();  // all threads: the records are complete
  }
};
// [/normed]

}  // namespace nanoqwen
