// rows_tiled: what stands between the matrix products of prefill; X leaves in the tiled order (tiled_x.cuh).
//
// norm_rows_tiled    residual += parts of the product before (if any) * its factor; y = RMSNorm(residual) * weight; FP16 y / factor as X; factor;
//                    with `inner`, also the bound that scales the SwiGLU result of each token (SwigluOut).
// rope_append_parts  q, k, v of a product that came in parts: sum, factor, bias, RoPE, pages (rope_append_rows.cu reads one part).
// projection_bound   once, when the weights are uploaded: the largest row norm of a matrix's rows [first, first + rows).
// tile_rows          FP16 rows as X. For tests.
// Launch     a CTA a token (256 threads); rope_append_parts (heads, n) of 32; projection_bound a warp a 16-row tile.
#include "constants.cuh"
#include "gemm_int4.cuh"
#include "head.cuh"
#include "row_scale.cuh"

namespace nanoqwen {

constexpr int kRowCtaThreads = 256, kPieces = (kHidden / 4 + kRowCtaThreads - 1) / kRowCtaThreads;
constexpr int kPaddedHidden = (kHidden + kUnit - 1) / kUnit * kUnit;
static_assert(kHidden % 4 == 0, "four values at a time");

// Chunks of 16 bytes of a permuted row in shared memory to their places in X.
__device__ __forceinline__ void write_x(const u16* permuted, int columns, u16* x, int tokens, int token) {
  for (int c = threadIdx.x; c < columns / 8; c += kRowCtaThreads)
    *reinterpret_cast<uint4*>(x + static_cast<size_t>(c / 8) * tokens * kSlab + x_chunk(token, c % 8)) = reinterpret_cast<const uint4*>(permuted)[c];
}

}  // namespace nanoqwen

using namespace nanoqwen;

// parts FP32 [splits][n][hidden] or null; x [hidden padded / 64][tokens][64]; inner null or FP32 [n] with `bound`, the product of the largest row norms
// of gate and up.
extern "C" __global__ void __launch_bounds__(kRowCtaThreads)
norm_rows_tiled(float* residual, const float* parts, int splits, const float* parts_factor, const u16* weight, u16* x, int tokens, float* factor, float bound, float* inner) {
  __shared__ __align__(16) u16 permuted[kPaddedHidden];
  const int token = blockIdx.x, n = gridDim.x;
  allow_next_kernel();
  uint2 gain[kPieces];
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int i = 4 * (threadIdx.x + p * kRowCtaThreads);
    gain[p] = i < kHidden ? *reinterpret_cast<const uint2*>(weight + i) : make_uint2(0, 0);
  }
  wait_for_previous_kernel();
  float4* row = reinterpret_cast<float4*>(residual + static_cast<size_t>(token) * kHidden);
  const float f_in = parts_factor ? parts_factor[token] : 1.0f;
  float4 v[kPieces];
  float squares = 0.0f, largest = 0.0f;
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int i = threadIdx.x + p * kRowCtaThreads;
    v[p] = make_float4(0, 0, 0, 0);
    if (4 * i < kHidden) {
      v[p] = row[i];
      if (parts) {
        float4 sum = make_float4(0, 0, 0, 0);
        const float4* part = reinterpret_cast<const float4*>(parts + static_cast<size_t>(token) * kHidden) + i;
#pragma unroll 4
        for (int s = 0; s < splits; ++s, part += static_cast<size_t>(n) * (kHidden / 4)) {
          const float4 more = *part;
          sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
        }
        v[p] = make_float4(v[p].x + sum.x * f_in, v[p].y + sum.y * f_in, v[p].z + sum.z * f_in, v[p].w + sum.w * f_in);
        row[i] = v[p];
      }
    }
    squares += v[p].x * v[p].x + v[p].y * v[p].y + v[p].z * v[p].z + v[p].w * v[p].w;
    v[p] = make_float4(v[p].x * low_half(gain[p].x), v[p].y * high_half(gain[p].x), v[p].z * low_half(gain[p].y), v[p].w * high_half(gain[p].y));
    largest = fmaxf(fmaxf(largest, fmaxf(fabsf(v[p].x), fabsf(v[p].y))), fmaxf(fabsf(v[p].z), fabsf(v[p].w)));
  }
  const float2 both = cta_max_sum<kRowCtaThreads>(largest, squares);
  const float scale = rsqrtf(both.y / kHidden + kRmsEps);
  const float f = row_factor(both.x * scale);  // the sum of squares is NaN if any element is, and so is scale
  const float by = scale / f;
  float norm = 0.0f;
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int i = 4 * (threadIdx.x + p * kRowCtaThreads);
    norm += v[p].x * v[p].x + v[p].y * v[p].y + v[p].z * v[p].z + v[p].w * v[p].w;
    if (i < kHidden) {
      *reinterpret_cast<u32*>(permuted + x_position(i)) = pack_half2(v[p].x * by, v[p].y * by);
      *reinterpret_cast<u32*>(permuted + x_position(i + 2)) = pack_half2(v[p].z * by, v[p].w * by);
    } else if (i < kPaddedHidden) {
      *reinterpret_cast<u32*>(permuted + x_position(i)) = *reinterpret_cast<u32*>(permuted + x_position(i + 2)) = 0;
    }
  }
  if (inner) norm = cta_max_sum<kRowCtaThreads>(0.0f, norm).y;
  __syncthreads();  // all threads: the permuted row is complete
  write_x(permuted, kPaddedHidden, x, tokens, token);
  if (threadIdx.x == 0) {
    factor[token] = f;
    if (inner) inner[token] = fmaxf(bound * norm * scale * scale * (1.0f / 32768.0f), 1e-30f) + (f - f);  // NaN and infinity stay visible
  }
}

extern "C" __global__ void __launch_bounds__(kWarp)
rope_append_parts(const float* parts, int splits, const float* factor, const u16* q_bias, const u16* k_bias, const u16* v_bias, const float2* rope_table,
                  int first_position, const int* block_table, u16* keys, u16* values, float* q) {
  constexpr int kHalf = kHeadDim / 2, kRows = kQSize + 2 * kKvSize;
  allow_next_kernel();
  const Head head(blockIdx.x);
  const int token = blockIdx.y, n = gridDim.y, position = first_position + token;
  const u16* bias = head.bias(q_bias, k_bias, v_bias);
  wait_for_previous_kernel();
  const float* in = parts + static_cast<size_t>(token) * kRows + head.index * kHeadDim;
  const float f = factor[token];
  for (int i = lane_id(); i < kHalf; i += kWarp) {
    float a = 0.0f, b = 0.0f;
#pragma unroll 4
    for (int s = 0; s < splits; ++s) {
      const float* part = in + static_cast<size_t>(s) * n * kRows;
      a += part[i], b += part[i + kHalf];
    }
    a = a * f + half_to_float(bias[i]), b = b * f + half_to_float(bias[i + kHalf]);
    if (head.is_q || head.is_k) rotate(a, b, rope_table[static_cast<size_t>(position) * kHalf + i]);
    if (head.is_q) {
      float* out = q + (static_cast<size_t>(token) * kNumHeads + head.index) * kHeadDim;
      out[i] = a, out[i + kHalf] = b;
    } else {
      u16* pool = head.is_k ? keys : values;
      store_pair(pool + page_row(block_table[position / kPageTokens], head.kv_head(), position % kPageTokens), position, i, a, b);
    }
  }
}

// result: the largest Euclidean norm of a row among `tiles` 16-row tiles from first_tile on, as the bits of a float; 0 before. A warp a tile. The largest of
// several numbers does not depend on their order, so the atomic leaves nothing to chance.
extern "C" __global__ void __launch_bounds__(kWarp) projection_bound(const u8* blocks, int groups, int first_tile, u32* result) {
  const int g = lane_id() / 4;
  float squares[2] = {0.0f, 0.0f};
  for (int group = 0; group < groups; ++group) {
    const u32 block = (first_tile + blockIdx.x) * groups + group;
    const u32* words = reinterpret_cast<const u32*>(codes_of(blocks, block));
    const u32 scales = reinterpret_cast<const u32*>(scales_of(blocks, block))[g];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int sum = 0;
      for (int w = lane_id() % 4; w < kGroup / 8; w += 4) {
        const u32 word = words[(g + 8 * r) * (kGroup / 8) + w];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int code = static_cast<int>(word << 4 * i) >> 28;
          sum += code * code;
        }
      }
      const float scale = r ? high_half(scales) : low_half(scales);
      squares[r] += sum * scale * scale;
    }
  }
  const float largest = warp_max(sqrtf(fmaxf(quad_sum(squares[0]), quad_sum(squares[1]))));
  if (lane_id() == 0) atomicMax(result, __float_as_uint(largest));
}

// rows FP16 [n][columns] -> x; columns a multiple of 8. Dynamic shared memory: the padded row.
extern "C" __global__ void __launch_bounds__(kRowCtaThreads) tile_rows(const u16* rows, int columns, u16* x, int tokens) {
  extern __shared__ __align__(16) u16 row[];
  const int padded = (columns + kUnit - 1) / kUnit * kUnit;
  for (int i = threadIdx.x; i < padded; i += kRowCtaThreads) row[x_position(i)] = i < columns ? rows[static_cast<size_t>(blockIdx.x) * columns + i] : 0;
  __syncthreads();  // all threads
  write_x(row, padded, x, tokens, blockIdx.x);
}
