// prefill_attention: the queries of a chunk against the paged cache, causal.
//
// Computes   for 64 consecutive tokens of the chunk and one query head: softmax(q . K) . V over all tokens up to each query's own.
//            Online softmax and all sums in FP32; q and the probabilities as two FP16 parts each, as in paged_attention.cu.
// Moves      every page of the head's group once a 64-token tile, mostly from L2.
// Launch     (heads, ceil(n / 64)) CTAs of 4 warps; a warp owns 16 queries.
//
// Barriers   name      arrivals    who arrives                       who waits          means
//            full[i]   1 + bytes   thread 0 (expect_tx)              all warps          the stage's pages have landed
//            empty[i]  4           lane 0 of each warp               thread 0           nobody reads the stage any more
//            Thread 0 is also a consumer. It fills stage i + 1 before its warp works on stage i, and waits only for work that no
//            warp needs it for, so nobody waits in a circle. One __syncthreads, all threads, after the barriers are initialised.
// Shared     kStages * kStagePages * 2 slices of pages, then the barriers.
#include "constants.cuh"
#include "kv_page.cuh"
#include "mbarrier.cuh"
#include "page_fragments.cuh"
#include "tiled_x.cuh"

namespace nanoqwen {

constexpr int kStages = 2, kStagePages = 4, kQueryWarps = 4, kTileQueries = 16 * kQueryWarps;
constexpr int kDimTiles = kHeadDim / 8, kDimSteps = kHeadDim / 16;

struct PrefillShared {
  u16 pages[kStages][kStagePages][2][kSliceHalves];
  Barrier full[kStages], empty[kStages];
};

}  // namespace nanoqwen

using namespace nanoqwen;

// q FP32 [n][heads][head_dim]; tiled_out FP16 in the order of tiled_x.cuh, `capacity` tokens a slab.
extern "C" __global__ void __launch_bounds__(kQueryWarps* kWarp)
prefill_attention(const float* q, const u16* keys, const u16* values, const int* block_table, int first_position, int n, u16* tiled_out, int capacity) {
  extern __shared__ __align__(128) u8 raw[];
  PrefillShared& shared = *reinterpret_cast<PrefillShared*>(raw);
  const int head = blockIdx.x, kv_head = head / (kNumHeads / kNumKvHeads);
  const int g = lane_id() / 4, t = lane_id() % 4;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&shared.full[i], 1);
      barrier_init(&shared.empty[i], kQueryWarps);
    }
    fence_barrier_init();
  }
  allow_next_kernel();
  __syncthreads();
  wait_for_previous_kernel();

  const int tile = gridDim.y - 1 - blockIdx.y;  // the longest tiles first
  const int last_query = min(n, (tile + 1) * kTileQueries) - 1;
  const int pages = (first_position + last_query) / kPageTokens + 1;
  const int rounds = (pages + kStagePages - 1) / kStagePages;
  const auto fill = [&](int round, const Ring<kStages>& ring) {
    const int count = min(kStagePages, pages - round * kStagePages);
    barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
    barrier_arrive_expect(&shared.full[ring.stage], count * 2 * kSliceBytes);
    for (int i = 0; i < count; ++i) {
      const size_t slice = page_row(block_table[round * kStagePages + i], kv_head, 0);
      bulk_copy(shared.pages[ring.stage][i][0], keys + slice, kSliceBytes, &shared.full[ring.stage]);
      bulk_copy(shared.pages[ring.stage][i][1], values + slice, kSliceBytes, &shared.full[ring.stage]);
    }
  };
  Ring<kStages> filling;  // used by thread 0
  if (threadIdx.x == 0) {
    fill(0, filling);
    filling.advance();
  }

  // Queries as A fragments; rows g and g + 8 of the warp's tile, past the end of the chunk zeros that nobody stores.
  constexpr float kLog2e = 1.4426950408889634f;
  const float scale = rsqrtf(static_cast<float>(kHeadDim)) * kLog2e;
  const int row[2] = {tile * kTileQueries + static_cast<int>(warp_id()) * 16 + g, tile * kTileQueries + static_cast<int>(warp_id()) * 16 + g + 8};
  u32 high[kDimSteps][4], low[kDimSteps][4];
#pragma unroll
  for (int k = 0; k < kDimSteps; ++k)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int query = row[r % 2], dim = 16 * k + 2 * t + 8 * (r / 2);
      const float2 x = query < n ? *reinterpret_cast<const float2*>(q + (static_cast<size_t>(query) * kNumHeads + head) * kHeadDim + dim) : make_float2(0, 0);
      split_pair(x.x * scale, x.y * scale, high[k][r], low[k][r]);
    }

  float acc[kDimTiles][4] = {};
  float maximum[2] = {-infinity(), -infinity()}, denominator[2] = {0.0f, 0.0f};
  Ring<kStages> ring;
  for (int round = 0; round < rounds; ++round, ring.advance()) {
    if (threadIdx.x == 0 && round + 1 < rounds) {
      fill(round + 1, filling);
      filling.advance();
    }
    __syncwarp();
    barrier_wait(&shared.full[ring.stage], ring.parity);
    for (int i = 0; i < min(kStagePages, pages - round * kStagePages); ++i) {
      const u16* k_page = shared.pages[ring.stage][i][0];
      const u16* v_page = shared.pages[ring.stage][i][1];
      float s[2][4] = {};
#pragma unroll
      for (int k = 0; k < kDimSteps; ++k) {
        u32 b[4];
        key_fragments(b, k_page, k);
        mma_f16(s[0], high[k][0], high[k][1], high[k][2], high[k][3], b[0], b[1]);
        mma_f16(s[0], low[k][0], low[k][1], low[k][2], low[k][3], b[0], b[1]);
        mma_f16(s[1], high[k][0], high[k][1], high[k][2], high[k][3], b[2], b[3]);
        mma_f16(s[1], low[k][0], low[k][1], low[k][2], low[k][3], b[2], b[3]);
      }
      // s[tile][2 * half + j]: query row[half], token 8 * tile + 2t + j of the page.
      const int token0 = (round * kStagePages + i) * kPageTokens + 2 * t;
      float p[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int position = first_position + row[half];
        float largest = -infinity();
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int token = token0 + 8 * (c / 2) + c % 2;
          p[half][c] = token <= position ? s[c / 2][2 * half + c % 2] : -infinity();
          largest = fmaxf(largest, p[half][c]);
        }
        largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, 2));
        const float now = fmaxf(maximum[half], largest);  // finite from the first page on: every query sees token 0
        const float correction = exp2f(maximum[half] - now);
        maximum[half] = now;
        float sum = 0.0f;
#pragma unroll
        for (int c = 0; c < 4; ++c) sum += p[half][c] = exp2f(p[half][c] - now);
        sum += __shfl_xor_sync(kFullMask, sum, 1);
        sum += __shfl_xor_sync(kFullMask, sum, 2);
        denominator[half] = denominator[half] * correction + sum;
#pragma unroll
        for (int d = 0; d < kDimTiles; ++d) acc[d][2 * half] *= correction, acc[d][2 * half + 1] *= correction;
      }
      u32 ph[4], pl[4];
      split_pair(p[0][0], p[0][1], ph[0], pl[0]);
      split_pair(p[1][0], p[1][1], ph[1], pl[1]);
      split_pair(p[0][2], p[0][3], ph[2], pl[2]);
      split_pair(p[1][2], p[1][3], ph[3], pl[3]);
#pragma unroll
      for (int d = 0; d < kDimTiles; d += 2) {
        u32 b[4];
        value_fragments(b, v_page, d);
        mma_f16(acc[d], ph[0], ph[1], ph[2], ph[3], b[0], b[1]);
        mma_f16(acc[d], pl[0], pl[1], pl[2], pl[3], b[0], b[1]);
        mma_f16(acc[d + 1], ph[0], ph[1], ph[2], ph[3], b[2], b[3]);
        mma_f16(acc[d + 1], pl[0], pl[1], pl[2], pl[3], b[2], b[3]);
      }
    }
    __syncwarp();
    if (lane_id() == 0) barrier_arrive(&shared.empty[ring.stage]);
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row[half] >= n) continue;
#pragma unroll
    for (int d = 0; d < kDimTiles; ++d) {
      const int position = x_position(head * kHeadDim + 8 * d + 2 * t);
      u16* to = tiled_out + static_cast<size_t>(position / kSlab) * capacity * kSlab + x_chunk(row[half], position % kSlab / 8) + position % 8;
      *reinterpret_cast<u32*>(to) = pack_half2(acc[d][2 * half] / denominator[half], acc[d][2 * half + 1] / denominator[half]);
    }
  }
}
