// gemv_half2: the INT4 GEMV with FP16 activations and half2 arithmetic, unpacked through prmt or through a bias of 1024.
//
// Computes   y = W . x (lesson_gemv.cuh): pairs of weights become half2, HFMA2 multiplies two weights at once.
// x          FP16 in shared memory, 256 bytes a group: the 16 bytes beside word i of lane t of a quad lie at 16 * (4i + t).
// Accuracy   an FP16 sum holds eight products (two words) and then goes to FP32. Sums of a whole group would round at 2^-11 of
//            their size; eight products stay within a few parts in ten thousand. Codes times x must stay below 65504 / 8.
// Cost       a word: 11 (prmt) or 9 (bias) to unpack, 4 HFMA2, and half of 2 conversions and 2 FADD.
#include "lesson_gemv.cuh"

namespace nanoqwen {
namespace lesson {

struct Prmt {
  static __device__ __forceinline__ void unpack(u32 word, u32 (&pair)[4]) { int4::unpack_prmt(word, pair); }
};
struct Bias {
  static __device__ __forceinline__ void unpack(u32 word, u32 (&pair)[4]) { int4::unpack_bias(word, pair); }
};

// [path]
template <class Way>
struct Half2 {
  static constexpr int kRecord = 2 * kGroup;
  static constexpr bool kPrepared = false, kLaneParts = true;

  static __device__ __forceinline__ void prepare(uint2 x4, u8* record) {
    const int chunk = lane_id() / 2;  // eight elements
    reinterpret_cast<uint2*>(record)[(chunk % 4 * 4 + chunk / 4) * 2 + lane_id() % 2] = x4;
  }

  static __device__ __forceinline__ u32 dot(u32 word, const uint4& x, u32 sum) {
    u32 pair[4];
    Way::unpack(word, pair);
    sum = int4::hfma2(pair[0], x.x, sum);
    sum = int4::hfma2(pair[1], x.y, sum);
    sum = int4::hfma2(pair[2], x.z, sum);
    return int4::hfma2(pair[3], x.w, sum);
  }

  static __device__ __forceinline__ float2 multiply(const Words& w, const u8* record) {
    const uint4* x = reinterpret_cast<const uint4*>(record) + lane_id() % 4;
    float upper = 0.0f, lower = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const uint4 a = x[4 * i], b = x[4 * i + 4];
      const u32 high = dot(word_of(w.top, i + 1), b, dot(word_of(w.top, i), a, 0));
      const u32 low = dot(word_of(w.bottom, i + 1), b, dot(word_of(w.bottom, i), a, 0));
      upper += low_half(high) + high_half(high);
      lower += low_half(low) + high_half(low);
    }
    return make_float2(upper * low_half(w.scales), lower * high_half(w.scales));
  }
};
// [/path]

}  // namespace lesson
}  // namespace nanoqwen

NANOQWEN_LESSON_PATH(lesson_prmt, nanoqwen::lesson::Half2<nanoqwen::lesson::Prmt>)
NANOQWEN_LESSON_PATH(lesson_bias, nanoqwen::lesson::Half2<nanoqwen::lesson::Bias>)
