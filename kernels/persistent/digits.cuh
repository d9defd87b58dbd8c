// Activations as fixed-point digits, as in kernels/common/activations.cuh, in fewer instructions and another order.
//
// Every CTA quantises the MLP's whole inner vector in every layer: 148 groups for the 7B. At about 110 instructions a lane and group, as
// write_digits takes, that alone is 2.3 us; here it is about 45.
//   maximum     one redux over the magnitudes' bits: for numbers without a sign the order of bits is the order of values, NaN on top
//   rounding    fma(x, inverse, 1.5 * 2^23) leaves round(x * inverse) in the low bits of its result: no conversion instruction
//   high byte   that of q + 128
// Record, kRecordBytes in all: [high digits, kGroup bytes][scale, FP32][12 bytes of padding][low digits, kGroup bytes]. The padding moves
// the low digits by four banks: the 16-byte loads of a quad pair's high and low digits then touch all banks once.
#pragma once

#include "activations.cuh"
#include "grid.cuh"

namespace nanoqwen {

constexpr int kScaleAt = kGroup, kLowAt = kGroup + 16;

// Over the kGroup / 4 neighbouring lanes of a group.
__device__ __forceinline__ u32 group_max(u32 v) {
  if constexpr (kGroup == 128) {
    return warp_max_bits(v);
  } else {
#pragma unroll
    for (int step = kGroup / 8; step > 0; step /= 2) v = max(v, __shfl_xor_sync(kFullMask, v, step));
    return v;
  }
}

// 128 consecutive values from `first` on, a multiple of 128; 4 a lane: x[0..3] are elements first + 4 * lane .. + 3. All lanes call it; lanes past the vector's end, where
// `inside` is false, bring zeros. NaN or infinity makes the group's scale NaN.
__device__ __forceinline__ void put_digits(const float (&x)[4], int first, bool inside, u8* records) {
  const float mine = max_or_nan(max_or_nan(fabsf(x[0]), fabsf(x[1])), max_or_nan(fabsf(x[2]), fabsf(x[3])));
  const float largest = __uint_as_float(group_max(__float_as_uint(mine)));
  const float inverse = largest > 1e-30f ? kDigitMax * reciprocal(largest) : 0.0f;
  constexpr float kMagic = 12582912.0f;
  u32 q[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) q[i] = __float_as_uint(fmaf(x[i], inverse, kMagic));
  const u32 low = __byte_perm(__byte_perm(q[0], q[1], 0x0040), __byte_perm(q[2], q[3], 0x0040), 0x5410);
  const u32 high = __byte_perm(__byte_perm(q[0] + 128, q[1] + 128, 0x0051), __byte_perm(q[2] + 128, q[3] + 128, 0x0051), 0x5410);
  // An even lane has elements 0..3 of a word and writes its high bytes, an odd one 4..7 and the low bytes (activations.cuh).
  const bool odd = lane_id() & 1;
  const u32 received = __shfl_xor_sync(kFullMask, odd ? high : low, 1);
  const u32 front = odd ? received : high, back = odd ? low : received;
  static_assert(128 % kGroup == 0, "a lane's place in its group does not depend on `first`");
  const u32 within = 4 * lane_id() % kGroup;
  u8* record = records + (static_cast<u32>(first) / kGroup + 4 * lane_id() / kGroup) * kRecordBytes;
  if (inside) {
    *reinterpret_cast<uint2*>(record + (odd ? kLowAt : 0) + within / 8 * 8) = make_uint2(__byte_perm(front, back, 0x5140), __byte_perm(front, back, 0x7362));
    if (within == 0) *reinterpret_cast<float*>(record + kScaleAt) = is_finite(largest) ? largest * (1.0f / (16.0f * kDigitMax)) : not_a_number();
  }
}

}  // namespace nanoqwen
