// swiglu: silu(gate) * up, quantised for the down projection.
//
// Computes   gate and up are rows 0.. and intermediate.. of the fused projection, the sum of their parts; silu(x) = x / (1 + exp(-x)).
//            FP32 throughout: with real Qwen2 weights this product passes FP16's 65504; the digits have a scale a group.
// Moves      intermediate * 18 bytes, in L2.
// Launch     one warp for 128 elements: ceil(intermediate / 1024) CTAs of 256 threads. No barrier.
#include "activations.cuh"
#include "constants.cuh"
#include "parts.cuh"
#include "ptx.cuh"

using namespace nanoqwen;

extern "C" __global__ void __launch_bounds__(256) swiglu(const float* parts, u8* records) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int first = (blockIdx.x * 8 + warp_id()) * 128;
  if (first >= kIntermediate) return;  // the whole warp: write_digits needs all lanes of those that stay
  const int i = first + 4 * lane_id();
  float y[4] = {0, 0, 0, 0};
  if (i < kIntermediate) {
    const float4 gate = sum_parts4(parts + i, 2 * kIntermediate, kGateUpParts);
    const float4 up = sum_parts4(parts + kIntermediate + i, 2 * kIntermediate, kGateUpParts);
    const auto silu = [](float x) { return x / (1.0f + expf(-x)); };
    y[0] = silu(gate.x) * up.x, y[1] = silu(gate.y) * up.y, y[2] = silu(gate.z) * up.z, y[3] = silu(gate.w) * up.w;
  }
  write_digits(y, first, i < kIntermediate, records);
}
