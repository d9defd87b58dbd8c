// rows_tiled: what stands between the matrix products of prefill; X leaves in the tiled order (tiled_x.cuh).
//
// norm_rows_tiled    residual += parts of the product before (if any) * its factor; y = RMSNorm(residual) * weight; FP16 y / factor as X; factor;
//                    with `inner`, also the bound that scales the SwiGLU result of each token (SwigluOut).
// rope_append_parts  q, k, v of a product that came in parts: sum, factor, bias, RoPE; k and v into their pages.
// projection_bound   once, when the weights are uploaded: the largest row norm of a matrix's rows [first, first + rows).
// Launch     a CTA of 256 threads a token, or as many for each as take its heads (rope_append_parts: grid (tokens, ctas)); projection_bound a warp a 16-row tile.
#include "constants.cuh"
#include "gemm_work.cuh"
#include "head.cuh"
#include "int4_block.cuh"
#include "row_scale.cuh"
#include "span.cuh"

namespace nanoqwen {

constexpr int kRowCtaThreads = 256, kPieces = (kHidden / 4 + kRowCtaThreads - 1) / kRowCtaThreads;
constexpr int kPaddedHidden = (kHidden + kUnit - 1) / kUnit * kUnit;
static_assert(kHidden % 32 == 0, "parts come in the order of whole warps (gemm_work.cuh)");

// Chunks of 16 bytes of a permuted row in shared memory to their places in X.
__device__ __forceinline__ void write_x(const u16* permuted, int columns, u16* x, int tokens, int token) {
  for (int c = threadIdx.x; c < columns / 8; c += kRowCtaThreads)
    *reinterpret_cast<uint4*>(x + static_cast<size_t>(c / 8) * tokens * kSlab + x_chunk(token, c % 8)) = reinterpret_cast<const uint4*>(permuted)[c];
}

}  // namespace nanoqwen

using namespace nanoqwen;

// parts as gemm_work.cuh lays them out for `work`, or null; x [hidden padded / 64][tokens][64]; inner null or FP32 [n] with `bound`, the product of the
// largest row norms of gate and up. A thread takes the four rows that lie side by side in the parts.
extern "C" __global__ void __launch_bounds__(kRowCtaThreads)
norm_rows_tiled(float* residual, const float* parts, const Work work, const float* parts_factor, const u16* weight, u16* x, int tokens, float* factor, float bound, float* inner) {
  __shared__ __align__(16) u16 permuted[kPaddedHidden];
  const int token = blockIdx.x;
  allow_next_kernel();
  float gain[kPieces][4];
  int count[kPieces], most = 0;
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int i = part_row(threadIdx.x + p * kRowCtaThreads);
    count[p] = parts && i < kHidden ? part_count(work, i / 16, token) : 0;
    most = max(most, count[p]);
#pragma unroll
    for (int r = 0; r < 4; ++r) gain[p][r] = i < kHidden ? half_to_float(weight[i + 8 * r]) : 0.0f;
  }
  wait_for_previous_kernel();
  float* row = residual + static_cast<size_t>(token) * kHidden;
  const float f_in = parts_factor ? parts_factor[token] : 1.0f;
  float v[kPieces][4], sum[kPieces][4];
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int i = part_row(threadIdx.x + p * kRowCtaThreads);
#pragma unroll
    for (int r = 0; r < 4; ++r) v[p][r] = i < kHidden ? row[i + 8 * r] : 0.0f, sum[p][r] = 0.0f;
  }
  const float4* part = reinterpret_cast<const float4*>(parts) + static_cast<size_t>(token) * (kHidden / 4) + threadIdx.x;
#pragma unroll 4
  for (int k = 0; k < most; ++k, part += static_cast<size_t>(work.n) * (kHidden / 4))
#pragma unroll
    for (int p = 0; p < kPieces; ++p)  // all pieces of a slot at once: nothing waits for the sum before it
      if (k < count[p]) {
        const float4 more = part[p * kRowCtaThreads];
        sum[p][0] += more.x, sum[p][1] += more.y, sum[p][2] += more.z, sum[p][3] += more.w;
      }
  float squares = 0.0f, largest = 0.0f;
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int i = part_row(threadIdx.x + p * kRowCtaThreads);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      v[p][r] += sum[p][r] * f_in;
      if (count[p]) row[i + 8 * r] = v[p][r];
      squares += v[p][r] * v[p][r];
      v[p][r] *= gain[p][r];
      largest = fmaxf(largest, fabsf(v[p][r]));
    }
  }
  const float2 both = cta_max_sum<kRowCtaThreads>(largest, squares);
  const float scale = rsqrtf(both.y / kHidden + kRmsEps);
  const float f = row_factor(both.x * scale);  // the sum of squares is NaN if any element is, and so is scale
  const float by = scale / f;
  float norm = 0.0f;
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int i = part_row(threadIdx.x + p * kRowCtaThreads);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      norm += v[p][r] * v[p][r];
      if (i < kPaddedHidden) permuted[x_position(i + 8 * r)] = float_to_half(v[p][r] * by);  // zero behind the matrix
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

// q FP32 [tokens][heads][head_dim]. A thread takes four elements of the first half of a head and the four that RoPE pairs with them. What it needs besides the
// parts is here before they are finished; tokens that the chunk does not have end at once, since no page is theirs.
extern "C" __global__ void __launch_bounds__(kRowCtaThreads)
rope_append_parts(const float* parts, const Work work, const float* factor, const u16* q_bias, const u16* k_bias, const u16* v_bias, const float2* rope_table,
                  const Span* span, const int* block_table, u16* keys, u16* values, float* q) {
  constexpr int kHalf = kHeadDim / 2, kFours = kHalf / 4, kHeads = kNumHeads + 2 * kNumKvHeads, kRows = kHeads * kHeadDim;
  allow_next_kernel();
  const int token = blockIdx.x, position = span->position + token, mine = blockIdx.y * kRowCtaThreads + threadIdx.x;
  if (token >= span->n || mine >= kHeads * kFours) return;
  const Head head(mine / kFours);
  const u16* const bias = head.bias(q_bias, k_bias, v_bias);
  const int four = head.index * 2 * kFours + mine % kFours, i = part_row(mine % kFours);
  const int count_a = part_count(work, part_row(four) / 16, token), count_b = part_count(work, part_row(four + kFours) / 16, token);
  const int page = block_table[position / kPageTokens];
  float2 turn[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) turn[r] = rope_table[static_cast<size_t>(position) * kHalf + i + 8 * r];
  wait_for_previous_kernel();
  const float f = factor[token];
  const float4 sum_a = add_parts(parts, work, kRows, token, four, count_a), sum_b = add_parts(parts, work, kRows, token, four + kFours, count_b);
  const float a[4] = {sum_a.x, sum_a.y, sum_a.z, sum_a.w}, b[4] = {sum_b.x, sum_b.y, sum_b.z, sum_b.w};
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int at = i + 8 * r;
    const float x = a[r] * f + half_to_float(bias[at]), y = b[r] * f + half_to_float(bias[at + kHalf]);
    finish_pair(head, position, page, at, x, y, turn[r], q + static_cast<size_t>(token) * kQSize, keys, values);
  }
}

// result: the largest Euclidean norm of a row among `tiles` 16-row tiles from first_tile on, as the bits of a float; 0 before. A warp a tile. The largest of
// several numbers does not depend on their order, so the atomic leaves nothing to chance.
extern "C" __global__ void __launch_bounds__(kWarp) projection_bound(const u8* blocks, int groups, int first_tile, u32* result) {
  const int g = lane_id() / 4;
  float squares[2] = {0.0f, 0.0f};
  for (int group = 0; group < groups; ++group) {
    const u32 block = (first_tile + blockIdx.x) * groups + group;
    const u8* const at = blocks + static_cast<size_t>(block) * Int4Block::kBytes;
    const u32* words = reinterpret_cast<const u32*>(at + Int4Block::codes(0));
    const u32 scales = reinterpret_cast<const u32*>(at + Int4Block::scales(0))[g];
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
