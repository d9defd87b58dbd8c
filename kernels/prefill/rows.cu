// rows: the elementwise kernels of prefill, one CTA a token.
//
// embed_rows   residual[n][hidden] = embedding[ids]
// norm_rows    residual += projection * factor (if any); y = residual / rms * weight; FP16 y / factor, factor
// swiglu_rows  silu(gate) * up of an FP32 product with its row factor; FP16 y / factor, factor
// All sums and products in FP32; FP16 only as the operand of the next matrix product (row_scale.cuh).
// Barriers     inside cta_max_sum, all threads.
#include "constants.cuh"
#include "embedding.cuh"
#include "ptx.cuh"
#include "row_scale.cuh"

namespace nanoqwen {
constexpr int kThreads = 256;
}

using namespace nanoqwen;

extern "C" __global__ void __launch_bounds__(kThreads) embed_rows(const u16* embedding, const int* ids, float* residual) {
  for (int i = 2 * threadIdx.x; i < kHidden; i += 2 * kThreads) {
    const u32 pair = embedding_pair(embedding, ids[blockIdx.x], i);
    *reinterpret_cast<float2*>(residual + static_cast<size_t>(blockIdx.x) * kHidden + i) = make_float2(low_half(pair), high_half(pair));
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
norm_rows(float* residual, const float* product, const float* product_factor, const u16* weight, u16* out, float* factor) {
  float* row = residual + static_cast<size_t>(blockIdx.x) * kHidden;
  float squares = 0.0f, largest = 0.0f;
  for (int i = threadIdx.x; i < kHidden; i += kThreads) {
    float x = row[i];
    if (product) row[i] = x += product[static_cast<size_t>(blockIdx.x) * kHidden + i] * product_factor[blockIdx.x];
    squares += x * x;
    largest = fmaxf(largest, fabsf(x * half_to_float(weight[i])));
  }
  const float2 both = cta_max_sum<kThreads>(largest, squares);
  const float scale = rsqrtf(both.y / kHidden + kRmsEps);
  const float f = row_factor(both.x * scale);  // the sum of squares is NaN if any element is, and so is scale
  for (int i = threadIdx.x; i < kHidden; i += kThreads)
    out[static_cast<size_t>(blockIdx.x) * kHidden + i] = float_to_half(row[i] * scale * half_to_float(weight[i]) / f);
  if (threadIdx.x == 0) factor[blockIdx.x] = f;
}

extern "C" __global__ void __launch_bounds__(kThreads) swiglu_rows(const float* gate_up, const float* product_factor, u16* out, float* factor) {
  const float* gate = gate_up + static_cast<size_t>(blockIdx.x) * 2 * kIntermediate;
  const float* up = gate + kIntermediate;
  const float f_in = product_factor[blockIdx.x];
  const auto value = [&](int i) {
    const float g = gate[i] * f_in;
    return g / (1.0f + expf(-g)) * (up[i] * f_in);
  };
  float largest = 0.0f, sum = 0.0f;
  for (int i = threadIdx.x; i < kIntermediate; i += kThreads) {
    const float y = value(i);
    largest = fmaxf(largest, fabsf(y));
    sum += y;  // only to notice NaN, which fmaxf drops
  }
  const float2 both = cta_max_sum<kThreads>(largest, sum);
  const float f = both.y != both.y ? both.y : row_factor(both.x);
  for (int i = threadIdx.x; i < kIntermediate; i += kThreads) out[static_cast<size_t>(blockIdx.x) * kIntermediate + i] = float_to_half(value(i) / f);
  if (threadIdx.x == 0) factor[blockIdx.x] = f;
}
