// rows: how a chunk of a prompt begins and ends, and what is measured of the weights once.
//
// embed_rows     residual[n][hidden] = embedding[ids]; a CTA a token.
// last_row       the residual of the chunk's last token, with the last projection added: what the head continues with. One value a thread.
// largest_scale  of a matrix. The products bring scales up by a power of two that follows from it (gemm_int4.cuh).
#include "constants.cuh"
#include "embedding.cuh"
#include "gemm_work.cuh"
#include "int4_block.cuh"
#include "ptx.cuh"
#include "span.cuh"

namespace nanoqwen {
constexpr int kThreads = 256;
}

using namespace nanoqwen;

extern "C" __global__ void __launch_bounds__(kThreads) embed_rows(const u16* embedding, const int* ids, float* residual) {
  allow_next_kernel();
  wait_for_previous_kernel();
  for (int i = 2 * threadIdx.x; i < kHidden; i += 2 * kThreads) {
    const u32 pair = embedding_pair(embedding, ids[blockIdx.x], i);
    *reinterpret_cast<float2*>(residual + static_cast<size_t>(blockIdx.x) * kHidden + i) = make_float2(low_half(pair), high_half(pair));
  }
}

// residual [n][hidden]; parts as gemm_work.cuh lays them out for `work`, with the tokens' factors.
extern "C" __global__ void __launch_bounds__(kThreads)
last_row(const float* residual, const float* parts, const Work work, const float* factor, const Span* span, float* out) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  allow_next_kernel();
  wait_for_previous_kernel();
  if (i >= kHidden) return;
  const int last = span->n - 1;
  out[i] = residual[static_cast<size_t>(last) * kHidden + i] + add_parts_of_row(parts, work, kHidden, last, i) * factor[last];
}

// result: bits of the largest scale as a float; 0 before. A warp takes four blocks at a time, eight lanes a block. The largest of several numbers
// does not depend on their order, so the atomic leaves nothing to chance.
extern "C" __global__ void __launch_bounds__(kThreads) largest_scale(const u8* blocks, int count, u32* result) {
  float largest = 0.0f;
  for (int pair = blockIdx.x * kThreads + threadIdx.x; pair < 8 * count; pair += gridDim.x * kThreads) {
    const u32 both = reinterpret_cast<const u32*>(blocks + static_cast<size_t>(pair / 8) * Int4Block::kBytes + Int4Block::kCodeBytes)[pair % 8];
    largest = fmaxf(largest, fmaxf(fabsf(low_half(both)), fabsf(high_half(both))));
  }
  largest = warp_max(largest);
  if (lane_id() == 0) atomicMax(result, __float_as_uint(largest));
}
