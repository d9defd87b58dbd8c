// y = W . X^T for up to 8 or 16 tokens: INT4 weights and digits of activations on integer tensor cores, as batch-1 decode multiplies.
//
// Computes   an m16n8k32 has eight columns: the high and the low digits of four tokens (digit_x.cuh). A block of weights is unpacked once (three instructions for
//            eight weights, where FP16 takes nine) and multiplied with two or four tiles of four tokens. 256 * high + low is exact in 32 bits; a group's sum becomes
//            a float once a tile, times the scales of both.
// Moves      the weights once; of X, each CTA the columns that it multiplies, once. No warp only copies: what bounds these products is how many instructions a warp
//            has from one column's arrival to the next.
//
//   column     kColumnUnits units of K: of a row tile one bundle of weights, one bulk copy of whole lines
//   warps      pairs x splits, up to 12, all alike. Warp (pair, share) has two row tiles, which use a fragment of X twice, and takes every splits-th column that the CTA
//              comes to. It has a place in shared memory for both bundles of a column. It pulls them into registers and asks for the next column before it
//              multiplies: the copy has as long to arrive as the products take.
//   X          stays: a stage for each column of K that the CTA has (the plan sees to it that there are enough), all asked for at once; no stage is filled twice.
//   sums       of the shares of a pair meet in shared memory at the end of an item, in the order of shares, a row tile at a time.
//   CTA        one on each SM, never two (stream_gemv.cuh says why).
// Launch     as many CTAs as the plan says (nanoqwen/cuda/prefill_digits.py) of a warp for each pair of row tiles and share of K; dynamic shared memory as the plan
//            counts it: X, barriers, feeds, then a place a warp and the sums of shares behind them.
//
// Barriers   name             arrivals     who arrives                             who waits        means
//            full[warp]       1 + bytes    lane 0 of the warp (expect_tx)          the warp         a column's bundles have landed
//            x.full[s]        1 + bytes    a lane of warp 0 (expect_tx)            all warps        a column of X has landed; one phase
//            bar 1 + pair     32 x splits  the warps of the pair; no other         the same         four times an item (splits > 1): sums of a row tile may be
//                                                                                                   written; are written
//            One __syncthreads, all threads, after the barriers are initialised. No `empty`: who refills a column's place is who has read it, behind a fence.
#pragma once

#include "digit_x.cuh"
#include "gemm_unit.cuh"

namespace nanoqwen {

constexpr int kDigitWarps = 12, kColumnUnits = 4;
constexpr int kColumnGroups = kColumnUnits * kUnitGroups;

struct DigitFeed;

// [shape]
template <int kTokens>
struct DigitShape {
  static constexpr int kTiles = kTokens / kTileTokens, kXStages = 28 / kTiles - (kGroup < 128);
  static constexpr int kUnitBytes = kTiles * kDigitTile, kXBytes = kColumnUnits * kUnitBytes, kBundleBytes = kColumnGroups * Int4Block::kBytes;
  static constexpr int kSlotBytes = 2 * kBundleBytes;
  static constexpr int kBarriersAt = kXStages * kXBytes, kBarriers = kXStages + kDigitWarps, kFeedsAt = kBarriersAt + 512, kWeightsAt = kFeedsAt + 512;
  static constexpr int kHold = kGroup == 128 ? 4 : 2;       // units of both row tiles that a warp has in registers
  static constexpr int kSumBytes = kTiles * 2 * kWarp * 4;  // of one row tile
  static_assert(8 * kBarriers <= 512 && 20 * kDigitWarps <= 512, "as the host counts them");

  __device__ __forceinline__ static u32 x_full(int stage) { return shared_address(gemm_shared) + kBarriersAt + 8 * stage; }
  __device__ __forceinline__ static u32 full(int warp) { return x_full(kXStages + warp); }
  __device__ __forceinline__ static DigitFeed& feed(int warp) { return reinterpret_cast<DigitFeed*>(gemm_shared + kFeedsAt)[warp]; }
  __device__ __forceinline__ static u8* weights(int warp) { return gemm_shared + kWeightsAt + warp * kSlotBytes; }
};
// [/shape]

struct DigitOperands {
  const u8* blocks;
  const u8* x;
  int splits;  // warps of a CTA that share the K of a pair of row tiles
};

// [walk]
// Who a warp is, and the CTA's way: items [begin, end) in turn, whole ones, or its share of the line of columns (gemm_work.cuh; there is one token tile, and a quantum
// is a column).
struct DigitRole {
  int pair, share, begin, end;

  __device__ __forceinline__ explicit DigitRole(const Work& w) : begin(first_position(w)), end(w.whole ? w.whole : last_position(w)) {
    const int pairs = w.tiles / 2;
    share = static_cast<int>(warp_id()) / pairs, pair = static_cast<int>(warp_id()) - share * pairs;
  }
};

__device__ __forceinline__ int all_columns(const Work& w) { return (w.groups + kColumnGroups - 1) / kColumnGroups; }

// Columns first .. first + columns of a row of items.
struct Stretch {
  int row, first, columns;

  __device__ __forceinline__ static Stretch of(const Work& w, const DigitRole& role, int at) {
    const int all = all_columns(w);
    if (w.whole) return {at, 0, all};
    const int row = at / all, first = at - row * all;
    return {row, first, min(all - first, role.end - at)};
  }
  __device__ __forceinline__ int next(const Work& w, int at) const { return at + (w.whole ? static_cast<int>(gridDim.x) : columns); }
};
// [/walk]

// [feed]
// What a warp asks for, both row tiles of a column at a time. Lane 0's, in shared memory: registers are scarce.
struct DigitFeed {
  int at, column, columns, first, row;  // column: of the item in work; may lie in a later one

  // Ask for the next column, if there is one. Lane 0, behind the fence that the last readers of its place need; `zero` is known when they have read.
  template <class Shape, class Epilogue>
  __device__ __forceinline__ static void fill(const DigitRole& role, u32 zero, const Work& work, const DigitOperands& o, const Epilogue& epilogue) {
    DigitFeed& kept = Shape::feed(warp_id());
    DigitFeed f = kept;
    while (f.column >= f.columns) {
      if (f.at >= role.end) return;
      f.column -= f.columns;
      const Stretch s = Stretch::of(work, role, f.at);
      f.row = s.row, f.first = s.first, f.columns = s.columns;
      f.at = s.next(work, f.at);
    }
    const int group = (f.first + f.column) * kColumnGroups;
    f.column += o.splits;
    kept = f;
    const u32 full = Shape::full(warp_id()) + zero, bytes = min(kColumnGroups, work.groups - group) * Int4Block::kBytes;
    const u64 policy = evict_first_policy();
    const int tile[2] = {epilogue.row_tile(work.tiles, f.row, role.pair, 0), epilogue.row_tile(work.tiles, f.row, role.pair, 1)};
    barrier_arrive_expect(full, ((tile[0] >= 0) + (tile[1] >= 0)) * bytes);
#pragma unroll
    for (int m = 0; m < 2; ++m)
      if (tile[m] >= 0)
        bulk_copy(shared_address(Shape::weights(warp_id())) + m * Shape::kBundleBytes, o.blocks + static_cast<u32>(tile[m] * work.groups + group) * Int4Block::kBytes, bytes, full,
                  policy);
  }
};
// [/feed]

template <int kTokens, class Epilogue>
struct DigitWarp {
  using Shape = DigitShape<kTokens>;
  static constexpr int kTiles = Shape::kTiles;
  const Work& work;
  const DigitOperands& o;
  const Epilogue& epilogue;
  const DigitRole& role;
  u32 parity = 0;           // of the column that arrives next
  int column, x_stage = 0;  // of the item: the next column, and the stage of X of its column 0

  __device__ __forceinline__ DigitWarp(const Work& work_, const DigitOperands& o_, const Epilogue& epilogue_, const DigitRole& role_)
      : work(work_), o(o_), epilogue(epilogue_), role(role_), column(role_.share) {}

  // Lane 0.
  __device__ __forceinline__ void fill(u32 zero) { DigitFeed::fill<Shape>(role, zero, work, o, epilogue); }

  // [digit_loop]
  // One unit of the warp's two row tiles; x: the unit's first tile. sums[m][tile][half]: row g + 8 half of row tile m, the t-th token of the tile.
  __device__ __forceinline__ void multiply(const Unit& unit, const u8* x, float (&sums)[2][kTiles][2]) const {
#pragma unroll
    for (int group = 0; group < kUnitGroups; ++group) {
      u32 a[2][kGroupSteps][4];
      float scale[2][2];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        scale[m][0] = low_half(unit.raw[m][group]), scale[m][1] = high_half(unit.raw[m][group]);
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
          for (int i = 0; i < kGroupSteps; ++i) {
            u32 bytes[2];
            int4::unpack_bytes(reinterpret_cast<const u32*>(&unit.words[m][r][group])[i], bytes);
            a[m][i][r] = bytes[0], a[m][i][2 + r] = bytes[1];
          }
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        // No load of X is moved in front of it: without, the compiler has more on their way than there are registers for, and spills.
        if (kTiles == 4 && tile == 0) __syncwarp();
        const u8* const mine = x + tile * kDigitTile + lane_id() * 16;
        alignas(16) u32 b[2 * kGroupSteps];
        if constexpr (kGroupSteps >= 2) {
#pragma unroll
          for (int i = 0; i < kGroupSteps / 2; ++i) *reinterpret_cast<uint4*>(&b[4 * i]) = *reinterpret_cast<const uint4*>(mine + (group * kGroupSteps / 2 + i) * 512);
        } else {
          *reinterpret_cast<uint2*>(b) = *reinterpret_cast<const uint2*>(mine + group / 2 * 512 + group % 2 * 8);
        }
        const float x_scale = *reinterpret_cast<const float*>(x + tile * kDigitTile + kTileDigits + 16 * group + 4 * (lane_id() % 4));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          int s[4] = {0, 0, 0, 0};
#pragma unroll
          for (int i = 0; i < kGroupSteps; ++i) mma_s8(s, a[m][i][0], a[m][i][1], a[m][i][2], a[m][i][3], b[2 * i], b[2 * i + 1]);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float sum = static_cast<float>(s[2 * half] * 256 + s[2 * half + 1]);
            sums[m][tile][half] = fmaf(sum, scale[m][half] * x_scale, sums[m][tile][half]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void run_item(int at, const Stretch& item) {
    float sums[2][kTiles][2];
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) sums[i / (2 * kTiles)][i / 2 % kTiles][i % 2] = 0.0f;
#pragma unroll 1
    for (; column < item.columns; column += o.splits, parity ^= 1) {
      const int first = (item.first + column) * kColumnGroups;
      const u8* const x = gemm_shared + (x_stage + column) * Shape::kXBytes;
      patient_wait(Shape::full(warp_id()), parity);
#pragma unroll
      for (int part = 0; part < kColumnUnits; part += Shape::kHold) {
        Unit held[Shape::kHold];
        u32 loaded = 0;
#pragma unroll
        for (int u = 0; u < Shape::kHold; ++u) {
          held[u].load(Shape::weights(warp_id()), Shape::kBundleBytes, (part + u) * kUnitGroups, work.groups - first - (part + u) * kUnitGroups);
          loaded |= loaded_words(held[u].words) | loaded_words(held[u].raw);
        }
        if (part + Shape::kHold == kColumnUnits) {
          // All lanes hold the rest of the column: its place may be filled again (mbarrier.cuh: refill).
          const u32 zero = zero_behind(loaded);
          fence_for_copies();
          __syncwarp();
          dawdle(0);
          if (lane_id() == 0) fill(zero);
        }
        if (part == 0) patient_wait(Shape::x_full(x_stage + column), 0);
#pragma unroll
        for (int u = 0; u < Shape::kHold; ++u)
          if ((part + u) * kUnitGroups < work.groups - first) multiply(held[u], x + (part + u) * Shape::kUnitBytes, sums);
      }
      dawdle(1);
    }
    column -= item.columns;
    if (!work.whole) x_stage += item.columns;
    if (o.splits > 1) add_shares(sums);
    if (role.share == 0) {
      const int lane = fresh(static_cast<int>(lane_id()));
      // How many CTAs before this one have columns of the item.
      const int row = Stretch::of(work, role, fresh(at)).row, slot = work.whole ? 0 : static_cast<int>(blockIdx.x) - share_owner(work, row * all_columns(work));
      const Place place{role.pair, lane / 4, lane % 4, 0, work.n, slot, row, work.tiles, 1.0f};
      float acc[2][kTokens / 2];
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) acc[m][4 * (tile / 2) + 2 * half + tile % 2] = sums[m][tile][half];
      epilogue.template finish<kTokens>(acc, place);
    }
  }
  // [/digit_loop]

  // The sums of share 0 become those of all shares. All warps of the pair.
  __device__ __forceinline__ void add_shares(float (&sums)[2][kTiles][2]) {
    const auto meet = [&] { asm volatile("bar.sync %0, %1;" ::"r"(1 + role.pair), "r"(static_cast<int>(kWarp) * o.splits) : "memory"); };
    const auto place = [&](int share) {
      return reinterpret_cast<float2*>(Shape::weights(blockDim.x / kWarp) + (role.pair * (o.splits - 1) + share - 1) * Shape::kSumBytes) + lane_id();
    };
    dawdle(3);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      meet();  // share 0 has read what lay there before
      if (role.share) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) place(role.share)[i * kWarp] = make_float2(sums[m][i][0], sums[m][i][1]);
      }
      meet();  // the others have written theirs
      if (role.share == 0) {
#pragma unroll 1
        for (int share = 1; share < o.splits; ++share)
#pragma unroll
          for (int i = 0; i < kTiles; ++i) {
            const float2 more = place(share)[i * kWarp];
            sums[m][i][0] += more.x, sums[m][i][1] += more.y;
          }
      }
    }
  }
};

// Up to kTokens tokens in one tile; work.main_width is kTokens.
template <int kTokens, class Epilogue>
__device__ __forceinline__ void gemm_digits(const Work& work, const DigitOperands& o, const Epilogue& epilogue) {
  using Shape = DigitShape<kTokens>;
  const DigitRole role(work);
  DigitWarp<kTokens, Epilogue> me(work, o, epilogue, role);
  // Weights do not depend on the kernel before this one: ask for the first of them before waiting for it.
  if (lane_id() == 0) {
    barrier_init(Shape::full(warp_id()), 1);
    if (warp_id() == 0)
      for (int s = 0; s < Shape::kXStages; ++s) barrier_init(Shape::x_full(s), 1);
    fence_barrier_init();
    Shape::feed(warp_id()) = {role.begin, role.share, 0, 0, 0};
    me.fill(0);
  }
  allow_next_kernel();
  __syncthreads();
  wait_for_previous_kernel();

  // [x]
  // A lane a column of X: all of K, or those of the CTA's share.
  if (warp_id() == 0) {
    const int units = (work.groups + kUnitGroups - 1) / kUnitGroups, all = all_columns(work), lane = static_cast<int>(lane_id());
    const int count = work.whole ? all : role.end - role.begin;
    dawdle(2);
    if (lane < count) {
      const int column = work.whole ? lane : (role.begin + lane) % all;
      const u32 bytes = min(kColumnUnits, units - column * kColumnUnits) * Shape::kUnitBytes;
      barrier_arrive_expect(Shape::x_full(lane), bytes);
      bulk_copy(shared_address(gemm_shared) + lane * Shape::kXBytes, o.x + static_cast<size_t>(column) * Shape::kXBytes, bytes, Shape::x_full(lane));
    }
    __syncwarp();
  }
  // [/x]
#pragma unroll 1
  for (int at = role.begin; at < role.end;) {
    const Stretch item = Stretch::of(work, role, at);
    me.run_item(at, item);
    at = item.next(work, at);
  }
}

}  // namespace nanoqwen
