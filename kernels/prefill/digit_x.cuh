// The order in which a prefill activation of up to 16 tokens lies in memory as digits (activations.cuh): as gemm_digits.cuh multiplies them.
//
//   x[unit of K][tile][kDigitTile]   a tile is four tokens: 1024 bytes of digits, then a scale a group and token. An m16n8k32 has eight columns, the high and the low
//                                    digits of the four. Tiles of a launch: its width over four.
//
//   digits   [half][lane = 4 (2 p + digit) + t][16]: lane t of a quad multiplies with words 2 half and 2 half + 1 of its words of the unit, 8 bytes each in the order of a
//            ValueShuffle word; digit 0 is the high one. A lane's 16 bytes are one load.
//   scales   [group of the unit][p] FP32, with the 1/16 that undoes the weights' position in the byte.
//   p        of a tile's tokens is the p-th token 8 (tile / 2) + 2 p + tile % 2: a lane's sums are then where FP16 products have theirs (gemm_epilogues.cuh).
//
// Columns behind the matrix and tokens behind the last may have any digits. Scales of the columns must be finite: the weights there count as zero. What comes of the
// tokens is not stored.
#pragma once

#include "activations.cuh"
#include "tiled_x.cuh"

namespace nanoqwen {

constexpr int kTileTokens = 4, kTileDigits = 2 * kUnit * kTileTokens, kDigitTile = kTileDigits + 4 * kTileTokens * (kUnit / kGroup);

// A unit of a token, 4 columns a lane: x[0..3] are columns 4 * lane .. + 3. `unit` is where the unit's tiles lie. All lanes.
__device__ __forceinline__ void write_digit_unit(const float (&x)[4], int token, u8* unit) {
  const LaneDigits mine = lane_digits(x);
  const int column = 4 * static_cast<int>(lane_id()), group = column / kGroup, within = column % kGroup;
  const int t = within / (kGroup / 4), word = group * kLaneWords + within % (kGroup / 4) / 8, p = token % 8 / 2, digit = lane_id() & 1;
  u8* const tile = unit + (token / 8 * 2 + token % 2) * kDigitTile;
  *reinterpret_cast<uint2*>(tile + word / 2 * 512 + (4 * (2 * p + digit) + t) * 16 + word % 2 * 8) = mine.bytes;
  if (within == 0) *reinterpret_cast<float*>(tile + kTileDigits + 4 * (kTileTokens * group + p)) = mine.scale;
}

}  // namespace nanoqwen
