// rows_tiled: what stands between the matrix products of prefill; X leaves in the tiled order (tiled_x.cuh) or as digits.
//
// norm_rows_tiled    residual += parts of the product before (if any) * its factor; y = RMSNorm(residual) * weight; FP16 y / factor as X; factor;
//                    with `inner`, also the bound that scales the SwiGLU result of each token (SwigluOut). A CTA a token.
// norm_rows_spread   the same for few tokens: a cluster of kSpread CTAs a token. One SM takes 64 bytes a cycle out of L2, and ten parts of a token are 140 KB.
// norm_rows_digits   as norm_rows_spread, for up to 16 tokens: y / factor leaves as digits (digit_x.cuh).
// quantise_tiles     the SwiGLU result of up to 16 tokens, FP16 tiles, as digits for down. A warp a token and unit.
// rope_append_parts  q, k, v of a product that came in parts: sum, factor, bias, RoPE; k and v into their pages.
// projection_bound   once, when the weights are uploaded: the largest row norm of a matrix's rows [first, first + rows).
//
// Norm       a warp has a unit of 128 columns (or several, one after the other), a lane four rows of it, as they lie side by side in the parts. Everything is
//            loaded at once. The residual's largest value and the two sums of squares need no second look at it: they are taken before the scale is known.
// Launch     norm: (tokens * CTAs a token) CTAs of RowShape::kThreads (nanoqwen/cuda/prefill_plan.py has the same arithmetic). rope_append_parts: grid (tokens,
//            as many CTAs of kRopeThreads as take its heads). quantise_tiles: grid (tokens, as many CTAs of kQuantiseThreads as take the units).
//            projection_bound: a warp a 16-row tile.
// Barriers   name       arrivals    who arrives                        who waits             means
//            cluster    all         all threads of the cluster, also   the same, before      (spread) every CTA runs and has initialised `joined`: others
//                                   of a CTA without columns           they send             may write into its memory
//            joined     1 + bytes   thread 0 of the CTA (expect_tx)    all its threads       (spread) every warp of the cluster has sent what it found. A CTA
//                                                                                            leaves after that: nobody sends to it any more
//            One __syncthreads, all threads, in norm_rows_tiled only: every warp has written what it found.
#include "cluster.cuh"
#include "constants.cuh"
#include "digit_x.cuh"
#include "gemm_work.cuh"
#include "head.cuh"
#include "int4_block.cuh"
#include "row_scale.cuh"
#include "span.cuh"

namespace nanoqwen {

constexpr int kUnits = (kHidden + kUnit - 1) / kUnit;
constexpr int kSpread = 4, kRopeThreads = 128, kQuantiseThreads = 128;
static_assert(kHidden % 32 == 0, "parts come in the order of whole warps (gemm_work.cuh)");
static_assert(kUnit == 4 * kWarp && kUnit % kGroup == 0, "a warp's columns are permuted among themselves (tiled_x.cuh)");

// kCtas CTAs a token, of at most kMostWarps warps.
template <int kCtas_, int kMostWarps>
struct RowShape {
  static constexpr int kCtas = kCtas_, kUnitsOfCta = (kUnits + kCtas - 1) / kCtas;
  static constexpr int kPieces = (kUnitsOfCta + kMostWarps - 1) / kMostWarps;  // units of a warp
  static constexpr int kWarps = (kUnitsOfCta + kPieces - 1) / kPieces, kThreads = kWarps * kWarp;
};

// What a token's warps have found, joined: the largest value, the sum of squares, the sum of squares with the gain. Every CTA of the token adds in the
// same order: all have the same bits.
template <class Shape>
struct Join {
  static constexpr int kAll = Shape::kCtas * Shape::kWarps;
  float4 of_warp[kAll];
  Barrier joined;

  // All threads, first of all.
  __device__ __forceinline__ void begin() {
    if constexpr (Shape::kCtas == 1) return;
    if (threadIdx.x == 0) {
      barrier_init(&joined, 1);
      fence_barrier_init();
      barrier_arrive_expect(&joined, sizeof(of_warp));
    }
    cluster_arrive_started();
  }

  // All threads, once.
  __device__ __forceinline__ float3 operator()(float largest, float squares, float gained) {
    const int warp = blockIdx.x % Shape::kCtas * Shape::kWarps + warp_id(), lane = lane_id();
    const float4 mine = make_float4(warp_max(largest), warp_sum(squares), warp_sum(gained), 0.0f);
    if constexpr (Shape::kCtas == 1) {
      if (lane == 0) of_warp[warp] = mine;
      __syncthreads();
    } else {
      cluster_wait_started();
      if (lane < Shape::kCtas) send_to_cta(&of_warp[warp], lane, mine, &joined);
      barrier_wait(&joined, 0);
    }
    largest = squares = gained = 0.0f;
#pragma unroll
    for (int first = 0; first < kAll; first += kWarp)
      if (first + lane < kAll) {
        const float4 one = of_warp[first + lane];
        largest = fmaxf(largest, one.x), squares += one.y, gained += one.z;
      }
    return make_float3(warp_max(largest), warp_sum(squares), warp_sum(gained));
  }
};

// A unit on its way to X, in shared memory: FP16 as it will lie there, or the columns in their order, of which a lane makes digits of four.
template <class X> struct Laid;
template <> struct Laid<u16> { using Element = u16; };
template <> struct Laid<u8> { using Element = float; };

// [norm]
// kAtOnce slots of parts are asked for together. X says in which form x is: u16 FP16, u8 digits.
template <class Shape, int kAtOnce, class X>
__device__ __forceinline__ void norm_rows(
    float* residual, const float* parts, const Work& work, const float* parts_factor, const u16* weight, X* x, int tokens, float* factor, float bound, float* inner) {
  constexpr int kPieces = Shape::kPieces;
  constexpr bool kDigits = sizeof(X) == 1;
  using Element = typename Laid<X>::Element;
  __shared__ __align__(16) Element permuted[Shape::kWarps][kPieces][kUnit];
  const int token = blockIdx.x / Shape::kCtas, lane = lane_id(), first = blockIdx.x % Shape::kCtas * Shape::kUnitsOfCta;
  __shared__ Join<Shape> join;
  join.begin();
  allow_next_kernel();
  const auto unit = [&](int p) { return static_cast<int>(warp_id()) + p * Shape::kWarps < Shape::kUnitsOfCta ? first + static_cast<int>(warp_id()) + p * Shape::kWarps : kUnits; };
  // The lanes share out the counting, which takes divisions: eight lanes have the same 32 rows of a unit.
  static_assert(4 * kPieces <= kWarp, "a lane counts once");
  const int counted = 8 * unit(lane / 4) + 2 * (lane % 4);
  const int parts_there = parts && lane < 4 * kPieces && 16 * counted < kHidden ? part_count(work, counted, token) : 0;
  int four[kPieces], count[kPieces];
  u32 gain[kPieces][2];
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    four[p] = unit(p) * kWarp + lane;
    count[p] = __shfl_sync(kFullMask, parts_there, 4 * p + lane / 8);
    const int i = part_row(four[p]);
#pragma unroll
    for (int h = 0; h < 2; ++h) gain[p][h] = i < kHidden ? weight[i + 16 * h] | static_cast<u32>(weight[i + 16 * h + 8]) << 16 : 0;
  }
  wait_for_previous_kernel();

  float* const row = residual + static_cast<size_t>(token) * kHidden;
  const float f_in = parts_factor ? parts_factor[token] : 1.0f;
  float v[kPieces][4];
  float4 sums[kPieces];
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int i = part_row(four[p]);
#pragma unroll
    for (int r = 0; r < 4; ++r) v[p][r] = i < kHidden ? row[i + 8 * r] : 0.0f;
    sums[p] = make_float4(0, 0, 0, 0);
  }
  add_parts<kAtOnce>(parts, work, kHidden, token, four, count, sums);
  float largest = 0.0f, squares = 0.0f, gained = 0.0f;
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const float sum[4] = {sums[p].x, sums[p].y, sums[p].z, sums[p].w};
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      v[p][r] += sum[r] * f_in;
      if (count[p]) row[part_row(four[p]) + 8 * r] = v[p][r];
      squares += v[p][r] * v[p][r];
      v[p][r] *= r % 2 ? high_half(gain[p][r / 2]) : low_half(gain[p][r / 2]);
      largest = fmaxf(largest, fabsf(v[p][r]));
      gained += v[p][r] * v[p][r];
    }
  }

  const float3 all = join(largest, squares, gained);
  const float scale = rsqrtf(all.y / kHidden + kRmsEps);
  const float f = row_factor(all.x * scale);  // the sum of squares is NaN if any element is, and so is scale
  const float by = scale / f;
  Element(*const mine)[kUnit] = permuted[warp_id()];
#pragma unroll
  for (int p = 0; p < kPieces; ++p)
#pragma unroll
    for (int r = 0; r < 4; ++r) {  // zero behind the matrix
      if constexpr (kDigits) mine[p][part_row(lane) + 8 * r] = v[p][r] * by;
      else mine[p][x_position(part_row(lane) + 8 * r)] = float_to_half(v[p][r] * by);
    }
  __syncwarp();
  if constexpr (kDigits) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p)
      if (unit(p) < kUnits) {
        const float4 y = reinterpret_cast<const float4*>(mine[p])[lane];
        write_digit_unit({y.x, y.y, y.z, y.w}, token, x + unit(p) * (tokens / kTileTokens) * kDigitTile);
      }
  } else {
#pragma unroll
    for (int c = lane; c < kPieces * kUnit / 8; c += kWarp) {
      const int at = unit(c / (kUnit / 8)), chunk = c % (kUnit / 8);
      if (at < kUnits)
        *reinterpret_cast<uint4*>(x + static_cast<size_t>(at * (kUnit / kSlab) + chunk / 8) * tokens * kSlab + x_chunk(token, chunk % 8)) = reinterpret_cast<const uint4*>(mine)[c];
    }
  }
  if (first == 0 && threadIdx.x == 0) {
    factor[token] = f;
    if (inner) inner[token] = fmaxf(bound * all.z * scale * scale * (1.0f / 32768.0f), 1e-30f) + (f - f);  // NaN and infinity stay visible
  }
}
// [/norm]

using Tiled = RowShape<1, 20>;
using Spread = RowShape<kSpread, 16>;

}  // namespace nanoqwen

using namespace nanoqwen;

// parts as gemm_work.cuh lays them out for `work`, or null; x [hidden padded / 64][tokens][64], or as digits, and then tokens is the width of the launch that
// reads it, 8 or 16; inner null or FP32 [n] with `bound`, the product of the
// largest row norms of gate and up.
#define NANOQWEN_NORM(name, Shape, X, at_once, cluster, ctas)                                                                                                  \
  extern "C" __global__ void cluster __launch_bounds__(Shape::kThreads, ctas)                                                                                  \
  name(float* residual, const float* parts, const Work work, const float* parts_factor, const u16* weight, X* x, int tokens, float* factor, float bound, float* inner) { \
    norm_rows<Shape, at_once>(residual, parts, work, parts_factor, weight, x, tokens, factor, bound, inner);                                                    \
  }

NANOQWEN_NORM(norm_rows_tiled, Tiled, u16, 2, , (Tiled::kThreads <= 512 ? 2 : 1))
NANOQWEN_NORM(norm_rows_spread, Spread, u16, 10, __cluster_dims__(kSpread, 1, 1), (Spread::kThreads <= 256 ? 3 : 2))
NANOQWEN_NORM(norm_rows_digits, Spread, u8, 10, __cluster_dims__(kSpread, 1, 1), (Spread::kThreads <= 256 ? 3 : 2))

// q FP32 [tokens][heads][head_dim]. A thread takes four elements of the first half of a head and the four that RoPE pairs with them. What it needs besides the
// parts is here before they are finished; tokens that the chunk does not have end at once, since no page is theirs.
extern "C" __global__ void __launch_bounds__(kRopeThreads, 4)
rope_append_parts(const float* parts, const Work work, const float* factor, const u16* q_bias, const u16* k_bias, const u16* v_bias, const float2* rope_table,
                  const Span* span, const int* block_table, u16* keys, u16* values, float* q) {
  constexpr int kHalf = kHeadDim / 2, kFours = kHalf / 4, kHeads = kNumHeads + 2 * kNumKvHeads, kRows = kHeads * kHeadDim;
  allow_next_kernel();
  const int token = blockIdx.x, position = span->position + token, mine = blockIdx.y * kRopeThreads + threadIdx.x;
  if (token >= span->n || mine >= kHeads * kFours) return;
  const Head head(mine / kFours);
  const u16* const bias = head.bias(q_bias, k_bias, v_bias);
  const int i = part_row(mine % kFours), at = head.index * 2 * kFours + mine % kFours, four[2] = {at, at + kFours};
  const int count[2] = {part_count(work, part_row(four[0]) / 16, token), part_count(work, part_row(four[1]) / 16, token)};
  const int page = block_table[position / kPageTokens];
  float2 turn[4];
  float added[2][4];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    turn[r] = rope_table[static_cast<size_t>(position) * kHalf + i + 8 * r];
    added[0][r] = half_to_float(bias[i + 8 * r]), added[1][r] = half_to_float(bias[i + 8 * r + kHalf]);
  }
  wait_for_previous_kernel();
  const float f = factor[token];
  float4 sums[2] = {make_float4(0, 0, 0, 0), make_float4(0, 0, 0, 0)};
  add_parts<6>(parts, work, kRows, token, four, count, sums);
  const float a[4] = {sums[0].x, sums[0].y, sums[0].z, sums[0].w}, b[4] = {sums[1].x, sums[1].y, sums[1].z, sums[1].w};
#pragma unroll
  for (int r = 0; r < 4; ++r)
    finish_pair(head, position, page, i + 8 * r, a[r] * f + added[0][r], b[r] * f + added[1][r], turn[r], q + static_cast<size_t>(token) * kQSize, keys, values);
}

// x [intermediate padded / 64][tokens][64] -> digits for a product of `width` tokens. A row keeps its factor: the reader of the product has it.
extern "C" __global__ void __launch_bounds__(kQuantiseThreads) quantise_tiles(const u16* x, int tokens, int width, u8* digits) {
  allow_next_kernel();
  wait_for_previous_kernel();
  constexpr int kWarps = kQuantiseThreads / kWarp;
  const int token = blockIdx.x, unit = blockIdx.y * kWarps + static_cast<int>(warp_id());
  if (unit >= (kIntermediate + kUnit - 1) / kUnit) return;
  // Four columns from a multiple of four on lie as two pairs, one in the place of k = 2 t, the other in that of k = 8 + 2 t (tiled_x.cuh): a 16-byte chunk apart.
  const int position = x_position(4 * static_cast<int>(lane_id()));
  const u16* const slab = x + static_cast<size_t>(unit * (kUnit / kSlab) + position / kSlab) * tokens * kSlab;
  u32 pair[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) pair[h] = *reinterpret_cast<const u32*>(slab + x_chunk(token, position % kSlab / 8 + h) + position % 8);
  write_digit_unit({low_half(pair[0]), high_half(pair[0]), low_half(pair[1]), high_half(pair[1])}, token, digits + unit * (width / kTileTokens) * kDigitTile);
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
