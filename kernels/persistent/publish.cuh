// The publisher: one warp that adds up what the consumer warps leave of each row tile, hands it to the other SMs, and watches for theirs.
//
// It works tile by tile while the consumers go on, so that at a stage's end only one tile is left to add; and nobody but it ever polls
// a counter.
#pragma once

#include "allowed.cuh"
#include "candidate.cuh"
#include "exchange.cuh"
#include "step.cuh"

namespace nanoqwen {

struct Publisher {
  const Args& a;
  Shared& s;
  u32 tiles = 0;

  __device__ __forceinline__ Publisher(const Args& args, Shared& shared) : a(args), s(shared) {}

  __device__ __forceinline__ int cta() const { return static_cast<int>(blockIdx.x); }
  __device__ __forceinline__ int lane() const { return static_cast<int>(lane_id()); }

  // Let the consumers go on. It cannot be two phases ahead of one of them: between two calls this warp adds up row tiles, and for that
  // every consumer warp has left its part, behind the wait for the call before. (Every CTA has a tile in every stage: plan.cuh.)
  __device__ __forceinline__ void let_go() {
    arrive_of_warp<kWarpArrivals>(&s.fixed.go, lane());
  }

  // The next buffer of parts, when all warps have left theirs, added up: row lane % 16 of two row tiles. Always the same order of additions. With kNorm the first one of
  // a stage also gives 1 / rms, from the lanes' sums of squares.
  template <bool kNorm>
  __device__ __forceinline__ float next_pair(float& scale, bool first) {
    const u32 slot = tiles % kTileRing;
    TileParts& parts = s.fixed.tiles[slot];
    wait_watched([&] { return barrier_try(&s.fixed.tile_full[slot], tiles / kTileRing & 1); }, a, s, 111, tiles);  // all lanes: each reads
    jitter<kJitter>();
    const float sum = of_warps(parts.sums);
    if (kNorm && first) scale = rsqrtf(warp_sum(of_warps(s.fixed.squares)) / kHidden + kRmsEps);
    arrive_of_warp<kWarpArrivals>(&s.fixed.tile_empty[slot], lane());
    ++tiles;
    return kNorm ? sum * scale : sum;
  }

  // This lane's column, in two chains: half as long to wait for.
  __device__ __forceinline__ float of_warps(const float (&parts)[kConsumers][32]) const {
    float front = 0.0f, back = 0.0f;
#pragma unroll
    for (int w = 0; w < kPairs; ++w) front += parts[w][lane()], back += parts[kPairs + w][lane()];
    return front + back;
  }

  // All row tiles of a range of blocks, pair by pair. What `prepare` makes of this lane's row of the matrix before the sums are there goes to `take` with the row and its sum.
  template <class TheCut, bool kNorm, class Prepare, class Take>
  __device__ __forceinline__ void tiles_of(const Range& r, const Prepare& prepare, const Take& take) {
    const int first = r.lo / TheCut::kSlices, last = (r.hi - 1) / TheCut::kSlices, begin = first + waits_for_next(first, last);
    float scale = 1.0f;
#pragma unroll 1
    for (int end = begin; end <= last; end += kTogether) {
      const int tile = end - 1 + lane() / kTile;
      const bool there = tile > end - kTogether && tile >= first;  // half the buffer is empty if a tile goes by itself
      const int row = (there ? tile : end) * kTile + lane() % kTile;
      const auto prepared = prepare(row);
      const float sum = next_pair<kNorm>(scale, end == begin);
      if (there) take(prepared, row, sum);
    }
  }

  // Rows of a matrix cut by bundles, into [part][row].
  template <class TheCut, bool kNorm>
  __device__ __forceinline__ void rows(int words_at, u32 tag) {
    const Range r = TheCut::range(cta());
    const int first = r.lo / TheCut::kSlices, part = cta() - TheCut::first_owner(first);  // of the first tile; the others begin in this CTA
    const auto word = [&](int row) {
      int at = words_at + (row / kTile == first ? part : 0) * TheCut::kRows + row;
      keep_opaque(at);  // computed while the sums are not there
      return at;
    };
    tiles_of<TheCut, kNorm>(r, word, [&](int at, int, float sum) { store_relaxed(a.words + at, tagged(sum, tag)); });
  }

  __device__ __forceinline__ static float silu(float x) { return x / (1.0f + expf(-x)); }

  __device__ __forceinline__ void inner(u32 tag) {
    float scale = 1.0f;
    if constexpr (kStrided) {  // gate and up of a tile follow each other
      const int count = strided_tiles(cta());
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        const float gate = next_pair<true>(scale, i == 0), up = __shfl_xor_sync(kFullMask, gate, kTile);
        if (lane() < kTile) store_relaxed(a.words + kInnerAt + (i * kCtas + cta()) * kTile + lane(), tagged(silu(gate) * up, tag));
      }
    } else {
      const Range r = InnerCut::range(cta());
      const auto gate_at = [&](int row) { return &s.fixed.gate[row / kTile - r.lo / kHiddenSlices][row % kTile]; };  // written and read by the same lane
      tiles_of<InnerCut, true>(r, gate_at, [&](float* at, int, float gate) { *at = silu(gate); });
      tiles_of<InnerCut, true>(r, gate_at, [&](float* at, int row, float up) { store_relaxed(a.words + kInnerAt + row, tagged(*at * up, tag)); });
    }
  }

  // This CTA has published. With values that validate themselves the count is a hint when to look; else it is the barrier.
  __device__ __forceinline__ void arrive(u32* count) {
    if (kValidate && !kHint) return;
    __syncwarp();
    if (lane() == 0) {
      if (kValidate) add_relaxed(count, 1);
      else add_release(count, 1);
    }
  }

  __device__ __forceinline__ void watch(const u32* count, u32 target, u32 code) {
    if (kValidate && !kHint) return;
    if (lane() == 0) wait_watched([&] { return reached(count, target); }, a, s, code, target);
    let_go();
  }

  __device__ __forceinline__ void layer(int layer, const Turn& turn, const Split& split) {
    const bool hints = !kValidate || kHint;
    rows<QkvCut, true>(kQkvAt, turn.tag);
    if constexpr (!kValidate) arrive(turn.counts + kQkvCount * kLineWords);  // read by attention's CTAs alone, which watch the words
    if (lane() == 0) stamp(a, layer, kQkvOut);

    if (hints && !kNoAttention) {
      const u32 target = kConsumers * split.active;
      if (lane() < kNumKvHeads)
        wait_watched([&] { return reached(turn.counts + (kVectorCount + lane()) * kLineWords, target); }, a, s, 121, target);
      let_go();
    } else if (hints) {
      let_go();
    }
    if (lane() == 0) stamp(a, layer, kVectorSeen);

    rows<OCut, false>(kOAt, turn.tag);
    arrive(turn.counts + kOCount * kLineWords);
    if (lane() == 0) stamp(a, layer, kOOut);
    watch(turn.counts + kOCount * kLineWords, kCtas, 122);
    if (lane() == 0) stamp(a, layer, kOSeen);

    inner(turn.tag);
    arrive(turn.counts + kInnerCount * kLineWords);
    if (lane() == 0) stamp(a, layer, kInnerOut);
    watch(turn.counts + kInnerCount * kLineWords, kCtas, 123);
    if (lane() == 0) stamp(a, layer, kInnerSeen);

    rows<DownCut, false>(kDownAt, turn.tag);
    arrive(turn.counts + kDownCount * kLineWords);
    if (lane() == 0) stamp(a, layer, kDownOut);
    watch(turn.counts + kDownCount * kLineWords, kCtas, 124);
    if (lane() == 0) stamp(a, layer, kDownSeen);
  }

  // Logits of this CTA's rows; the best of them that may be chosen, in all lanes.
  __device__ __forceinline__ Candidate head() {
    Candidate mine{-kLargestFloat, 0x7FFFFFFF};
    tiles_of<HeadCut, false>(HeadCut::range(cta()), [&](int row) { return is_allowed(a.allowed, row); }, [&](bool allowed, int row, float logit) {
      a.logits[row] = logit;
      if (allowed) mine = better(mine, {logit, is_finite(logit) ? row : -1});
    });
    return best_of_warp(mine);
  }

  // The best of all CTAs, in all lanes. Everything that any thread of any CTA wrote in this token is visible to whoever this releases.
  __device__ __forceinline__ Candidate choose(Candidate mine, u32 serial) {
    u32* count = a.counts + kEndAt;
    if (lane() == 0) {
      u32* place = reinterpret_cast<u32*>(a.candidates + cta());
      store_relaxed2(place, __float_as_uint(mine.value), static_cast<u32>(mine.index));
      fence_copies();  // rows of the cache are written by ordinary stores and read by copies
    }
    __syncwarp();
    if (lane() == 0) {
      add_release(count, 1);
      wait_watched([&] { return static_cast<int>(load_acquire(count) - (serial + 1) * kCtas) >= 0; }, a, s, 125, serial);
    }
    __syncwarp();
    Candidate best{-kLargestFloat, 0x7FFFFFFF};
    for (int c = lane(); c < kCtas; c += 32) {
      const uint2 other = load_relaxed2(reinterpret_cast<const u32*>(a.candidates + c));
      best = better(best, {__uint_as_float(other.x), static_cast<int>(other.y)});
    }
    return best_of_warp(best);
  }

  __device__ __forceinline__ void run() {
    const u32 first_serial = *a.serial;
    int token = a.step[0], position = a.step[1];
    for (int k = 0; k < a.tokens; ++k, ++position) {
      const u32 serial = first_serial + k;
      // Nobody counts in the other set now: clear it for the next token.
      u32* other = a.counts + ((serial + 1) & 1) * kSetWords;
      for (int i = cta() * 32 + lane(); i < kLayers * kSlots; i += kCtas * 32) store_relaxed(other + i * kLineWords, 0);
      const Split split = Split::of(position, a.split_pages, a.splits, cta());
      if (lane() == 0) s.fixed.token = token, s.fixed.position = position, s.fixed.serial = serial, s.fixed.split = split;
      __syncwarp();
      if (lane() == 0) barrier_arrive(&s.fixed.begun);
      let_go();
#pragma unroll 1
      for (int l = 0; l < kLayers; ++l)
        layer(l, Turn{tag_of(serial, l), counts_of(a, serial, l)}, split);
      const Candidate best = choose(head(), serial);
      if (cta() == 0 && lane() == 0) {
        Step* step = reinterpret_cast<Step*>(a.step);
        if (a.chooses) advance(step, a.told, best.index);
        else step->next_token = best.index;
        *a.serial = serial + 1;
        fence_system();  // the host may read `told` while the kernel goes on
      }
      token = best.index < 0 ? 0 : best.index;
    }
  }
};

}  // namespace nanoqwen
