// What becomes of a tile's sums. An Epilogue says which row tiles of 16 a warp takes, so that values that belong together meet in one thread.
//
//   row_tile(tiles, row, warpgroup, m, warp)  the 16-row tile of W that warp `warp` of a warpgroup holds as its m-th in an item of `tiles` row tiles
//                                      (the row-th of its kind); -1: none
//   finish<kN>(acc, place)             acc[m][4 j + 2 half + e] is row g + 8 half of row tile m, token 8 j + 2 t + e of the tile
//   kHold, stage, store                instead of finish: the result goes through shared memory (gemm_int4.cuh)
#pragma once

#include "gemm_int4.cuh"
#include "head.cuh"

namespace nanoqwen {

// 2^x, two units in the last place; subnormal results become zero.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Consecutive row tiles.
struct RowOrder {
  int rows;  // of the matrix

  __device__ __forceinline__ int row_tile(int tiles, int row, int warpgroup, int m, int warp) const {
    const int slot = warpgroup * 8 + m * 4 + warp, tile = row * tiles + slot;
    return slot < tiles && tile < rows / 16 ? tile : -1;
  }
};

// [parts]
// out[split][token][rows], FP32: the reader adds the splits in order and multiplies with the row factors.
struct PartsOut : RowOrder {
  static constexpr bool kHold = false;
  float* out;

  __device__ __forceinline__ PartsOut(int rows_, float* out_) : RowOrder{rows_}, out(out_) {}

  template <int kN>
  __device__ __forceinline__ void finish(const float (&acc)[2][kN / 2], const Place& p) const {
    const int rows = fresh(this->rows);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int tile = row_tile(p.tiles, p.row, p.warpgroup, m, p.warp);
      if (tile < 0) continue;
      float* column = out + (static_cast<size_t>(p.split) * p.limit + p.token + 2 * p.t) * rows + tile * 16 + p.g;
#pragma unroll
      for (int j = 0; j < kN / 8; ++j, column += 8 * rows)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (p.token + 8 * j + 2 * p.t + e < p.limit) {
            column[e * rows] = acc[m][4 * j + e] * p.undo;
            column[e * rows + 8] = acc[m][4 * j + 2 + e] * p.undo;
          }
    }
  }
};
// [/parts]

// [residual]
// residual[token][rows] += y. Every element belongs to one thread of one item (splits == 1).
struct ResidualOut : RowOrder {
  static constexpr bool kHold = false;
  float* residual;
  const float* factor;  // of the tokens' rows of X; null: all 1

  __device__ __forceinline__ ResidualOut(int rows_, float* residual_, const float* factor_) : RowOrder{rows_}, residual(residual_), factor(factor_) {}

  template <int kN>
  __device__ __forceinline__ void finish(const float (&acc)[2][kN / 2], const Place& p) const {
    const int rows = fresh(this->rows);
    constexpr int kBatch = kN / 8 % 2 == 0 ? 2 : 1;  // token octets in flight
    const int first = p.token + 2 * p.t;
#pragma unroll
    for (int j0 = 0; j0 < kN / 8; j0 += kBatch) {
      float old[2][4 * kBatch], f[2 * kBatch];
#pragma unroll
      for (int k = 0; k < 2 * kBatch; ++k) {
        const int token = first + 8 * (j0 + k / 2) + k % 2;
        f[k] = factor && token < p.limit ? factor[token] * p.undo : p.undo;
      }
#pragma unroll
      for (int pass = 0; pass < 2; ++pass)  // all loads of the batch, then all stores
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const int tile = row_tile(p.tiles, p.row, p.warpgroup, m, p.warp);
          float* column = residual + static_cast<size_t>(first + 8 * j0) * rows + tile * 16 + p.g;
#pragma unroll
          for (int k = 0; k < 2 * kBatch; ++k) {
            const int j = j0 + k / 2, e = k % 2;
            float* at = column + (8 * (k / 2) + e) * rows;
            if (tile >= 0 && first + 8 * j + e < p.limit) {
              if (pass == 0) {
                old[m][2 * k] = at[0], old[m][2 * k + 1] = at[8];
              } else {
                at[0] = old[m][2 * k] + acc[m][4 * j + e] * f[k];
                at[8] = old[m][2 * k + 1] + acc[m][4 * j + 2 + e] * f[k];
              }
            } else if (pass == 0) {
              old[m][2 * k] = old[m][2 * k + 1] = 0.0f;
            }
          }
        }
    }
  }
};
// [/residual]

// [qkv]
// Bias, RoPE, q as FP32 [token][heads][head_dim], k and v into their pages. RoPE pairs element i with i + head_dim / 2: row tile 0 of a warp is in
// the first half of a head and row tile 1 as far into the second.
struct QkvOut {
  static constexpr bool kHold = false;
  static constexpr int kHalfTiles = kHeadDim / 32, kItemHeads = 256 / kHeadDim;  // of 16 row tiles

  const float* factor;
  const u16 *q_bias, *k_bias, *v_bias;
  const float2* rope;
  int first_position;
  const int* block_table;
  u16 *keys, *values;
  float* q;

  __device__ __forceinline__ static int head(int row, int warpgroup, int warp) { return row * kItemHeads + warpgroup * (kItemHeads / 2) + warp / kHalfTiles; }

  __device__ __forceinline__ int row_tile(int, int row, int warpgroup, int m, int warp) const {
    const int h = head(row, warpgroup, warp);
    return h < kNumHeads + 2 * kNumKvHeads ? h * 2 * kHalfTiles + m * kHalfTiles + warp % kHalfTiles : -1;
  }

  template <int kN>
  __device__ __forceinline__ void finish(const float (&acc)[2][kN / 2], const Place& p) const {
    const Head head(QkvOut::head(p.row, p.warpgroup, p.warp));
    if (head.index >= kNumHeads + 2 * kNumKvHeads) return;
    constexpr int kHalf = kHeadDim / 2;
    const u16* bias = head.bias(q_bias, k_bias, v_bias);
    float bias_a[2], bias_b[2];
    const int i0 = p.warp % kHalfTiles * 16 + p.g;
#pragma unroll
    for (int r = 0; r < 2; ++r) bias_a[r] = half_to_float(bias[i0 + 8 * r]), bias_b[r] = half_to_float(bias[i0 + 8 * r + kHalf]);
#pragma unroll
    for (int j = 0; j < kN / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int token = p.token + 8 * j + 2 * p.t + e;
        if (token >= p.limit) continue;
        const int position = first_position + token;
        const float f = factor[token] * p.undo;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int i = i0 + 8 * r;
          float a = acc[0][4 * j + 2 * r + e] * f + bias_a[r], b = acc[1][4 * j + 2 * r + e] * f + bias_b[r];
          if (head.is_q || head.is_k) rotate(a, b, rope[static_cast<size_t>(position) * kHalf + i]);
          if (head.is_q) {
            float* out = q + (static_cast<size_t>(token) * kNumHeads + head.index) * kHeadDim;
            out[i] = a, out[i + kHalf] = b;
          } else {
            u16* pool = head.is_k ? keys : values;
            store_pair(pool + page_row(block_table[position / kPageTokens], head.kv_head(), position % kPageTokens), position, i, a, b);
          }
        }
      }
  }
};
// [/qkv]

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

  __device__ __forceinline__ int row_tile(int tiles, int row, int warpgroup, int m, int warp) const {
    const int slot = warpgroup * 4 + warp, tile = row * (tiles / 2) + slot;
    return slot < tiles / 2 && tile < kIntermediate / 16 ? tile + m * (kIntermediate / 16) : -1;
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
    const bool present = row_tile(p.tiles, p.row, p.warpgroup, 0, p.warp) >= 0;
    u32 at[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = x_position(p.warpgroup * 64 + p.warp * 16 + 8 * half + p.g / 2 * 2);
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
    const int tile = row_tile(p.tiles, p.row, p.warpgroup, 0, p.warp), token = p.token + 2 * p.t + p.g % 2;
    pairs<kN>(acc, p, [&](int j, int half, u32 pair) {
      const int position = x_position(tile * 16 + 8 * half + p.g / 2 * 2);
      if (tile >= 0 && token + 8 * j < p.limit)
        *reinterpret_cast<u32*>(out + static_cast<size_t>(position / kSlab) * tokens * kSlab + x_chunk(token + 8 * j, position % kSlab / 8) + position % 8) = pair;
    });
  }
};
// [/swiglu]

}  // namespace nanoqwen
