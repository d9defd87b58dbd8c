// Blocks of weights in a warp's registers, and their products with x: INT4 by itself, two of INT4 with an x that stays in registers, and the FP16 head.
#pragma once

#include "digits.cuh"
#include "int4_block.cuh"
#include "int4_unpack.cuh"
#include "matrix.cuh"
#include "plan.cuh"

namespace nanoqwen {

template <int kWords> struct LaneVector;
template <> struct LaneVector<4> { using type = uint4; };
template <> struct LaneVector<2> { using type = uint2; };
template <> struct LaneVector<1> { using type = u32; };

__device__ __forceinline__ u32 first_word(u32 v) { return v; }
template <class Vector> __device__ __forceinline__ u32 first_word(const Vector& v) { return v.x; }

// 16 rows x one group of INT4 (int4_block.cuh has the layout). `Own` is x of a block in registers.
struct WeightBlock {
  using Vector = typename LaneVector<kLaneWords>::type;
  struct Own {
    alignas(16) u32 digits[2 * kLaneWords];
    float scale;
  };
  static constexpr int kRecord = kRecordBytes;

  Vector top, bottom;
  u32 scales;

  __device__ __forceinline__ void load(const u8* unit, int j) {
    const Vector* mine = reinterpret_cast<const Vector*>(unit + Int4Block::codes(j)) + lane_id();
    top = mine[0], bottom = mine[32];
    scales = *reinterpret_cast<const u32*>(unit + Int4Block::scales(j) + lane_id() / 4 * 4);
  }
  // Made from all that `load` loads: it is not there before they are.
  __device__ __forceinline__ u32 loaded() const { return first_word(top) | first_word(bottom) | scales; }
  __device__ __forceinline__ static Own own(const u8* record) {
    const int g = lane_id() / 4, t = lane_id() % 4;
    const u8* x = record + (g & 1) * kLowAt + t * 8 * kLaneWords;
    Own o;
    using Piece = typename LaneVector<kLaneWords == 1 ? 2 : 4>::type;  // 16 bytes at a time, 8 if there are no more
#pragma unroll
    for (int i = 0; i < 2 * kLaneWords * 4 / static_cast<int>(sizeof(Piece)); ++i)
      *reinterpret_cast<Piece*>(&o.digits[i * sizeof(Piece) / 4]) = reinterpret_cast<const Piece*>(x)[i];
    o.scale = *reinterpret_cast<const float*>(record + kScaleAt);
    return o;
  }
  __device__ __forceinline__ float2 multiply(const Own& x) const {
    const u32* words_top = reinterpret_cast<const u32*>(&top);
    const u32* words_bottom = reinterpret_cast<const u32*>(&bottom);
    int sums[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kLaneWords; ++i) {
      u32 a[2], b[2];
      int4::unpack_bytes(words_top[i], a);
      int4::unpack_bytes(words_bottom[i], b);
      mma_s8(sums, a[0], b[0], a[1], b[1], x.digits[2 * i], x.digits[2 * i + 1]);
    }
    return make_float2(static_cast<float>(sums[0] * 256 + sums[1]) * (low_half(scales) * x.scale),
                       static_cast<float>(sums[2] * 256 + sums[3]) * (high_half(scales) * x.scale));
  }
};

// Two such blocks times two slices of x that stay in registers (kOwnX), in fewer instructions.
//
// A tensor-core instruction multiplies with eight columns, and x has two: its high and its low digits. WeightBlock fills all eight with these, so the four lanes of a quad find
// the same sums and scale them four times. Here each lane's pair of columns holds a quarter of x and zeros, and what the lane finds are the sums of its quarter, which no other lane
// scales. The quad is added up when the row tile ends (leave_pair). Quarter q is of block q / 2: the low nibbles of all words if q is even, else the high ones.
// As each kind of nibble has sums of its own, low ones need not be shifted up to where the high ones are. They stay where they are, as code + 8, one instruction for eight
// of them, and `start` takes the eights off again.
struct OwnBlocks {
  struct Own {
    alignas(16) u32 digits[2 * kLaneWords];  // of the quarter that this lane's column holds; zeros for the other kind of nibble
    int start[4];                            // -8 * the sum of the low nibbles' digits
    float scale;                             // of the quarter whose sums this lane finds
  };
  static constexpr bool kQuadAdds = true;

  WeightBlock::Vector top[2], bottom[2];
  u32 scales;  // of the block whose sums this lane finds

  __device__ __forceinline__ static u32 quarter_of_column() { return lane_id() / 8; }
  __device__ __forceinline__ static u32 quarter_of_sums() { return lane_id() % 4; }

  struct Mine {  // bytes from a unit's first to what this lane loads
    int codes_at, scales_at;
  };
  __device__ __forceinline__ static Mine mine(int half) {
    Mine m{Int4Block::codes(2 * half) + static_cast<int>(lane_id() * sizeof(WeightBlock::Vector)), Int4Block::scales(2 * half + quarter_of_sums() / 2) + static_cast<int>(lane_id() / 4 * 4)};
    keep_opaque(m.codes_at), keep_opaque(m.scales_at);  // a sum each: its parts would be added again at every unit
    return m;
  }
  __device__ __forceinline__ void load(const u8* unit, const Mine& mine) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const WeightBlock::Vector* codes = reinterpret_cast<const WeightBlock::Vector*>(unit + mine.codes_at + Int4Block::codes(j));
      top[j] = codes[0], bottom[j] = codes[32];
    }
    scales = *reinterpret_cast<const u32*>(unit + mine.scales_at);
  }
  __device__ __forceinline__ u32 loaded() const { return first_word(top[0]) | first_word(bottom[0]) | first_word(top[1]) | first_word(bottom[1]) | scales; }

  // From the records of both slices, one behind the other.
  __device__ __forceinline__ static Own own(const u8* records) {
    const WeightBlock::Own x = WeightBlock::own(records + quarter_of_column() / 2 * kRecordBytes);
    const u32 high = 0u - quarter_of_column() % 2;
    Own o = {};
    int more[4] = {};  // two chains of products: half as long to wait for
#pragma unroll
    for (int i = 0; i < kLaneWords; ++i) {
      o.digits[2 * i] = x.digits[2 * i] & ~high, o.digits[2 * i + 1] = x.digits[2 * i + 1] & high;
      mma_s8(i % 2 ? more : o.start, 0xF8F8F8F8, 0xF8F8F8F8, 0, 0, o.digits[2 * i], o.digits[2 * i + 1]);  // -8 in each byte of the low nibbles' columns
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) o.start[i] += more[i];
    // A record's scale is for weights times 16.
    o.scale = *reinterpret_cast<const float*>(records + quarter_of_sums() / 2 * kRecordBytes + kScaleAt) * (quarter_of_sums() % 2 ? 1.0f : 16.0f);
    return o;
  }

  __device__ __forceinline__ float2 multiply(const Own& x) const {
    int sums[2][4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const u32* words_top = reinterpret_cast<const u32*>(&top[j]);
      const u32* words_bottom = reinterpret_cast<const u32*>(&bottom[j]);
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[j][i] = x.start[i];
#pragma unroll
      for (int i = 0; i < kLaneWords; ++i)
        mma_s8(sums[j], low_nibbles(words_top[i]), low_nibbles(words_bottom[i]), high_nibbles(words_top[i]), high_nibbles(words_bottom[i]), x.digits[2 * i], x.digits[2 * i + 1]);
    }
    int first = sums[0][0] * 256 + sums[0][1], second = sums[0][2] * 256 + sums[0][3];
    if (quarter_of_sums() / 2) first = sums[1][0] * 256 + sums[1][1], second = sums[1][2] * 256 + sums[1][3];
    return make_float2(static_cast<float>(first) * (low_half(scales) * x.scale), static_cast<float>(second) * (high_half(scales) * x.scale));
  }
  __device__ __forceinline__ static u32 low_nibbles(u32 word) { return int4::and_xor(word, 0x0F0F0F0F, 0x08080808); }
  __device__ __forceinline__ static u32 high_nibbles(u32 word) { return word & 0xF0F0F0F0; }
};

// 16 rows x 32 columns of the FP16 head (lm_head.cu).
struct HeadBlock {
  struct Own {
    uint4 halves;
  };
  static constexpr int kRecord = 128;

  uint4 top, bottom;

  __device__ __forceinline__ void load(const u8* unit, int j) {
    const uint4* mine = reinterpret_cast<const uint4*>(unit + j * 1024) + lane_id();
    top = mine[0], bottom = mine[32];
  }
  __device__ __forceinline__ u32 loaded() const { return first_word(top) | first_word(bottom); }
  __device__ __forceinline__ static Own own(const u8* record) {
    return {*reinterpret_cast<const uint4*>(record + (lane_id() / 4 & 1) * 64 + lane_id() % 4 * 16)};
  }
  __device__ __forceinline__ float2 multiply(const Own& x) const {
    float sums[4] = {0, 0, 0, 0};
    mma_f16(sums, top.x, bottom.x, top.y, bottom.y, x.halves.x, x.halves.y);
    mma_f16(sums, top.z, bottom.z, top.w, bottom.w, x.halves.z, x.halves.w);
    return make_float2(sums[0] + sums[1], sums[2] + sums[3]);
  }
};

// Two blocks, each by itself.
template <class Block>
struct Both {
  static constexpr bool kQuadAdds = false;  // the four lanes of a quad have the same sums

  Block block[2];

  struct Mine {
    int half;
  };
  __device__ __forceinline__ static Mine mine(int half) { return {half}; }
  __device__ __forceinline__ void load(const u8* unit, const Mine& mine) {
#pragma unroll
    for (int j = 0; j < 2; ++j) block[j].load(unit, 2 * mine.half + j);
  }
  __device__ __forceinline__ u32 loaded() const { return block[0].loaded() | block[1].loaded(); }
  // Block j, with the record of its slice.
  __device__ __forceinline__ float2 multiply(int j, const u8* records, int slice) const { return block[j].multiply(Block::own(records + slice * Block::kRecord)); }
};

// Of the matrices whose x may stay in registers: q/k/v, o, gate and up.
template <bool kOwn> struct BlocksOf { using type = Both<WeightBlock>; };
template <> struct BlocksOf<true> { using type = OwnBlocks; };

// A warp's share of one unit, in registers. With kRelease kBehind: where it came from, if that place is not given back yet.
template <class Blocks>
struct Held {
  Blocks blocks;
  Place from;
};

// The first units of a stage, which wait in registers for their x, and where the next one lies.
template <class Blocks, int kHeld = kHold>
struct Stock {
  Held<Blocks> held[kHeld];
  Place next;
  typename Blocks::Mine mine;  // where in a unit this lane loads
};

}  // namespace nanoqwen
