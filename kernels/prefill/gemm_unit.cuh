// What the matrix products of prefill are made of: waiting, operands, and how INT4 codes become FP16 fragments (gemm_int4.cuh multiplies them).
#pragma once

#include "constants.cuh"
#include "gemm_work.cuh"
#include "int4_block.cuh"
#include "int4_unpack.cuh"
#include "mbarrier.cuh"
#include "ptx.cuh"

namespace nanoqwen {

constexpr int kGroupSteps = kGroup / 32;  // word steps a group
constexpr u64 kPatience = 2000000000;     // ns; a barrier that is waited for longer is a bug: stop the kernel instead of the card

__device__ __forceinline__ u64 now_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)::"memory");
  return t;
}

__device__ __forceinline__ bool barrier_done(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;}\n" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}

__device__ __forceinline__ void patient_wait(u32 barrier, u32 parity) {
  if (barrier_done(barrier, parity)) return;
  const u64 start = now_ns();
  while (!barrier_done(barrier, parity))
    if (now_ns() - start > kPatience) asm volatile("trap;");
}

// As many arrivals at once.
__device__ __forceinline__ void arrive_all(u32 barrier, u32 count) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory"); }

// Tests compile with NANOQWEN_DELAYS: every role then stops now and then, for up to 8 us, in front of what others wait for. The result must be the same
// bits. All lanes of the caller.
#ifdef NANOQWEN_DELAYS
__device__ __forceinline__ void dawdle(u32 place) {
  u32 clock;
  asm volatile("mov.u32 %0, %clock;" : "=r"(clock)::"memory");
  const u32 draw = ((clock >> 4) * 2654435761u) ^ ((place * 64 + warp_id() + 977 * blockIdx.x) * 2246822519u);
  if ((draw >> 20) % 8 == 0) asm volatile("nanosleep.u32 %0;" ::"r"(draw % 8192));
}
#else
__device__ __forceinline__ void dawdle(u32) {}
#endif

// The weights and X of a launch.
struct Operands {
  const u8* blocks;
  const u16* x;
  int tokens;       // rows of a slab of x
  u32 up_a, up_b;   // half2: powers of two whose product brings the scales up
  float undo;       // 2^24 over that product
};

// Where a thread's results belong: acc[m][4 j + 2 half + e] is row g + 8 half of the m-th row tile of warp pair `pair`, token 8 j + 2 t + e of the tile.
struct Place {
  int pair, g, t, token, limit, slot, row, tiles;  // token: the tile's first; limit: tokens of the chunk
  float undo;
};

extern __shared__ __align__(1024) u8 gemm_shared[];

template <int kWords> struct Words;
template <> struct Words<4> { using type = uint4; };
template <> struct Words<2> { using type = uint2; };
template <> struct Words<1> { using type = u32; };

__device__ __forceinline__ u32 hmul2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// [unpack]
// A lane's weights of one unit: rows g and g + 8 of two row tiles.
struct Unit {
  using Vector = typename Words<kGroupSteps>::type;
  Vector words[2][2][kUnitGroups];  // [row tile][row g, row g + 8][group]
  u32 raw[2][kUnitGroups];          // scales, row g in the low half
  u32 scale[2][2], sixteenth[2][2], offset[2][2];  // of the group in work, in both halves

  // The second row tile lies `apart` bytes after the first; `present` groups of the unit exist.
  __device__ __forceinline__ void load(const u8* slots, int apart, int first_block, int present) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int group = 0; group < kUnitGroups; ++group) {
        const u8* slot = slots + m * apart;
        const Vector* codes = reinterpret_cast<const Vector*>(slot + Int4Block::codes(first_block + group)) + lane_id();
        words[m][0][group] = codes[0];
        words[m][1][group] = codes[kWarp];
        const u32 scales = *reinterpret_cast<const u32*>(slot + Int4Block::scales(first_block + group) + lane_id() / 4 * 4);
        raw[m][group] = kUnitGroups == 1 || group < present ? scales : 0;  // K's padding: weights of zero, whatever bytes lie there
      }
  }

  // Fragments of word step i: [product][row tile][register]. Two ways to the same bits. With kRoomy a pair that lies four bits higher stays there and is
  // multiplied with a sixteenth of the scale: 9 instructions for eight weights, and four registers. Else it is shifted: 11.
  template <bool kRoomy>
  __device__ __forceinline__ void unpack(int i, u32 (&a)[2][2][4], u32 up_a, u32 up_b) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      if (i % kGroupSteps == 0) {
        const u32 both = hmul2(hmul2(raw[m][i / kGroupSteps], up_a), up_b);
        scale[m][0] = int4::prmt(both, both, 0x1010);
        scale[m][1] = int4::prmt(both, both, 0x3232);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          sixteenth[m][r] = hmul2(scale[m][r], 0x2C002C00u);  // 1/16
          offset[m][r] = hmul2(scale[m][r], 0x80088008u);     // -8 * 2^-24
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const u32 word = reinterpret_cast<const u32*>(&words[m][r][i / kGroupSteps])[i % kGroupSteps];
        u32 bits[4];
        if constexpr (kRoomy) int4::unpack_subnormal(word, bits);
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          if constexpr (!kRoomy) bits[pair] = int4::and_xor(word >> 4 * pair, 0x000F000Fu, 0x00080008u);
          a[pair / 2][m][pair % 2 * 2 + r] = int4::hfma2(bits[pair], kRoomy && pair % 2 ? sixteenth[m][r] : scale[m][r], offset[m][r]);
        }
      }
    }
  }
};
// [/unpack]

// The same value, but the compiler does not know it: what follows from it is computed here and not kept in registers over the main loop, where
// they are scarce.
__device__ __forceinline__ int fresh(int value) {
  asm volatile("" : "+r"(value)::"memory");
  return value;
}

// The narrowest of some widths that holds what is left of a tile.
template <int... kWidths>
__device__ __forceinline__ int fitting_width(int width, int left) {
  int fitting = 0;
  const auto consider = [&](int w) { fitting = fitting == 0 && w >= min(width, left) ? w : fitting; };
  (consider(kWidths), ...);
  return fitting;
}

}  // namespace nanoqwen
