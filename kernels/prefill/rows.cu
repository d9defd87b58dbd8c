// rows: how a chunk of a prompt begins and ends, and what is measured of the weights once.
//
// embed_rows     residual[n][hidden] = embedding[ids]; a CTA a token.
// last_row       hands the chunk's last token to the decode step's kernels, which finish it: residual and q in the last layer, and the step's scalars.
// largest_scale  of a matrix. The products bring scales up by a power of two that follows from it (gemm_int4.cuh).
#include "constants.cuh"
#include "embedding.cuh"
#include "int4_block.cuh"
#include "ptx.cuh"
#include "span.cuh"
#include "step.cuh"

namespace nanoqwen {
constexpr int kThreads = 256;
static_assert(kHidden % 4 == 0 && kQSize % 4 == 0, "four values a thread");
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

// residual [n][hidden], as the last layer's first norm has left it; q [n][heads][head_dim]; ids [n]. Of the last token, to residual_mid [hidden] and
// last_q [heads][head_dim]. A thread copies four values; the first one writes the scalars too. Those of a chunk in the middle of a prompt nobody reads.
extern "C" __global__ void __launch_bounds__(kThreads)
last_row(const float* residual, const float* q, const int* ids, const Span* span, float* residual_mid, float* last_q, Step* step) {
  allow_next_kernel();
  const int i = 4 * (blockIdx.x * kThreads + threadIdx.x), last = span->n - 1;
  if (i >= kHidden + kQSize) return;
  const bool of_q = i >= kHidden;
  const float* const from = of_q ? q + static_cast<size_t>(last) * kQSize + (i - kHidden) : residual + static_cast<size_t>(last) * kHidden + i;
  float* const to = of_q ? last_q + (i - kHidden) : residual_mid + i;
  wait_for_previous_kernel();
  *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
  if (i == 0) *step = {ids[last], span->position + last, -1};
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
