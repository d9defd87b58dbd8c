// gemv_sign_extend: the INT4 GEMV that one writes first. A baseline: it shows how many issue slots it may not spend.
//
// Computes   y = W . x (lesson_gemv.cuh): each weight is shifted up, shifted down with its sign, converted to FP32 and multiplied in FP32.
// x          FP32 in shared memory, 512 bytes a group, converted once in the prologue. Vector k of lane t of a quad lies at 16 * (4k + t),
//            so that the four lanes read 64 neighbouring bytes.
// Accuracy   products of 4 and 11 bits are exact in FP32; only the sums round.
// Cost       unpack_sign_extend, 23 instructions a word, and eight FFMA: nothing is shared between the weights of a word.
#include "lesson_gemv.cuh"

namespace nanoqwen {
namespace lesson {

// [path]
struct SignExtend {
  static constexpr int kRecord = 4 * kGroup;
  static constexpr bool kPrepared = false, kLaneParts = true;

  static __device__ __forceinline__ void prepare(uint2 x4, u8* record) {
    float v[4];
    as_floats(x4, v);
    reinterpret_cast<float4*>(record)[lane_id() % 8 * 4 + lane_id() / 8] = make_float4(v[0], v[1], v[2], v[3]);
  }

  static __device__ __forceinline__ float dot(u32 word, const float4& a, const float4& b, float sum) {
    float w[8];
    int4::unpack_sign_extend(word, w);
    sum += w[0] * a.x;
    sum += w[1] * a.y;
    sum += w[2] * a.z;
    sum += w[3] * a.w;
    sum += w[4] * b.x;
    sum += w[5] * b.y;
    sum += w[6] * b.z;
    return sum + w[7] * b.w;
  }

  static __device__ __forceinline__ float2 multiply(const Words& w, const u8* record) {
    const float4* x = reinterpret_cast<const float4*>(record) + lane_id() % 4;
    float upper = 0.0f, lower = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 a = x[8 * i], b = x[8 * i + 4];
      upper = dot(word_of(w.top, i), a, b, upper);
      lower = dot(word_of(w.bottom, i), a, b, lower);
    }
    return make_float2(upper * low_half(w.scales), lower * high_half(w.scales));
  }
};
// [/path]

}  // namespace lesson
}  // namespace nanoqwen

NANOQWEN_LESSON_PATH(lesson_sign_extend, nanoqwen::lesson::SignExtend)
