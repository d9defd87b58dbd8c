// The roles of prefill attention: what a CTA takes of the work, how the producer brings pages, how a consumer warpgroup goes through its steps.
// attention.cu has the barriers, who arrives at them and who waits.
#pragma once

#include "attention_tile.cuh"
#include "kv_page.cuh"
#include "span.cuh"

namespace nanoqwen {

constexpr int kStages = 4;
constexpr int kGroupThreads = 128, kConsumers = 2 * kGroupThreads, kAttentionThreads = kConsumers + kGroupThreads;
constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;  // together what the launch allocated, 384 * 168: else setmaxnreg waits for ever
static_assert(2 * kConsumerRegisters + kProducerRegisters == 3 * 168, "what is given back is what is taken");
constexpr int kSpread = 4;  // CTAs of a cluster of prefill_attention_spread

struct AttentionShared {
  union {
    struct {
      u8 keys[kStages][kTileBytes], values[kStages][kTileBytes];
    };
    struct {                                  // of the spread kernel, after its last step
      float sums[2][kQueries][kHeadDim + 8];  // [warpgroup]; eight more: rows of a warp in different banks
      float maxima[2][kQueries], denominators[2][kQueries];
      float weights[2 * kSpread][kQueries];  // of the results that are joined
    } joined;
  };
  Barrier k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
};

struct AttentionArguments {
  const float* q;
  const TensorMap *keys, *values;
  const int* block_table;
  const Span* span;
  u16* out;
  int capacity;  // tokens of a slab of X
};

// What a CTA does: 128 queries of a head, 64 a warpgroup, over all steps; or as one of kCluster 64 queries, which both its warpgroups have, over
// its part of the steps.
template <int kCluster>
struct Part {
  static constexpr bool kPaired = kCluster > 1;
  static constexpr int kTile = kPaired ? kQueries : 2 * kQueries;
  int position, n;  // the chunk's
  int head, tile, rank;
  int last_position;  // of the tile's queries
  int to, count;      // steps are walked downwards: the k-th is to - 1 - k

  __device__ __forceinline__ explicit Part(const Span& span)
      : position(span.position), n(span.n), head(blockIdx.x), tile(gridDim.y - 1 - blockIdx.y), rank(kPaired ? blockIdx.z : 0) {  // the longest tiles first
    last_position = position + min(n, (tile + 1) * kTile) - 1;
    const int steps = last_position / kStep + 1, from = steps * rank / kCluster;
    to = steps * (rank + 1) / kCluster;
    count = to - from;
  }
  __device__ __forceinline__ bool empty() const { return tile * kTile >= n; }  // behind the chunk: the launch is for more tokens
};

// [producer]
// One warp, a lane a page of the step.
template <int kCluster>
__device__ __forceinline__ void bring_pages(AttentionShared& shared, const AttentionArguments& a, const Part<kCluster>& part) {
  const int lane = lane_id(), kv_head = part.head / (kNumHeads / kNumKvHeads), last_page = part.last_position / kPageTokens;
  const bool has_page = lane < kStepPages;
  // Where a step needs fewer pages than it has, the last page comes again, so that every value is finite; its tokens are masked.
  const auto page_of = [&](int k) { return has_page && k < part.count ? a.block_table[min((part.to - 1 - k) * kStepPages + lane, last_page)] : 0; };
  int page = page_of(0);
  wait_for_previous_kernel();
  Ring<kStages> ring;
  for (int k = 0; k < part.count; ++k, ring.advance()) {
    const int row = (page * kNumKvHeads + kv_head) * kPageTokens;
    page = page_of(k + 1);
    const auto bring = [&](const TensorMap* map, u8* tile, Barrier* full, Barrier* empty) {
      barrier_wait(empty, ring.parity ^ 1);
      if (lane == 0) barrier_arrive_expect(full, kTileBytes);
      __syncwarp();  // no copy's bytes are taken off before they were announced
      if (has_page)
#pragma unroll
        for (int half = 0; half < kHalves; ++half) tensor_copy(shared_address(tile) + half * kHalfBytes + lane * kBoxBytes, map, half * kBoxColumns, row, full);
    };
    bring(a.keys, shared.keys[ring.stage], &shared.k_full[ring.stage], &shared.k_empty[ring.stage]);
    bring(a.values, shared.values[ring.stage], &shared.v_full[ring.stage], &shared.v_empty[ring.stage]);
  }
}
// [/producer]

// Turns at issuing products, so that one warpgroup's softmax runs under the other's products. Barrier 2 + w is warpgroup w's turn; the two
// take turns strictly, w = 0 first.
__device__ __forceinline__ void wait_for_turn(int warpgroup) { asm volatile("bar.sync %0, %1;" ::"r"(2 + warpgroup), "n"(kConsumers) : "memory"); }
__device__ __forceinline__ void pass_turn(int warpgroup) { asm volatile("bar.arrive %0, %1;" ::"r"(3 - warpgroup), "n"(kConsumers) : "memory"); }

// [consumer]
// A warpgroup's steps: 64 queries from `first_query` on. Leaves its sums, maxima and denominators in `mine`.
template <int kCluster>
__device__ __forceinline__ void attend(AttentionShared& shared, const Part<kCluster>& part, int warpgroup, int first_query, QueryTile& mine) {
  constexpr bool kPaired = Part<kCluster>::kPaired;
  const int warp_query = first_query + static_cast<int>(warp_id()) % 4 * 16, row = warp_query + static_cast<int>(lane_id()) / 4;
  // Steps that these queries need: the first 64 of 128 may need one less, and what lies behind the chunk none.
  const int needed = first_query < part.n ? (part.position + min(part.n, first_query + kQueries) - 1) / kStep + 1 : 0;
  const auto stage = [](int k) { return k % kStages; };
  const auto wait = [&](Barrier* full, int k) { barrier_wait(&full[stage(k)], k / kStages & 1); };
  const auto give_back = [&](Barrier* empty, int k) {
    __syncwarp();  // every lane has waited for the product
    if (lane_id() == 0) barrier_arrive(&empty[stage(k)]);
  };
  const auto begin_turn = [&] {
    if constexpr (!kPaired) wait_for_turn(warpgroup);
  };
  const auto end_turn = [&](int k) {  // the last turn of warpgroup 1 is passed to nobody
    if constexpr (!kPaired)
      if (warpgroup == 0 || k < part.count - 1) pass_turn(warpgroup);
  };
  const auto scores_to_shares = [&](int k) {
    const int step = part.to - 1 - k;
    if ((step + 1) * kStep - 1 > part.position + warp_query) mine.mask(part.position + row, step * kStep);
    return mine.softmax();
  };

  constexpr int kEvery = kPaired ? 2 : 1;
  int k = kPaired ? warpgroup : 0;
  if constexpr (!kPaired) {
    if (warpgroup == 1) pass_turn(1);
    for (; k < part.count && part.to - 1 - k >= needed; ++k) {  // not ours: pass
      begin_turn();
      end_turn(k);
      wait(shared.k_full, k);
      give_back(shared.k_empty, k);
      wait(shared.v_full, k);
      give_back(shared.v_empty, k);
    }
  }
  if (k >= part.count) return;
  wait(shared.k_full, k);
  begin_turn();
  mine.multiply_keys(shared_address(shared.keys[stage(k)]));
  end_turn(k);
  wgmma_wait<0>();
  mine.pin_scores();
  give_back(shared.k_empty, k);
  scores_to_shares(k);
  mine.make_fragments();
  for (; k + kEvery < part.count; k += kEvery) {  // P . V of a step, and under it q . K and the softmax of the next
    const int next = k + kEvery;
    wait(shared.k_full, next);
    begin_turn();
    mine.multiply_keys(shared_address(shared.keys[stage(next)]));
    wait(shared.v_full, k);
    mine.multiply_values(shared_address(shared.values[stage(k)]));
    end_turn(next);
    wgmma_wait<1>();
    mine.pin_scores();
    give_back(shared.k_empty, next);
    const bool moved = scores_to_shares(next);
    // The softmax belongs before the wait, under the product. The assembler moves waits up as far as it can, but not over a branch: hence this loop, which never
    // runs. (Not the branch on `moved` below, which is a warp's own: all four warps of the warpgroup have to wait at the same instruction.)
    mine.pin_scores();
    int steps = part.count;
    for (keep_opaque(steps); steps < 0; keep_opaque(steps)) asm volatile("nanosleep.u32 0;");
    wgmma_wait<0>();
    mine.pin_sums();
    if (moved) mine.rescale();
    give_back(shared.v_empty, k);
    mine.make_fragments();
  }
  wait(shared.v_full, k);
  mine.multiply_values(shared_address(shared.values[stage(k)]));
  wgmma_wait<0>();
  mine.pin_sums();
}
// [/consumer]

}  // namespace nanoqwen
