// argmax: the greedy token, and whether every logit was finite.
//
// Computes   the smallest index of the largest logit (the sum of its parts) among the ids that may be chosen. NaN or infinity anywhere
//            among them makes the result -1: the host then looks for the layer. Also writes the summed logits, for samplers.
//            With `chooses` the result is the step's choice, and the step advances; without it, sample.cu follows and does that.
// Moves      vocab * 12 bytes, in L2.
// Launch     kArgmaxCtas CTAs of 256 threads; the last one to finish reduces the candidates of all.
// Barriers   __syncthreads reached by all threads: after the warps' candidates, and after the vote on who is last.
//            Across CTAs: each CTA publishes its candidate, then adds one to `arrived` after a fence; the CTA that draws the last
//            number sees all candidates and resets the counter for the next step.
#include "allowed.cuh"
#include "candidate.cuh"
#include "constants.cuh"
#include "parts.cuh"
#include "ptx.cuh"
#include "step.cuh"

namespace nanoqwen {

constexpr int kArgmaxThreads = 256;

}  // namespace nanoqwen

using namespace nanoqwen;

extern "C" __global__ void __launch_bounds__(kArgmaxThreads)
argmax(const float* parts, float* logits, const u32* allowed, Candidate* candidates, u32* arrived, Step* step, int* told, int chooses) {
  __shared__ Candidate of_warp[kArgmaxThreads / kWarp];
  __shared__ bool last;
  allow_next_kernel();
  wait_for_previous_kernel();

  Candidate mine{-kLargestFloat, 0x7FFFFFFF};
  for (int i = blockIdx.x * kArgmaxThreads + threadIdx.x; i < kVocabRows; i += gridDim.x * kArgmaxThreads) {
    const float value = sum_parts<kHeadParts>(parts + i, kVocabRows);
    logits[i] = value;
    if (is_allowed(allowed, i)) mine = better(mine, {value, is_finite(value) ? i : -1});
  }
  mine = best_of_warp(mine);
  if (lane_id() == 0) of_warp[warp_id()] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kArgmaxThreads / kWarp; ++w) mine = better(mine, of_warp[w]);
    candidates[blockIdx.x] = mine;
    __threadfence();
    last = atomicAdd(arrived, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last || warp_id() != 0) return;
  __threadfence();
  Candidate best{-kLargestFloat, 0x7FFFFFFF};
  for (int c = lane_id(); c < gridDim.x; c += kWarp) {
    const volatile Candidate* other = candidates + c;  // written by other SMs: not from this SM's L1
    best = better(best, {other->value, other->index});
  }
  best = best_of_warp(best);
  if (lane_id() == 0) {
    *arrived = 0;
    if (chooses) advance(step, told, best.index);
    else step->next_token = best.index;
  }
}
