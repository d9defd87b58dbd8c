// Who does what: how rows and columns of every matrix fall on CTAs, pairs of warps and units of the ring; the shared memory map.
//
// Units      A token is one stream of units for each CTA: a bundle of four blocks of weights (INT4: 16 rows x four groups; head: 16 rows x
//            128 columns), or the K or the V slice of one page of the cache. One bulk copy, one buffer of the ring, one pair of warps.
// CTAs       q/k/v, o and down are cut by bundles: no CTA has more than one bundle more than another, a row tile may be shared by two
//            CTAs, and the reader adds both parts. Gate, up and the head are cut by whole tiles, because what follows them (SwiGLU, the
//            largest logit) needs finished sums; a CTA has gate and up of the same rows.   7B on 132 SMs, bundles a CTA:
//            q/k/v 15 or 16, o 11 or 12, gate and up 63 each (four CTAs: 56), down 62 or 63, head 2016.
// Warps      A pair of warps takes every kPairs-th bundle, each warp two of its four blocks. With 28 slices and seven pairs that splits the
//            columns: warp w always meets slices 2 w and 2 w + 1, and needs no other part of x.
#pragma once

#include "activations.cuh"
#include "constants.cuh"
#include "int4_block.cuh"
#include "persistent_constants.cuh"  // kCtas, kMostUnits, kAhead..., kValidate, kHint, kStamps, ablations: nanoqwen/cuda/persistent_plan.py
#include "grid.cuh"
#include "kv_page.cuh"
#include "mbarrier.cuh"

namespace nanoqwen {

// When a warp gives a unit back (products.cuh: take).
enum Release {
  kAtOnce,  // behind its loads in the program, which may still be under way: the producer's fence (kFence) keeps the copy behind them
  kLoaded,  // when the loads have brought their values
  kBehind   // when the registers are filled with the pair's next unit; a stage's first units when they are loaded
};

constexpr int kPairs = 7, kConsumers = 2 * kPairs, kConsumerThreads = kConsumers * 32;
constexpr int kProducer = kConsumers, kPublisher = kConsumers + 1, kThreads = 32 * (kConsumers + 2);

// Arrivals of a warp that has used what others will fill or read. One, of lane 0, behind a __syncwarp. racecheck takes only the arriving lane's own accesses for done, and reported those of the
// other 31: in builds for it (kReadersFence, common/mbarrier.cuh) every lane arrives.
constexpr u32 kWarpArrivals = kReadersFence ? 32 : 1;
static_assert(!kReadersFence || kRelease == kAtOnce, "the arrival behind the loads is lane 0's (zero_behind)");

constexpr int kTile = 16, kUnitBlocks = 4;
__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
__device__ constexpr int divided_up(int a, int b) { return (a + b - 1) / b; }
__device__ constexpr int to_lines(int bytes) { return divided_up(bytes, 128) * 128; }

// ------------------------------------------------------------------------------------------------------------------ cuts

// Blocks [lo, hi) of a matrix, numbered row tile by row tile.
struct Range {
  int lo, hi;
  __device__ __forceinline__ int first() const { return lo / kUnitBlocks; }  // bundles
  __device__ __forceinline__ int units() const { return (hi + kUnitBlocks - 1) / kUnitBlocks - lo / kUnitBlocks; }
};

// [cut]
template <int kRowCount, int kSliceCount, bool kByTiles>
struct Cut {
  static constexpr int kRows = kRowCount, kSlices = kSliceCount, kTiles = kRows / kTile, kBlocks = kTiles * kSlices;
  static constexpr int kBundles = divided_up(kBlocks, kUnitBlocks);
  static constexpr bool kWholeTiles = kByTiles;
  static_assert(kRows % kTile == 0, "rows are padded to whole tiles");
  static_assert((kByTiles ? kTiles : kBundles) >= kCtas, "every CTA has a share of every matrix: the exchange's proof needs it");
  static_assert(static_cast<long long>(kByTiles ? kTiles : kBundles) * kCtas < 1ll << 31, "32 bits hold the products of the cut");

  __device__ __forceinline__ static int begin(int cta) {  // first bundle, or first tile
    return static_cast<int>(static_cast<u32>(kByTiles ? kTiles : kBundles) * static_cast<u32>(cta) / kCtas);
  }
  __device__ __forceinline__ static Range range(int cta) {
    constexpr int kStep = kByTiles ? kSlices : kUnitBlocks;
    const int hi = begin(cta + 1) * kStep;
    return {begin(cta) * kStep, hi < kBlocks ? hi : kBlocks};
  }

  // Cut by bundles: the CTA that has bundle b: the largest c with begin(c) <= b.
  __device__ __forceinline__ static int owner(int bundle) {
    return static_cast<int>((static_cast<u32>(bundle + 1) * kCtas - 1) / static_cast<u32>(kBundles));
  }
  __device__ __forceinline__ static int first_owner(int tile) { return owner(tile * kSlices / kUnitBlocks); }
  __device__ __forceinline__ static int parts(int tile) {
    return kByTiles ? 1 : owner(((tile + 1) * kSlices - 1) / kUnitBlocks) - first_owner(tile) + 1;
  }
  // No tile has more.
  static constexpr int kParts = kByTiles ? 1 : (kSlices - 1 + kBundles / kCtas * kUnitBlocks - 1) / (kBundles / kCtas * kUnitBlocks) + 1;
};
// [/cut]

constexpr int kHiddenSlices = kHidden / kGroup, kQSlices = kQSize / kGroup, kInnerSlices = kIntermediate / kGroup;
constexpr int kInnerTiles = kIntermediate / kTile, kQkvRows = kQSize + 2 * kKvSize;
static_assert(kIntermediate % kTile == 0, "gate and up rows are whole tiles each");

using QkvCut = Cut<kQkvRows, kHiddenSlices, false>;
using OCut = Cut<kHidden, kQSlices, false>;
using InnerCut = Cut<kIntermediate, kHiddenSlices, true>;  // of gate; up is the same, kUpBlocks later
using DownCut = Cut<kHidden, kInnerSlices, false>;
using HeadCut = Cut<kVocabRows, kHidden / 32, true>;
constexpr int kUpBlocks = kInnerTiles * kHiddenSlices;
constexpr int kGateTiles = kInnerTiles / kCtas + 1;  // of a CTA, at most
__device__ __forceinline__ Range up_range(int cta) {
  const Range gate = InnerCut::range(cta);
  return {gate.lo + kUpBlocks, gate.hi + kUpBlocks};
}

// Does each warp meet two fixed slices of a matrix with so many? Then its share of x stays in its registers.
// (It must also be whole chunks of 128 elements, as the warp reads them.)
__device__ constexpr int chunks_of(int elements) { return divided_up(elements, 128); }
__device__ constexpr bool keeps_own(int slices, int elements) {
  return kOwnSlices && slices == kUnitBlocks * kPairs && elements == kConsumers * 2 * kGroup && chunks_of(elements) % kConsumers == 0;
}
// Both or neither: a warp that writes its own records must not meet others that read those of the whole CTA.
constexpr bool kOwnX = keeps_own(kHiddenSlices, kHidden) && keeps_own(kQSlices, kQSize);

// Gate and up by turns: tile i of a CTA is tile i * kCtas + cta of the matrix, gate and then up. All CTAs then work on neighbouring
// tiles, and the inner vector becomes ready from its front on, so that most of it can be read and quantised while gate and up still
// stream (consume.cuh). Without it: contiguous tiles, all of gate before all of up.
constexpr bool kStrided = kOwnX && kEarly > 0 && kValidate;
__device__ __forceinline__ int strided_tiles(int cta) { return (kInnerTiles - cta + kCtas - 1) / kCtas; }
__device__ __forceinline__ Range strided_range(int cta, int i, int up) {
  const int lo = (i * kCtas + cta) * kHiddenSlices + up * kUpBlocks;
  return {lo, lo + kHiddenSlices};
}

// Units of gate and up by turns that a warp takes into registers before their x is there; in builds that need registers for something else, as many as in every stage.
constexpr int kHeldGate = kStrided && !kHint && !kJitter ? kHoldGate : kHold;

constexpr int kHiddenPieces = divided_up(chunks_of(kHidden), kConsumers);  // chunks of the hidden vector that a warp keeps
constexpr int kQPieces = divided_up(chunks_of(kQSize), kConsumers);
constexpr int kInnerPieces = divided_up(chunks_of(kIntermediate), kConsumers);

// ------------------------------------------------------------------------------------------------------------- attention

constexpr int kGqa = kNumHeads / kNumKvHeads, kGroupDims = kGqa * kHeadDim;
constexpr int kMostSplits = smaller(kCtas / kNumKvHeads, 32);
static_assert(kMostSplits >= 1, "a CTA for each KV head");
static_assert(kGqa <= 8, "the heads of a group are the eight rows of half a tile");
static_assert(kGqa + 2 <= kConsumers, "a warp for each head that a split's CTA turns");
constexpr int kQueryStride = kHeadDim + 8;  // halves; 16 bytes of padding: the rows of an ldmatrix lie in different banks

// The splits of a step, and this CTA's: computed once a token (the divisions take a while), kept in shared memory.
struct Split {
  int pages, active, head, index, first, last;  // pages [first, last); index >= active: no share
  int dims_lo, dims_hi;                         // this CTA's share of the head group's dimensions when the splits are joined

  __device__ __forceinline__ static Split of(int position, int least_pages, int most, int cta) {
    Split s;
    s.pages = position / kPageTokens + 1;
    s.active = min((s.pages + least_pages - 1) / least_pages, most < kMostSplits ? most : kMostSplits);
    s.head = cta % kNumKvHeads, s.index = cta / kNumKvHeads;
    const bool mine = s.mine();
    s.first = mine ? s.pages * s.index / s.active : 0;
    s.last = mine ? s.pages * (s.index + 1) / s.active : 0;
    s.dims_lo = mine ? kGroupDims / 4 * s.index / s.active * 4 : 0;
    s.dims_hi = mine ? kGroupDims / 4 * (s.index + 1) / s.active * 4 : 0;
    return s;
  }
  __device__ __forceinline__ bool mine() const { return index < active; }
  __device__ __forceinline__ bool has_tail() const { return last == pages; }
};

// -------------------------------------------------------------------------------------------- exchanged words, in global memory
// Offsets in words. Every word is written once a layer.
constexpr int kQkvAt = 0;                                            // [part][row]
constexpr int kVectorAt = kQkvAt + QkvCut::kParts * kQkvRows;        // attention's result
constexpr int kOAt = kVectorAt + kQSize;                             // [part][row]
constexpr int kInnerAt = kOAt + OCut::kParts * kHidden;              // silu(gate) * up
constexpr int kDownAt = kInnerAt + kIntermediate;                    // [part][row]
constexpr int kSplitSumAt = kDownAt + DownCut::kParts * kHidden;     // [split][head][dim]
constexpr int kSplitMaxAt = kSplitSumAt + kMostSplits * kQSize;      // [split][head]
constexpr int kSplitDenAt = kSplitMaxAt + kMostSplits * kNumHeads;
constexpr int kExchangeWords = kSplitDenAt + kMostSplits * kNumHeads;
static_assert(kQSize % 4 == 0 && kHidden % 4 == 0 && kQkvRows % 4 == 0 && kIntermediate % 4 == 0, "vectors of four words are aligned");

// Counts of arrivals: [set][layer][slot], a line each; a set is used every other token and cleared in between. Then the token's own count.
enum CountSlot { kQkvCount = 0, kOCount = 1, kInnerCount = 2, kDownCount = 3, kVectorCount = 4, kSplitCount = kVectorCount + kNumKvHeads, kSlots = kSplitCount + kNumKvHeads };
constexpr int kLineWords = 32, kSetWords = kLayers * kSlots * kLineWords, kEndAt = 2 * kSetWords, kCountWords = kEndAt + kLineWords;

// ------------------------------------------------------------------------------------------------------------ shared memory

constexpr int kInt4Unit = kUnitBlocks * Int4Block::kBytes, kHeadUnit = kUnitBlocks * 1024;
constexpr int kUnitBytes = to_lines(larger(larger(kInt4Unit, kHeadUnit), kSliceBytes));
constexpr int kTileRing = 2;  // pairs of row tiles whose parts may wait for the publisher
static_assert(kTogether == 1 || kTogether == 2, "a buffer of parts has room for two row tiles");

struct TileParts {
  float sums[kConsumers][2 * kTile];
};

// The row tiles of a stage go to the publisher in pairs, so that it has one buffer to add, not two, when a stage ends. They are paired from the last one back: if their
// number is odd, the first goes by itself, in the second half of its buffer. (With kTogether 1 all go so.)
__device__ __forceinline__ bool waits_for_next(int tile, int last) { return kTogether == 2 && (last - tile) & 1; }

struct LayerPointers {
  const u8 *qkv, *o, *gate_up, *down;
  const u16 *input_norm, *post_norm, *q_bias, *k_bias, *v_bias;
};

struct AttentionScratch {
  u16 queries[16][kQueryStride];  // rows 0..7 high parts, 8..15 low parts
  float sums[kPairs][kGqa][kHeadDim];
  float maxima[kPairs][8], denominators[kPairs][8];
};

// One region, three uses that cannot meet (README.md, "Scratch"): attention; records of the MLP's inner vector; halves for the head.
constexpr int kScratchBytes = to_lines(larger(larger(static_cast<int>(sizeof(AttentionScratch)), kInnerSlices * kRecordBytes), kHidden * 4));
constexpr int kRecordCount = larger(kHiddenSlices, kQSlices);

struct Fixed {  // everything but the ring's buffers and barriers
  alignas(128) u8 scratch[kScratchBytes];
  alignas(16) u8 records[kRecordCount * kRecordBytes];
  TileParts tiles[kTileRing];
  float squares[kConsumers][32];  // of each lane's share of x, for RMSNorm; they go with a stage's first buffer of parts
  float gate[kStrided ? 1 : kGateTiles][kTile];
  LayerPointers layers[kLayers];
  int token, position;
  u32 serial;
  Split split;
  u32 goes[kConsumers];       // how often each consumer warp has waited for `go`
  u32 where[kConsumers + 1];  // for the watchdog: what each warp waits for, WaitCode << 24 | a number
  Barrier tile_full[kTileRing], tile_empty[kTileRing], go, begun;
};

enum WaitCode { kAtGo = 1, kAtUnit, kAtTile, kAtWords, kAtSync, kAtEmpty, kAtLanding, kAtBegun };

constexpr int kSharedMost = 227 * 1024;
// A place of the ring: one address is enough for the bytes and their barriers.
struct Unit {
  alignas(128) u8 bytes[kUnitBytes];  // copies into whole lines: at 16 bytes they take so much longer that a token did, by a fourteenth
  Barrier full, empty;
};
constexpr int kIdlePlaces = kIdleLoads ? 0 : 1;  // behind the ring
constexpr int kUnits = smaller(kMostUnits, (kSharedMost - static_cast<int>(sizeof(Fixed)) - 256) / static_cast<int>(sizeof(Unit)) - kIdlePlaces);
static_assert(kUnits >= 2 * kPairs, "a ring that every pair finds twice");
// A parity tells two rounds of the ring apart, not three. So nobody may wait for a unit while the one before it in the same place, kUnits
// earlier, has not landed: it would be taken for the unit wanted. A warp that waits for unit n has taken one at most 2 * kPairs - 1 before n (from one stage's
// end to the next one's beginning). That one was asked for in a round of kLanes, and before a round the producer has waited for every unit that is
// `ahead` before its first, one after the other: where `ahead` shrinks from one stage to the next, for those in between as well (stream.cuh: catch_up).
// Around K and V a warp may leave out more units than that: there all warps of the CTA have met at a barrier, in front of the pages and behind
// them, and each has taken what was its own.
constexpr int kLanes = kUnits >= kAheadLate + 8 + 2 * kPairs - 1 ? kAsk : smaller(kAsk, 4);
constexpr int kMostAhead = kUnits - kLanes - (2 * kPairs - 1);
static_assert(kMostAhead >= 4, "a ring with room for what is in flight");
constexpr u32 kInFlightEarly = smaller(kAheadEarly, kMostAhead), kInFlightPages = smaller(kAheadPages, kMostAhead), kInFlightMiddle = smaller(kAheadMiddle, kMostAhead), kInFlightLate = smaller(kAheadLate, kMostAhead);

struct Shared {
  Fixed fixed;  // 128-aligned: first
  Unit units[kUnits + kIdlePlaces];
};
static_assert(sizeof(Shared) <= kSharedMost, "one CTA's shared memory");

// Unit number n of the stream lies in place n % kUnits; its barriers' phase is n / kUnits.
__device__ __forceinline__ Unit& unit_of(Shared& s, u32 n) { return s.units[n % kUnits]; }
__device__ __forceinline__ u32 parity_of(u32 n) { return n / kUnits & 1; }

// Where a consumer warp goes on in the ring: its units are kPairs apart. Kept as the place's address in shared memory and the parity of its phase: a step takes four
// instructions, where n % kUnits takes six, and whatever lies in the place is one addition away.
struct Place {
  u32 at, parity;
  static constexpr u32 kRing = kUnits * sizeof(Unit), kStep = kPairs * sizeof(Unit);
  static_assert(kStep <= kRing, "a step wraps around once at most");

  __device__ __forceinline__ static Place of(Shared& s, u32 n) { return {shared_address(s.units) + n % kUnits * static_cast<u32>(sizeof(Unit)), parity_of(n)}; }
  __device__ __forceinline__ Unit& unit() const { return *reinterpret_cast<Unit*>(shared_pointer(at)); }
  __device__ __forceinline__ static Place nowhere() { return {~0u, 0}; }
  __device__ __forceinline__ bool is_nowhere() const { return at == ~0u; }
  __device__ __forceinline__ void step(Shared& s) {
    at += kStep;
    if (at >= shared_address(s.units) + kRing) at -= kRing, parity = 1 - parity;
  }
};

}  // namespace nanoqwen
