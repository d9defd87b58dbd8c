// embed: residual[hidden] = embedding[token], FP16 row to FP32.
//
// Computes   the first residual of a step. The token is read from device memory, so a captured graph needs no patching of arguments.
// Moves      hidden * 2 bytes.
// Launch     one CTA of kRowThreads threads.
#include "constants.cuh"
#include "embedding.cuh"
#include "ptx.cuh"
#include "step.cuh"

using namespace nanoqwen;

extern "C" __global__ void __launch_bounds__(kRowThreads) embed(const u16* embedding, const Step* step, float* residual) {
  allow_next_kernel();
  wait_for_previous_kernel();
  for (int i = 2 * threadIdx.x; i < kHidden; i += 2 * kRowThreads) {
    const u32 pair = embedding_pair(embedding, step->token, i);
    *reinterpret_cast<float2*>(residual + i) = make_float2(low_half(pair), high_half(pair));
  }
}
