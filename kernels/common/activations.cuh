// Activations as fixed-point digits: what the INT4 GEMV multiplies with.
//
// A group of kGroup activations becomes 16-bit integers q = round(x / s), |q| <= 32512, with one FP32 scale
// s = absmax / 32512, and each q two signed bytes, q = 256 * high + low. Tensor cores multiply bytes with 4-bit
// weights exactly and add in 32-bit integers exactly, so the only error is the rounding of x: at most
// absmax / 65024, eight times finer than FP16 rounds the largest element, and no magnitude overflows.
// 32512 = 127 * 256 is the largest |q| whose high byte still fits after low has been rounded to [-128, 127].
//
// Layout of one vector, in the order in which lane t of a quad (kernels/common/stream_gemv.cuh) consumes it:
//
//   record[group]:  [high = 0, low = 1][t = 0..3][word = 0..kLaneWords-1][8 bytes]     kLaneWords = kGroup / 32
//                   then the group's scale (FP32) and 12 bytes of padding: kRecordBytes in all, a multiple of 16
//
// The 8 bytes belong to the 8 weights of one ValueShuffle word: first the low nibbles' weights 0, 4, 1, 5, then
// the high nibbles' 2, 6, 3, 7 (the byte order in which `word << 4` and `word` show them under 0xF0F0F0F0).
#pragma once

#include "constants.cuh"
#include "ptx.cuh"

namespace nanoqwen {

constexpr int kDigitMax = 127 * 256;
constexpr int kLaneWords = kGroup / 32;  // ValueShuffle words a lane owns of one row of one group
constexpr int kRecordBytes = 2 * kGroup + 16;

// What a lane writes of 128 quantised values: eight bytes of a word (the high digits of an even lane's and the next lane's values, or the low ones), and the
// group's scale.
struct LaneDigits {
  uint2 bytes;
  float scale;
};

// Quantise 128 consecutive values, 4 a lane: x[0..3] are elements 4 * lane .. + 3. All 32 lanes must call it; where there is nothing they bring zeros.
// The scale has the 1/16 that undoes the weights' position in the byte. NaN or infinity in a group makes its scale NaN, so that it cannot vanish on the way.
__device__ __forceinline__ LaneDigits lane_digits(const float (&x)[4]) {
  float largest = 0.0f;
  bool finite = true;
  for (int i = 0; i < 4; ++i) {
    const float magnitude = fabsf(x[i]);
    finite = finite && is_finite(magnitude);
    largest = fmaxf(largest, magnitude);
  }
  // A group is kGroup / 4 neighbouring lanes.
  int bad = !finite;
  for (int step = kGroup / 8; step > 0; step /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, step));
    bad |= __shfl_xor_sync(kFullMask, bad, step);
  }
  const float inverse = largest > 0.0f ? kDigitMax / largest : 0.0f;

  // My four digits, the high bytes and the low bytes each packed in element order.
  u32 high = 0, low = 0;
  for (int i = 0; i < 4; ++i) {
    const int q = __float2int_rn(x[i] * inverse);
    const int below = static_cast<signed char>(q & 0xFF);
    low |= static_cast<u32>(below & 0xFF) << (8 * i);
    high |= static_cast<u32>(((q - below) >> 8) & 0xFF) << (8 * i);
  }
  // An even lane has elements 0..3 of a word and an odd one 4..7. The even lane writes the word's high bytes and
  // the odd one its low bytes, so each sends the half that the other writes.
  const bool odd = lane_id() & 1;
  const u32 received = __shfl_xor_sync(kFullMask, odd ? high : low, 1);
  const u32 front = odd ? received : high;  // elements 0..3
  const u32 back = odd ? low : received;    // elements 4..7
  return {make_uint2(__byte_perm(front, back, 0x5140), __byte_perm(front, back, 0x7362)),  // 0, 4, 1, 5 and 2, 6, 3, 7
          bad ? not_a_number() : largest * (1.0f / (16.0f * kDigitMax))};
}

// 128 values of a vector from element `first` on, into their records. A lane past the end of the vector passes `valid` = false.
__device__ __forceinline__ void write_digits(const float (&x)[4], int first, bool valid, u8* records) {
  const float there[4] = {valid ? x[0] : 0.0f, valid ? x[1] : 0.0f, valid ? x[2] : 0.0f, valid ? x[3] : 0.0f};
  const LaneDigits mine = lane_digits(there);
  if (!valid) return;
  const int element = first + 4 * lane_id(), group = element / kGroup, within = element % kGroup;
  u8* record = records + group * kRecordBytes;
  *reinterpret_cast<uint2*>(record + (lane_id() & 1 ? kGroup : 0) + within / 8 * 8) = mine.bytes;
  if (within == 0) *reinterpret_cast<float*>(record + 2 * kGroup) = mine.scale;
}

}  // namespace nanoqwen
