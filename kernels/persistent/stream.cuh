// The producer: asks for every unit of a token, in the order in which they are used, and never stops between stages.
#pragma once

#include "exchange.cuh"

namespace nanoqwen {

// kLanes lanes of one warp, each asking for every kLanes-th unit. One lane alone takes about 70 instructions a unit, most of which wait for the one
// before: more cycles than the card's share of 4 KiB takes to arrive. Side by side they cost the same once for kLanes units. All 32 lanes go
// through the loops together, a __syncwarp a round: a lane left behind could find a landing's barrier two phases on, and wait for ever.
// [producer]
struct Producer {
  const Args& a;
  Shared& s;
  const u64 policy;
  const int lane;
  u32 next = 0;  // number of the stage's first unit; the same in all lanes
  u32 seen = 0;  // of all units below it a lane has waited for the landing
  u32 full_cycles = 0, flight_cycles = 0;

  __device__ __forceinline__ Producer(const Args& args, Shared& shared) : a(args), s(shared), policy(evict_first_policy()), lane(static_cast<int>(lane_id())) {}

  // At a stage's start: wait for the landings that the stage before has left and this one, which allows fewer in flight, would never look at. (plan.cuh: why none
  // may be left out.) All lanes.
  __device__ __forceinline__ void catch_up(u32 ahead) {
#pragma unroll 1
    for (u32 round = seen; round + ahead < next; round += kLanes) {
      const u32 n = round + lane;
      if (lane < kLanes && n + ahead < next) barrier_wait(&unit_of(s, n).full, parity_of(n));
      __syncwarp();
    }
  }
  // At its end: its units have been asked for, so all have been seen that are `ahead` before one of them.
  __device__ __forceinline__ void asked(int count, u32 ahead) {
    next += static_cast<u32>(count);
    seen = next > ahead ? max(seen, next - ahead) : seen;
  }

  // Ask for unit n; lanes below kLanes, each another. At most `ahead` units (and the lanes' own) are on their way at a time: more, and every small access of the exchanges
  // waits behind them in L2's queues (book/receipts/persistent_parts.json: flight_less, flight_more).
  template <bool kWeights>
  __device__ __forceinline__ void ask(u32 n, const u8* from, u32 bytes, u32 ahead) {
    u64 before = 0;
    if constexpr (kStamps) before = cycles();
    // Its buffer cannot have been asked for again: that unit would be n - ahead + kUnits, of a later round.
    if (n >= ahead) barrier_wait(&unit_of(s, n - ahead).full, parity_of(n - ahead));
    if constexpr (kStamps) flight_cycles += static_cast<u32>(cycles() - before), before = cycles();
    Unit& unit = unit_of(s, n);
    if (lane == 0) s.fixed.where[kProducer] = kAtEmpty << 24 | (n & 0xFFFFFF);
    barrier_wait(&unit.empty, parity_of(n) ^ 1);
    // Its last content was read by ordinary loads, which may still be under way: the copy goes another way than they do, and only the fence keeps it behind them.
    if constexpr (kFence) fence_for_copies();
    if constexpr (kStamps) full_cycles += static_cast<u32>(cycles() - before);
    if (kNoWeights) {
      barrier_arrive(&unit.full);
    } else {
      barrier_arrive_expect(&unit.full, bytes);
      if constexpr (kWeights) bulk_copy(unit.bytes, from, bytes, &unit.full, policy);
      else bulk_copy(unit.bytes, from, bytes, &unit.full);
    }
  }

  __device__ __forceinline__ void matrix(const u8* bundles, Range r, int unit_bytes, u32 ahead) {
    const u8* from = bundles + static_cast<size_t>(r.first()) * unit_bytes;
    const int count = r.units();
    catch_up(ahead);
#pragma unroll 1
    for (int round = 0; round < count; round += kLanes) {
      const int i = round + lane;
      jitter<kJitter>();
      if (lane < kLanes && i < count) ask<true>(next + i, from + static_cast<size_t>(i) * unit_bytes, unit_bytes, ahead);
      __syncwarp();
    }
    asked(count, ahead);
  }

  // K and V by turns. The last page first: it holds the token's own row, which the consumers put into its copy before they touch any page.
  // Coming last, it might find no room: a long split has more pages than the ring.
  __device__ __forceinline__ void pages(int layer, const Split& split) {
    const u16* values[2];
    for (int v = 0; v < 2; ++v) values[v] = a.pool + static_cast<size_t>(2 * layer + v) * a.pool_pages * kPageHalves;
    const int count = 2 * (split.last - split.first);
    catch_up(kInFlightPages);
    int number = lane < count ? a.block_table[split.last - 1 - lane / 2] : 0;
#pragma unroll 1
    for (int round = 0; round < count; round += kLanes) {
      const int i = round + lane;
      const size_t slice = page_row(number, split.head, 0);
      if (i + kLanes < count) number = a.block_table[split.last - 1 - (i + kLanes) / 2];  // on its way while this unit waits for room
      if (lane < kLanes && i < count) ask<false>(next + i, reinterpret_cast<const u8*>((i % 2 ? values[1] : values[0]) + slice), kSliceBytes, kInFlightPages);
      __syncwarp();
    }
    asked(count, kInFlightPages);
  }

  __device__ __forceinline__ void run() {
    const int cta = static_cast<int>(blockIdx.x), first_position = a.step[1];
    for (int token = 0; token < a.tokens; ++token) {
      const Split split = Split::of(first_position + token, a.split_pages, a.splits, cta);
#pragma unroll 1
      for (int layer = 0; layer < kLayers; ++layer) {
        const LayerPointers& w = s.fixed.layers[layer];
        matrix(w.qkv, QkvCut::range(cta), kInt4Unit, kInFlightEarly);
        // Rows of the cache that the last token wrote: its end, at all CTAs, lies behind the barrier.
        if (layer == 0) {
          barrier_wait(&s.fixed.begun, token & 1);
          fence_copies();
        }
        if (!kNoAttention) pages(layer, split);
        matrix(w.o, OCut::range(cta), kInt4Unit, kInFlightEarly);
        if constexpr (kStrided) {
          const int halves = 2 * strided_tiles(cta);
#pragma unroll 1
          for (int i = 0; i < halves; ++i) matrix(w.gate_up, strided_range(cta, i / 2, i % 2), kInt4Unit, i < halves / 2 ? kInFlightMiddle : kInFlightLate);
        } else {
          matrix(w.gate_up, InnerCut::range(cta), kInt4Unit, kInFlightMiddle);
          matrix(w.gate_up, up_range(cta), kInt4Unit, kInFlightLate);
        }
        matrix(w.down, DownCut::range(cta), kInt4Unit, kInFlightLate);
        if constexpr (kStamps) {
          if (lane == 0) {
            u32* at = a.stamps + (blockIdx.x * kLayers + layer) * kEvents;
            at[kRingFull] = full_cycles, at[kInFlight] = flight_cycles;
          }
          full_cycles = flight_cycles = 0;
        }
      }
      matrix(a.head, HeadCut::range(cta), kHeadUnit, kInFlightLate);
    }
  }
};
// [/producer]

}  // namespace nanoqwen
