// gemv_tensor: the INT4 GEMV with FP16 activations on tensor cores (m16n8k16), weights as FP16 subnormals.
//
// Computes   y = W . x (lesson_gemv.cuh). A is 16 rows of weights, as the patterns of unpack_subnormal; every column of B is x, so all
//            lanes of a quad end with the sums of their two rows and no shuffle is needed.
// x          FP16 in shared memory, 256 bytes a group in the order of gemv_half2.cu, odd pairs as x / 16; then the FP32 number that
//            the accumulator starts with and 12 bytes of padding.
// Accuracy   products are exact, sums are FP32; x / 16 is exact unless |x| is below 2^-10.
// Cost       a word: 5 to unpack and one m16n8k16. Two accumulators, or each product would wait for the one before it.
#include "lesson_gemv.cuh"

namespace nanoqwen {
namespace lesson {

// [path]
struct Tensor {
  static constexpr int kRecord = 2 * kGroup + 16;
  static constexpr bool kPrepared = false, kLaneParts = false;

  static __device__ __forceinline__ void prepare(uint2 x4, u8* record) {
    float v[4];
    as_floats(x4, v);
    const u32 odd = pack_half2(v[2] / 16, v[3] / 16);  // what the odd pair is multiplied with, and what the sum must count
    const float sum = warp_sum(v[0] + v[1] + 16 * (low_half(odd) + high_half(odd)));
    const int chunk = lane_id() / 2;
    reinterpret_cast<uint2*>(record)[(chunk % 4 * 4 + chunk / 4) * 2 + lane_id() % 2] = make_uint2(x4.x, odd);
    if (lane_id() == 0) *reinterpret_cast<float*>(record + 2 * kGroup) = -8.0f / 16777216.0f * sum;  // takes the 8 of c + 8 away, in units of 2^-24
  }

  static __device__ __forceinline__ float2 multiply(const Words& w, const u8* record) {
    const uint4* x = reinterpret_cast<const uint4*>(record) + lane_id() % 4;
    const float start = *reinterpret_cast<const float*>(record + 2 * kGroup);
    float even[4] = {start, start, start, start}, odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 a[4], b[4];
      int4::unpack_subnormal(word_of(w.top, i), a);
      int4::unpack_subnormal(word_of(w.bottom, i), b);
      const uint4 v = x[4 * i];
      mma_f16(even, a[0], b[0], a[1], b[1], v.x, v.y);
      mma_f16(odd, a[2], b[2], a[3], b[3], v.z, v.w);
    }
    return make_float2((even[0] + odd[0]) * (low_half(w.scales) * 16777216.0f), (even[2] + odd[2]) * (high_half(w.scales) * 16777216.0f));
  }
};
// [/path]

}  // namespace lesson
}  // namespace nanoqwen

NANOQWEN_LESSON_PATH(lesson_tensor, nanoqwen::lesson::Tensor)
