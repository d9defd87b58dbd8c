// What becomes of a tile's sums. An Epilogue says which row tiles of 16 a warp takes, so that values that belong together meet in one thread.
//
//   row_tile(tiles, row, pair, m)  the 16-row tile of W that the pair-th warp holds as its m-th in the row-th item of `tiles` row tiles; -1: none
//   finish<kN>(acc, place)         acc[m][4 j + 2 half + e] is row g + 8 half of row tile m, token 8 j + 2 t + e of the tile
//   kHold, stage, store            instead of finish: the result goes through shared memory (gemm_int4.cuh)
#pragma once

#include "gemm_unit.cuh"
#include "wgmma.cuh"

namespace nanoqwen {

// 2^x, two units in the last place; subnormal results become zero.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// [parts]
// Consecutive row tiles. FP32 sums as gemm_work.cuh lays parts out, without the row factors: one 128-byte line for each token of a warp.
struct PartsOut {
  static constexpr bool kHold = false;
  int rows;  // of the matrix, a multiple of 32
  float* out;

  __device__ __forceinline__ int row_tile(int tiles, int row, int pair, int m) const {
    const int slot = 2 * pair + m, tile = row * tiles + slot;
    return slot < tiles && tile < rows / 16 ? tile : -1;
  }

  template <int kN>
  __device__ __forceinline__ void finish(const float (&acc)[2][kN / 2], const Place& p) const {
    const int tile = row_tile(p.tiles, p.row, p.pair, 0), first = p.token + 2 * p.t, rows = fresh(this->rows);
    if (tile < 0) return;
    float* column = out + (static_cast<size_t>(p.slot) * p.limit + first) * rows + tile * 16 + 4 * p.g;
#pragma unroll
    for (int j = 0; j < kN / 8; ++j, column += 8 * rows)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (first + 8 * j + e < p.limit)
          *reinterpret_cast<float4*>(column + e * rows) =
              make_float4(acc[0][4 * j + e] * p.undo, acc[0][4 * j + 2 + e] * p.undo, acc[1][4 * j + e] * p.undo, acc[1][4 * j + 2 + e] * p.undo);
  }
};
// [/parts]

// [swiglu]
// silu(gate) * up, FP16, as the X of the down projection. Row tile 0 of a warp is of the gate and row tile 1 the same rows of up, so an item of 16 row
// tiles makes 128 columns of that X for its tokens.
//
// FP16 cannot overflow: |silu(g) u| <= |g| |u| <= |w_gate|_2 |w_up|_2 |x|_2^2, and `inner` is that bound for a token over 32768 (the norm before
// writes it, with the largest row norms of the two matrices). The bound is loose by a few hundred; FP16 has thirty binades.
struct SwigluValues {
  const float* factor;  // of X
  const float* inner;   // of the result
  u16* out;             // [intermediate padded to 128 / 64][tokens][64]
  int tokens;

  __device__ __forceinline__ int row_tile(int tiles, int row, int pair, int m) const {
    const int tile = row * (tiles / 2) + pair;
    return pair < tiles / 2 && tile < kIntermediate / 16 ? tile + m * (kIntermediate / 16) : -1;
  }

  // Two neighbouring columns (rows r, r + 1 of W, r even) of one token: an even row's lane and the next row's exchange one token each. `use(j, half,
  // pair)` gets them for rows 8 half + g / 2 * 2 .. of the warp and token 8 j + 2 t + g % 2 of the tile. All lanes.
  template <int kN, class Use>
  __device__ __forceinline__ void pairs(const float (&acc)[2][kN / 2], const Place& p, const Use& use) const {
    const int odd = p.g & 1;
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      float f[2], up_f[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int token = min(p.token + 8 * j + 2 * p.t + e, p.limit - 1);
        f[e] = factor[token] * p.undo;
        up_f[e] = __fdividef(f[e], inner[token]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float y[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float gate = acc[0][4 * j + 2 * half + e] * f[e], up = acc[1][4 * j + 2 * half + e] * up_f[e];
          y[e] = __fdividef(gate, 1.0f + power_of_two(gate * -1.4426950408889634f)) * up;
        }
        const float received = __shfl_xor_sync(kFullMask, odd ? y[0] : y[1], 4);
        use(j, half, odd ? pack_half2(received, y[1]) : pack_half2(y[0], received));
      }
    }
  }
};

// 16 row tiles: two slabs, built where the tile's last two slabs of X lay.
struct SwigluOut : SwigluValues {
  static constexpr bool kHold = true;

  template <int kN>
  __device__ __forceinline__ void stage(const float (&acc)[2][kN / 2], const Place& p, uint2 held) const {
    const bool present = row_tile(p.tiles, p.row, p.pair, 0) >= 0;
    u32 at[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = x_position(p.pair * 16 + 8 * half + p.g / 2 * 2);
      at[half] = (position / kSlab ? held.y : held.x) + 2 * (x_chunk(2 * p.t + p.g % 2, position % kSlab / 8) + position % 8);
    }
    pairs<kN>(acc, p, [&](int j, int half, u32 pair) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at[half] + j * 1024), "r"(present ? pair : 0) : "memory"); });
  }

  // One thread.
  __device__ __forceinline__ void store(int row, int token, int count, u32 first, u32 second) const {
    u16* to = out + (static_cast<size_t>(2 * row) * tokens + token) * kSlab;
    bulk_store(to, first, count * 2 * kSlab);
    bulk_store(to + static_cast<size_t>(tokens) * kSlab, second, count * 2 * kSlab);
  }
};

// Any number of row tiles, a few tokens: four bytes at a time. Columns behind the matrix are not written: they hold zeros from the start.
struct SwigluDirect : SwigluValues {
  static constexpr bool kHold = false;

  template <int kN>
  __device__ __forceinline__ void finish(const float (&acc)[2][kN / 2], const Place& p) const {
    const int tile = row_tile(p.tiles, p.row, p.pair, 0), token = p.token + 2 * p.t + p.g % 2;
    pairs<kN>(acc, p, [&](int j, int half, u32 pair) {
      const int position = x_position(tile * 16 + 8 * half + p.g / 2 * 2);
      if (tile >= 0 && token + 8 * j < p.limit)
        *reinterpret_cast<u32*>(out + static_cast<size_t>(position / kSlab) * tokens * kSlab + x_chunk(token + 8 * j, position % kSlab / 8) + position % 8) = pair;
    });
  }
};
// [/swiglu]

}  // namespace nanoqwen
