// gemv_digits: the arithmetic that the runtime ships (decode/gemv_int4.cu), here with its own prologue: 16-bit fixed point on integer tensor cores.
//
// Computes   y = W . x (lesson_gemv.cuh): x is two INT8 digits, 256 * high + low, in the even and the odd columns of an m16n8k32, so one
//            instruction multiplies both and every quad ends with both sums of its two rows.
// x          a record a group, made in the prologue: [k = 0, 1][digit: high, low][t = 0..3][16 bytes beside words 2k and 2k + 1]; then the scale
//            (FP32, with the 1/16 that undoes the weights' position) and 12 bytes of padding.
// Accuracy   integer sums are exact; x is rounded to absmax / 65024 of its group, finer than FP16 rounds the largest.
// Cost       a word: 3 to unpack and half an m16n8k32.
#include "lesson_gemv.cuh"

namespace nanoqwen {
namespace lesson {

// [path]
struct Digits {
  static constexpr int kRecord = 2 * kGroup + 16, kMost = 127 * 256;
  static constexpr bool kPrepared = false, kLaneParts = false;

  static __device__ __forceinline__ void prepare(uint2 x4, u8* record) {
    float v[4];
    as_floats(x4, v);
    const float largest = warp_max(fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3]))));
    const float inverse = largest > 0.0f ? kMost / largest : 0.0f;
    u32 high = 0, low = 0;
    for (int i = 0; i < 4; ++i) {
      const int q = __float2int_rn(v[i] * inverse), below = static_cast<signed char>(q & 0xFF);
      low |= static_cast<u32>(below & 0xFF) << (8 * i);
      high |= static_cast<u32>((q - below) >> 8 & 0xFF) << (8 * i);
    }
    const int word = lane_id() / 2, t = word / 4, i = word % 4;
    u32* mine = reinterpret_cast<u32*>(record) + (i / 2 * 8 + t) * 4 + i % 2 * 2 + lane_id() % 2;
    mine[0] = byte_order(high);
    mine[16] = byte_order(low);
    if (lane_id() == 0) *reinterpret_cast<float*>(record + 2 * kGroup) = largest / (16.0f * kMost);
  }

  static __device__ __forceinline__ float2 multiply(const Words& w, const u8* record) {
    const int column = lane_id() / 4, t = lane_id() % 4;
    const uint4* x = reinterpret_cast<const uint4*>(record) + column % 2 * 4 + t;
    const float scale = *reinterpret_cast<const float*>(record + 2 * kGroup);
    int sums[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 a[2], b[2];
      int4::unpack_bytes(word_of(w.top, i), a);
      int4::unpack_bytes(word_of(w.bottom, i), b);
      const uint4 v = x[i / 2 * 8];
      mma_s8(sums, a[0], b[0], a[1], b[1], i % 2 ? v.z : v.x, i % 2 ? v.w : v.y);
    }
    return make_float2(static_cast<float>(sums[0] * 256 + sums[1]) * (low_half(w.scales) * scale),
                       static_cast<float>(sums[2] * 256 + sums[3]) * (high_half(w.scales) * scale));
  }
};
// [/path]

}  // namespace lesson
}  // namespace nanoqwen

NANOQWEN_LESSON_PATH(lesson_digits, nanoqwen::lesson::Digits)
