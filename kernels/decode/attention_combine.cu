// attention_combine: join the splits of paged_attention and quantise for the output projection.
//
// Computes   per query head: sum of split sums, each weighted by exp2(its maximum - the largest), over the sum of denominators.
// Moves      splits * heads * (head_dim + 2) * 4 bytes, in L2.
// Launch     one warp for 128 elements of the concatenated heads (one head of 128, two of 64): CTAs of 32 threads. No barrier.
#include "activations.cuh"
#include "constants.cuh"
#include "ptx.cuh"
#include "step.cuh"

using namespace nanoqwen;

extern "C" __global__ void __launch_bounds__(kWarp)
attention_combine(const float* sums, const float* maxima, const float* denominators, const Step* step, int splits, u8* records) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int pages = (step->position + kPageTokens) / kPageTokens;  // of position + 1 tokens
  const int active = min(pages, splits);                          // as in paged_attention.cu
  const int first = blockIdx.x * 128, i = first + 4 * lane_id();
  float y[4] = {0, 0, 0, 0};
  if (i < kQSize) {
    // Unrolled, so that eight splits' loads are on their way at a time.
    const int head = i / kHeadDim;
    float top = -infinity(), total = 0.0f;
#pragma unroll 8
    for (int s = 0; s < active; ++s) top = fmaxf(top, maxima[s * kNumHeads + head]);
#pragma unroll 8
    for (int s = 0; s < active; ++s) {
      const float weight = exp2f(maxima[s * kNumHeads + head] - top);
      const float4 part = *reinterpret_cast<const float4*>(sums + static_cast<size_t>(s) * kQSize + i);
      total += weight * denominators[s * kNumHeads + head];
      y[0] += weight * part.x, y[1] += weight * part.y, y[2] += weight * part.z, y[3] += weight * part.w;
    }
    for (int j = 0; j < 4; ++j) y[j] /= total;
  }
  write_digits(y, first, i < kQSize, records);
}
