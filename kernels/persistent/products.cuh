// A consumer warp's way through a matrix: it waits for the units of its pair, takes its blocks out of them, multiplies, and leaves 16 sums for each row tile.
#pragma once

#include "blocks.cuh"
#include "exchange.cuh"

namespace nanoqwen {

constexpr u32 kGoesAToken = !kValidate || kHint ? 1 + 4 * kLayers : 1;  // how often a consumer waits for the publisher

struct Products {
  const Args& a;
  Shared& s;
  int cta, warp, lane;
  u32 at = 0;     // number of the stage's first unit
  u32 tiles = 0;  // buffers of parts that this warp has left
  float squares = 0.0f;  // of this lane's share of x
  bool squares_left = true;

  __device__ __forceinline__ Products(const Args& args, Shared& shared)
      : a(args), s(shared), cta(static_cast<int>(blockIdx.x)), warp(static_cast<int>(warp_id())), lane(static_cast<int>(lane_id())) {}

  // At a stage's start: whatever follows from these is computed anew. Otherwise the compiler computes every stage's addresses once, before
  // the loop over layers, and keeps them in registers that it does not have.
  __device__ __forceinline__ void forget() { keep_opaque(cta), keep_opaque(warp), keep_opaque(lane); }

  __device__ __forceinline__ int pair() const { return warp / 2; }
  __device__ __forceinline__ int half() const { return warp % 2; }

  __device__ __forceinline__ void sync() { consumers_sync<kConsumerThreads>(); }

  __device__ __forceinline__ void at_wait(WaitCode code, u32 number) {
    if (lane == 0) s.fixed.where[warp] = code << 24 | (number & 0xFFFFFF);
  }

  // How often this warp has waited for `go`. In shared memory: a register that is needed once a token is one too many.
  __device__ __forceinline__ u32 went() const { return s.fixed.goes[warp]; }
  __device__ __forceinline__ void wait_go() {
    const u32 before = went();
    at_wait(kAtGo, before);
    barrier_wait(&s.fixed.go, before & 1);  // all lanes: each reads what it makes visible
    __syncwarp();                           // all lanes have read the count
    if (lane == 0) s.fixed.goes[warp] = before + 1;
    __syncwarp();
  }
  __device__ __forceinline__ void wait_exchange() {
    if (!kValidate || kHint) wait_go();
  }

  // ------------------------------------------------------------------------------------------------------------- units

  __device__ __forceinline__ const u8* wait_unit(u32 n) {
    Unit& unit = unit_of(s, n);
    barrier_wait(&unit.full, parity_of(n));  // all lanes: each must see the landed bytes
    return unit.bytes;
  }
  // Give a unit back. The arrival stands behind the loads in the program; the values may still be on their way when it is issued, and they are needed only when
  // they are multiplied. What keeps the copy that it allows behind these loads is the producer's fence (README.md, "A unit is given back"). With kLoaded the
  // arrival's address is made from `read`, a value that all loads went into, and so it waits for them.
  __device__ __forceinline__ void give_back(Unit& unit, u32 read) {
    const u32 nothing = kRelease == kAtOnce ? 0 : zero_behind(read);
    fence_of_reader<kReadersFence>();
    arrive_of_warp<kWarpArrivals>(reinterpret_cast<Barrier*>(reinterpret_cast<u8*>(&unit.empty) + nothing), lane);
  }
  __device__ __forceinline__ void release_unit(u32 n, u32 read) { give_back(unit_of(s, n), read); }

  // This pair's first bundle of a range: pairs take the bundles of their own number modulo kPairs.
  __device__ __forceinline__ int first_bundle(const Range& r) const { return r.first() + (pair() + kPairs - r.first() % kPairs) % kPairs; }

  // [take]
  // This warp's blocks of the next unit of its pair, if there is one. If not, the registers get what lies in some place (without kIdleLoads: in one that nobody
  // writes): a load under a condition would cost copies of all of them. The unit is given back now or, with kBehind, when its registers are filled anew: by
  // then they have been multiplied. `multiplied` is made from the products of what they held.
  template <bool kNow, class Blocks>
  __device__ __forceinline__ void take(Held<Blocks>& held, Place& next, const typename Blocks::Mine& mine, bool there, u32 multiplied = 0) {
    Unit& unit = next.unit();
    if (there) barrier_wait(&unit.full, next.parity);  // all lanes: each must see the landed bytes
    held.blocks.load(kIdleLoads || there ? unit.bytes : s.units[kUnits].bytes, mine);
    if constexpr (kNow || kRelease != kBehind) {
      if (there) give_back(unit, held.blocks.loaded());
      held.from = Place::nowhere();
    } else {
      if (!held.from.is_nowhere()) give_back(held.from.unit(), multiplied);
      held.from = there ? next : Place::nowhere();
    }
    next.step(s);
  }
  // [/take]

  // The first units of a stage wait in registers while x is on its way: their places can be filled again.
  template <class Blocks, int kHeld>
  __device__ __forceinline__ void prefetch(Stock<Blocks, kHeld>& stock, const Range& r) {
    const int bundle = first_bundle(r), end = r.first() + r.units();
    stock.next = Place::of(s, at + static_cast<u32>(bundle - r.first()));
    stock.mine = Blocks::mine(half());
#pragma unroll
    for (int h = 0; h < kHeld; ++h) take<true>(stock.held[h], stock.next, stock.mine, bundle + h * kPairs < end);
  }

  // ------------------------------------------------------------------------------------------------------------ multiply

  // Hand the publisher what `put` writes into the next buffer of parts. All lanes.
  template <class Put>
  __device__ __forceinline__ void leave(const Put& put) {
    jitter<kJitter>();
    const u32 slot = tiles % kTileRing;
    TileParts& parts = s.fixed.tiles[slot];
    barrier_wait(&s.fixed.tile_empty[slot], (tiles / kTileRing & 1) ^ 1);  // all lanes: each writes
    put(parts.sums[warp]);
    // The publisher has read those of the normalised x before: it added that stage's first parts, and these are two buffers on at least.
    if (!squares_left) s.fixed.squares[warp][lane] = squares, squares_left = true;
    arrive_of_warp<kWarpArrivals>(&s.fixed.tile_full[slot], lane);
    ++tiles;
  }

  // Two sums over lanes `bit` apart: the lanes without that bit get `one`, those with it `other`.
  __device__ __forceinline__ float fold(float one, float other, int bit) const {
    return (lane & bit ? other : one) + __shfl_xor_sync(kFullMask, lane & bit ? one : other, bit);
  }
  // Sums of two rows of each of two row tiles. The four lanes of a quad have the same ones, or with kQuadAdds a part each.
  template <bool kQuadAdds>
  __device__ __forceinline__ void leave_pair(const float2& first, const float2& second) {
    float mine;
    if constexpr (kQuadAdds) mine = fold(fold(first.x, second.x, 2), fold(first.y, second.y, 2), 1);
    else mine = lane & 2 ? (lane & 1 ? second.y : second.x) : (lane & 1 ? first.y : first.x);
    leave([&](float* sums) { sums[lane % 4 * 8 + lane / 4] = mine; });
  }

  // The blocks of this warp in the range, and 16 sums for every row tile that the range meets, in order, zeros included. x comes from
  // `own` (slices 2 * warp, 2 * warp + 1) or from `records`, a record a slice. `stock` has the first units (prefetch).
  template <class TheCut, bool kOwn, class Blocks, int kHeld>
  __device__ __forceinline__ void multiply(const Range& r, Stock<Blocks, kHeld>& stock, const OwnBlocks::Own& own, const u8* records) {
    constexpr int kSlices = TheCut::kSlices;
    constexpr bool kWhole = kSlices % kUnitBlocks == 0;  // a bundle lies in one tile
    const int end = r.first() + r.units();
    const int last = (r.hi - 1) / kSlices;
    int tile = r.lo / kSlices;
    float2 before = make_float2(0, 0);  // of the tile before, when it waits for this one
    float top = 0.0f, bottom = 0.0f;
    const auto leave_before = [&](int end) {  // what has been multiplied of the row tiles in front of tile `end`
#pragma unroll 1
      for (; tile < end; ++tile) {
        const float2 now = make_float2(top, bottom);
        const bool waits = waits_for_next(tile, last);
        if (!waits) leave_pair<Blocks::kQuadAdds>(before, now);
        before = waits ? now : make_float2(0, 0);
        top = bottom = 0.0f;
      }
    };
    int bundle = first_bundle(r);
#pragma unroll 1
    while (bundle < end) {
#pragma unroll
      for (int h = 0; h < kHeld; ++h, bundle += kPairs) {  // the registers take turns without being copied
        if (bundle >= end) break;
        const int bundle_tile = bundle * kUnitBlocks / kSlices;
        if constexpr (kWhole) leave_before(bundle_tile);
        const Blocks& mine = stock.held[h].blocks;
        if constexpr (kOwn) {
          const float2 sums = mine.multiply(own);
          top += sums.x, bottom += sums.y;
        } else {
          const int first = bundle * kUnitBlocks + 2 * half();
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int block = first + j;
            if (!kWhole && (block < r.lo || block >= r.hi)) continue;
            const int its_tile = kWhole ? bundle_tile : block / kSlices;
            if constexpr (!kWhole) leave_before(its_tile);
            const float2 sums = mine.multiply(j, records, block - its_tile * kSlices);
            top += sums.x, bottom += sums.y;
          }
        }
        take<false>(stock.held[h], stock.next, stock.mine, bundle + kHeld * kPairs < end, __float_as_uint(top));
      }
    }
    leave_before(last + 1);
    at += static_cast<u32>(r.units());
  }
};

}  // namespace nanoqwen
