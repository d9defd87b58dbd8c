// gemv_dp4a: the INT4 GEMV with INT8 activations and dp4a, behind a kernel that quantises x, and with that step in its own prologue.
//
// Computes   y = W . x (lesson_gemv.cuh): 16 times the weights' nibbles as bytes, dp4a adds four products of bytes to a 32-bit integer.
// x          INT8 with one FP32 scale a group, absmax / 127. Record: 128 bytes in unpack_bytes' order, those beside words 2k and 2k + 1 of
//            lane t of a quad at 16 * (4k + t); then the scale (with the 1/16 that undoes the weights' position) and 12 bytes of padding.
// Accuracy   integer sums are exact; what is lost is lost when x is rounded to 8 bits.
// Cost       a word: 3 to unpack and 2 dp4a. The quantisation is a launch of its own, or 30 instructions a lane and group in
//            every CTA's prologue, while its first weights are on their way.
#include "lesson_gemv.cuh"

namespace nanoqwen {
namespace lesson {

// a . b + c over four signed bytes.
__device__ __forceinline__ int dp4a(u32 a, u32 b, int c) {
  int d;
  asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// [path]
struct Dp4a {
  static constexpr int kRecord = kGroup + 16;
  static constexpr bool kPrepared = false, kLaneParts = true;

  static __device__ __forceinline__ void prepare(uint2 x4, u8* record) {
    float v[4];
    as_floats(x4, v);
    const float largest = warp_max(fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3]))));
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    u32 bytes = 0;
    for (int i = 0; i < 4; ++i) bytes |= (static_cast<u32>(__float2int_rn(v[i] * inverse)) & 0xFF) << (8 * i);
    const int word = lane_id() / 2, t = word / 4, i = word % 4;
    reinterpret_cast<u32*>(record)[(i / 2 * 4 + t) * 4 + i % 2 * 2 + lane_id() % 2] = byte_order(bytes);
    if (lane_id() == 0) *reinterpret_cast<float*>(record + kGroup) = largest / (127.0f * 16.0f);
  }

  static __device__ __forceinline__ int dot(u32 word, u32 x0, u32 x1, int sum) {
    u32 bytes[2];
    int4::unpack_bytes(word, bytes);
    return dp4a(bytes[1], x1, dp4a(bytes[0], x0, sum));
  }

  static __device__ __forceinline__ float2 multiply(const Words& w, const u8* record) {
    const uint4* x = reinterpret_cast<const uint4*>(record) + lane_id() % 4;
    const float scale = *reinterpret_cast<const float*>(record + kGroup);
    int upper = 0, lower = 0;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const uint4 v = x[2 * i];
      upper = dot(word_of(w.top, i + 1), v.z, v.w, dot(word_of(w.top, i), v.x, v.y, upper));
      lower = dot(word_of(w.bottom, i + 1), v.z, v.w, dot(word_of(w.bottom, i), v.x, v.y, lower));
    }
    return make_float2(static_cast<float>(upper) * (low_half(w.scales) * scale), static_cast<float>(lower) * (high_half(w.scales) * scale));
  }
};

struct Dp4aPrepared : Dp4a {
  static constexpr bool kPrepared = true;
};
// [/path]

}  // namespace lesson
}  // namespace nanoqwen

NANOQWEN_LESSON_PATH(lesson_dp4a, nanoqwen::lesson::Dp4aPrepared)
NANOQWEN_LESSON_PATH(lesson_dp4a_fused, nanoqwen::lesson::Dp4a)

// [quantise]
// The kernel that dp4a needs first: a warp a group, four warps a CTA.
extern "C" __global__ void __launch_bounds__(128) lesson_quantise(const u8* x, u8* records, int groups) {
  using namespace nanoqwen;
  allow_next_kernel();
  const int group = blockIdx.x * 4 + warp_id();
  wait_for_previous_kernel();
  if (group < groups) lesson::Dp4a::prepare(reinterpret_cast<const uint2*>(x)[group * kWarp + lane_id()], records + group * lesson::Dp4a::kRecord);
}
// [/quantise]
