// attention_combine: join the splits of paged_attention and quantise for the output projection.
//
// Computes   per query head: sum of split sums, each weighted by exp2(its maximum - the largest), over the sum of denominators.
// Moves      splits * heads * (head_dim + 2) * 4 bytes, in L2.
// Launch     one warp for 128 elements of the concatenated heads (one head of 128, two of 64): CTAs of 32 threads. No barrier.
#include "activations.cuh"
#include "constants.cuh"
#include "kv_page.cuh"
#include "ptx.cuh"
#include "step.cuh"

using namespace nanoqwen;

extern "C" __global__ void __launch_bounds__(kWarp)
attention_combine(const float* sums, const float* maxima, const float* denominators, const Step* step, int splits, u8* records) {
  allow_next_kernel();
  const int pages = (step->position + kPageTokens) / kPageTokens;  // of position + 1 tokens; the position changes between steps only
  const int active = active_splits(pages, splits);
  const int first = blockIdx.x * 128, i = first + 4 * lane_id();
  wait_for_previous_kernel();
  float y[4] = {0, 0, 0, 0};
  if (i < kQSize) {
    // Eight splits' loads are on their way at a time; the running maximum is corrected as in the online softmax.
    constexpr int kTogether = 8;
    const int head = i / kHeadDim;
    float top = -infinity(), total = 0.0f;
    for (int base = 0; base < active; base += kTogether) {
      float maximum[kTogether], denominator[kTogether];
      float4 part[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int s = base + j;
        const bool there = s < active;
        maximum[j] = there ? maxima[s * kNumHeads + head] : -infinity();
        denominator[j] = there ? denominators[s * kNumHeads + head] : 0.0f;
        part[j] = there ? *reinterpret_cast<const float4*>(sums + static_cast<size_t>(s) * kQSize + i) : make_float4(0, 0, 0, 0);
      }
      float now = top;
#pragma unroll
      for (int j = 0; j < kTogether; ++j) now = fmaxf(now, maximum[j]);
      const float correction = exp2f(top - now);  // 0 at first: exp2(-infinity)
      top = now;
      total *= correction;
      for (int k = 0; k < 4; ++k) y[k] *= correction;
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const float weight = exp2f(maximum[j] - top);
        total += weight * denominator[j];
        y[0] += weight * part[j].x, y[1] += weight * part[j].y, y[2] += weight * part[j].z, y[3] += weight * part[j].w;
      }
    }
    for (int k = 0; k < 4; ++k) y[k] /= total;
  }
  write_digits(y, first, i < kQSize, records);
}
