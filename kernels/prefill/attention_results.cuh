// The end of prefill attention: results into X, the next product's input, straight from registers or after several warpgroups' were joined.
#pragma once

#include "attention_steps.cuh"
#include "cluster.cuh"
#include "tiled_x.cuh"

namespace nanoqwen {

// Place of an element of a token in X, by its position in the permuted row (tiled_x.cuh).
__device__ __forceinline__ u16* x_place(const AttentionArguments& a, int query, int position) {
  return a.out + static_cast<size_t>(position / kSlab) * a.capacity * kSlab + x_chunk(query, position % kSlab / 8) + position % 8;
}

// Row `query` of `head`: sums of `half`, times `by`.
__device__ __forceinline__ void store_row(const AttentionArguments& a, int head, int query, const float (&sums)[kHeadDim / 2], int half, float by) {
  const int t = lane_id() % 4;
  const auto pair = [&](int tile) { return pack_half2(sums[4 * tile + 2 * half] * by, sums[4 * tile + 2 * half + 1] * by); };
  if constexpr (kGroup <= kHeadDim) {
    // A lane has dimensions 8 * tile + 2 t, + 1 of every tile. Pairs a quarter of a group apart are neighbours in X: four of them are 16 bytes.
    constexpr int kQuarter = kGroup / 32;
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
      const int in = tile % (kGroup / 8), position = head * kHeadDim + (tile - in) * 8 + 32 * in + 8 * t;
      if (in < kQuarter)
        *reinterpret_cast<uint4*>(x_place(a, query, position)) = make_uint4(pair(tile), pair(tile + kQuarter), pair(tile + 2 * kQuarter), pair(tile + 3 * kQuarter));
    }
  } else {
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) *reinterpret_cast<u32*>(x_place(a, query, x_position(head * kHeadDim + 8 * tile + 2 * t))) = pair(tile);
  }
}

// [join]
// Results of the 2 * kSpread warpgroups of a cluster, over different tokens, become one: each is weighted by its maximum. They take the place of the
// pages; CTA r finishes queries r, r + kSpread, ... of the tile. Consumers only; the producer's warps join the two cluster barriers with them.
__device__ __forceinline__ void join_results(
    AttentionShared& shared, const AttentionArguments& a, const Part<kSpread>& part, int warpgroup, const QueryTile& mine, const float (&denominator)[2]) {
  named_barrier<1, kConsumers>();  // every copy has landed and every product is done: nobody reads or writes pages any more
  auto& joined = shared.joined;
  const int thread = threadIdx.x - kGroupThreads, in = static_cast<int>(warp_id()) % 4 * 16 + static_cast<int>(lane_id()) / 4, t = lane_id() % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int d = 0; d < kDimTiles; ++d)
      *reinterpret_cast<float2*>(&joined.sums[warpgroup][in + 8 * half][8 * d + 2 * t]) = make_float2(mine.sums[4 * d + 2 * half], mine.sums[4 * d + 2 * half + 1]);
    if (t == 0) {
      joined.maxima[warpgroup][in + 8 * half] = mine.maximum[half];
      joined.denominators[warpgroup][in + 8 * half] = denominator[half];
    }
  }
  cluster_barrier();  // all results are there
  constexpr int kResults = 2 * kSpread, kMine = kQueries / kSpread;
  if (thread < kMine) {
    const int query = part.rank + kSpread * thread;
    float weight[kResults], top = -infinity(), total = 0.0f;
#pragma unroll
    for (int i = 0; i < kResults; ++i) top = fmaxf(top, weight[i] = load_from_cta(&joined.maxima[i % 2][query], i / 2));
#pragma unroll
    for (int i = 0; i < kResults; ++i) {
      weight[i] = exp2_fast(weight[i] - top);  // 0 for a warpgroup that saw no token of this query's
      total += weight[i] * load_from_cta(&joined.denominators[i % 2][query], i / 2);
    }
#pragma unroll
    for (int i = 0; i < kResults; ++i) joined.weights[i][thread] = weight[i] / total;
  }
  named_barrier<1, kConsumers>();  // the weights are there
  for (int item = thread; item < kMine * kHeadDim / 2; item += kConsumers) {
    const int row = item / (kHeadDim / 2), dim = item % (kHeadDim / 2) * 2, in_tile = part.rank + kSpread * row, query = part.tile * kQueries + in_tile;
    if (query >= part.n) continue;
    float x = 0.0f, y = 0.0f;
#pragma unroll
    for (int i = 0; i < kResults; ++i) {
      const float2 v = load_pair_from_cta(&joined.sums[i % 2][in_tile][dim], i / 2);
      x += joined.weights[i][row] * v.x, y += joined.weights[i][row] * v.y;
    }
    *reinterpret_cast<u32*>(x_place(a, query, x_position(part.head * kHeadDim + dim))) = pack_half2(x, y);
  }
  cluster_barrier();  // nobody leaves while others read its memory
}
// [/join]

}  // namespace nanoqwen
