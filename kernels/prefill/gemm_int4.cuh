// y = W . X^T for a chunk of tokens: INT4 weights as the register operand of wgmma, activations from shared memory.
//
// Computes   256 rows of W times up to 128 tokens a tile, FP32 sums. A code is unpacked to an FP16 subnormal, and one HFMA2 applies the
//            group's scale and removes the +8: c * S * 2^-24, rounded once, where S is the scale times a power of two that brings the largest
//            scale of the matrix just below 65536 (exact). The power is undone in FP32 by whoever finishes the sums.
// Layout     that of the decode kernels, unchanged in its order: 16-row tiles, blocks of 16 rows x one group. A warp of a warpgroup product
//            holds 16 rows of A, so it takes whole row tiles, any ones: two of them, and an Epilogue says which. q and k rows that RoPE
//            pairs, gate and up rows that SwiGLU multiplies, meet in one thread's registers that way; no row is interleaved in memory.
// Moves      a work item reads its codes and scales once; X from L2 once a row tile.
//
//   work       items = row tiles x token tiles x pieces of K (Work); CTA c takes items c, c + gridDim.x, ...: persistent, no counter. Pieces
//              of K go to separate outputs that the reader adds in order (parts): no atomics, no CTA waits for another.
//   warps 0-3  producers (40 registers, or 32): warp 0 weights, a lane a row tile; warp 1 X; warp 2 stores staged results (Epilogue::kHold)
//   warps 4-   two or three consumer warpgroups (232 or 160 registers), each warp two row tiles: accumulators of 2 x 16 rows x kN tokens
//
// Main loop  a unit is 128 of K: four word steps (a ValueShuffle word a row: 32 of K, two products for each of the two row tiles). Under the
//            products of word step i the warp unpacks the words of step i + 1 into the other of two fragment buffers.
//
// Barriers   name         arrivals     who arrives                      who waits          means
//            w.full[s]    1 + bytes    warp 0, lane 0 (expect_tx)       consumers          codes and scales of a stage have landed
//            w.empty[s]   warps        lane 0 of each consumer warp     warp 0             all words of the stage are in registers
//            x.full[s]    1 + bytes    warp 1, lane 0 (expect_tx)       consumers          a slab of X has landed
//            x.empty[s]   warps        lane 0 of each consumer warp,    warp 1             no product reads the slab any more, and (held
//                                      or all by warp 2 (held slabs)                       slabs) the copy engine has read the result from it
//            staged[i]    warps        lane 0 of each consumer warp     warp 2             a tile's result lies in its two held slabs
//            bar 1        all          all consumers                    all consumers      every product of the tile is done: held slabs may
//                                                                                          be overwritten
//            One __syncthreads, all threads, after the barriers are initialised. The producers never wait for each other.
// Held       with kHold the last two slabs of a tile are not given back: the epilogue puts the tile's result there, warp 2 has it copied out and
//            gives them back. X goes on with the other slots meanwhile.
#pragma once

#include "constants.cuh"
#include "int4_unpack.cuh"
#include "mbarrier.cuh"
#include "ptx.cuh"
#include "tiled_x.cuh"
#include "wgmma.cuh"

#ifndef NANOQWEN_BUNDLED
#define NANOQWEN_BUNDLED 0
#endif

namespace nanoqwen {

// [layout]
// How blocks lie in memory. Block-major: [codes 8 * group bytes][scales 32 bytes] a block, so any run of groups of a row tile is one contiguous
// piece. Bundled (what the decode kernels have today): four blocks' codes, then their scales; a run is two pieces a bundle.
constexpr bool kBundled = NANOQWEN_BUNDLED;
constexpr int kCodeBytes = 8 * kGroup, kScaleBytes = 32, kBlockBytes = kCodeBytes + kScaleBytes, kBundleBlocks = 4;
constexpr int kUnitGroups = kUnit / kGroup, kGroupSteps = kGroup / 32;  // word steps a group
constexpr int kStageUnits = 2, kStageBlocks = kStageUnits * kUnitGroups;

__device__ __forceinline__ int codes_at(int block) { return block * (kBundled ? kCodeBytes : kBlockBytes); }
__device__ __forceinline__ int scales_at(int block) { return kBundled ? kStageBlocks * kCodeBytes + block * kScaleBytes : block * kBlockBytes + kCodeBytes; }

// Addresses of block b of a matrix (less than 4 GiB).
__device__ __forceinline__ const u8* codes_of(const u8* blocks, u32 b) {
  return blocks + (kBundled ? b / kBundleBlocks * (kBundleBlocks * kBlockBytes) + b % kBundleBlocks * kCodeBytes : b * kBlockBytes);
}
__device__ __forceinline__ const u8* scales_of(const u8* blocks, u32 b) {
  return blocks + (kBundled ? b / kBundleBlocks * (kBundleBlocks * kBlockBytes) + kBundleBlocks * kCodeBytes + b % kBundleBlocks * kScaleBytes : b * kBlockBytes + kCodeBytes);
}
// [/layout]

constexpr int kStagedRing = 4;
constexpr u64 kPatience = 2000000000;  // ns; a barrier that is waited for longer is a bug: stop the kernel instead of the card

__device__ __forceinline__ u64 now_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)::"memory");
  return t;
}

__device__ __forceinline__ bool barrier_done(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;}\n" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}

__device__ __forceinline__ void patient_wait(u32 barrier, u32 parity) {
  if (barrier_done(barrier, parity)) return;
  const u64 start = now_ns();
  while (!barrier_done(barrier, parity))
    if (now_ns() - start > kPatience) asm volatile("trap;");
}

__device__ __forceinline__ void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
__device__ __forceinline__ void arrive(u32 barrier, u32 count) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory"); }

// Tests compile with NANOQWEN_DELAYS: every role then stops now and then, for up to 8 us, in front of what others wait for. The result must be the same
// bits. All lanes of the caller.
#ifdef NANOQWEN_DELAYS
__device__ __forceinline__ void dawdle(u32 place) {
  u32 clock;
  asm volatile("mov.u32 %0, %clock;" : "=r"(clock)::"memory");
  const u32 draw = ((clock >> 4) * 2654435761u) ^ ((place * 64 + warp_id() + 977 * blockIdx.x) * 2246822519u);
  if ((draw >> 20) % 8 == 0) asm volatile("nanosleep.u32 %0;" ::"r"(draw % 8192));
}
#else
__device__ __forceinline__ void dawdle(u32) {}
#endif

// [work]
// What a launch has to do; the host plans it (plan.py). Rows of items [0, main_rows) have their tokens cut main_width wide, the others tail_width: the
// last round of a persistent grid is rarely full, and narrower tiles spread it over more SMs. What follows from other fields is here too, so
// that it lies in constant memory and not in a register.
struct Work {
  int tiles;                     // 16-row tiles of W in an item, at most 8 a consumer warpgroup: its rows
  int n;                         // tokens
  int main_rows;                 // rows of items whose tokens are cut main_width wide
  int main_width, tail_width;    // tokens a tile; the last of a row of tiles may be narrower
  int main_tokens, tail_tokens;  // token tiles: ceil(n / width)
  int main_items, split_items;   // main_rows * main_tokens; that and the others': items of one piece of K
  int splits, groups;            // pieces of K; groups of K
  int items;                     // split_items * splits
};

struct Item {
  int row, token, width, split, first, last;  // K in units
};

__device__ __forceinline__ Item item_of(const Work& w, int index) {
  Item item;
  item.split = index / w.split_items;
  index -= item.split * w.split_items;
  if (index < w.main_items) {
    item.row = index / w.main_tokens;
    item.token = (index - item.row * w.main_tokens) * w.main_width;
    item.width = w.main_width;
  } else {
    index -= w.main_items;
    const int row = index / w.tail_tokens;
    item.row = w.main_rows + row;
    item.token = (index - row * w.tail_tokens) * w.tail_width;
    item.width = w.tail_width;
  }
  const int units = (w.groups + kUnitGroups - 1) / kUnitGroups;
  item.first = units * item.split / w.splits;
  item.last = units * (item.split + 1) / w.splits;
  return item;
}
// [/work]

// The weights and X of a launch.
struct Operands {
  const u8* blocks;
  const u16* x;
  int tokens;       // rows of a slab of x
  u32 up_a, up_b;   // half2: powers of two whose product brings the scales up
  float undo;       // 2^24 over that product
};

extern __shared__ __align__(1024) u8 gemm_shared[];

// [shape]
// kGroups consumer warpgroups. Shared memory: X slots (aligned to 1024, the swizzle's period), weight stages, barriers. kWidths: the tile widths
// compiled, ascending.
template <int kGroups, int kWeightStages_, int kXSlots_, int kSlotTokens, int... kWidths>
struct GemmShape {
  static constexpr int kWeightStages = kWeightStages_, kXSlots = kXSlots_;
  static constexpr int kTiles = 8 * kGroups, kConsumerWarps = 4 * kGroups, kThreads = 128 * (1 + kGroups);
  static constexpr int kConsumerRegisters = kGroups == 2 ? 232 : 160, kProducerRegisters = kGroups == 2 ? 40 : 32;
  static_assert(kGroups == 2 || kGroups == 3, "together not more than the launch allocated, 384 * 168 or 512 * 128: else setmaxnreg waits for ever");
  static constexpr int kXBytes = kSlotTokens * 2 * kSlab, kSlotBytes = kStageBlocks * kBlockBytes, kStageBytes = kTiles * kSlotBytes;
  static constexpr int kWeightsAt = kXSlots * kXBytes, kBarriersAt = kWeightsAt + kWeightStages * kStageBytes;
  static constexpr int kBarriers = 2 * kWeightStages + 2 * kXSlots + kStagedRing;
  static constexpr int kShared = kBarriersAt + 8 * kBarriers;
  static_assert(kXBytes % 1024 == 0 && kShared <= 232448, "a CTA of Hopper has 227 KiB");

  // Shared addresses.
  __device__ __forceinline__ static u32 x(int slot) { return shared_address(gemm_shared) + slot * kXBytes; }
  __device__ __forceinline__ static u32 weights(int stage) { return shared_address(gemm_shared) + kWeightsAt + stage * kStageBytes; }
  __device__ __forceinline__ static u32 w_full(int stage) { return shared_address(gemm_shared) + kBarriersAt + 8 * stage; }
  __device__ __forceinline__ static u32 w_empty(int stage) { return w_full(kWeightStages + stage); }
  __device__ __forceinline__ static u32 x_full(int slot) { return w_full(2 * kWeightStages + slot); }
  __device__ __forceinline__ static u32 x_empty(int slot) { return w_full(2 * kWeightStages + kXSlots + slot); }
  __device__ __forceinline__ static u32 staged(int i) { return w_full(2 * kWeightStages + 2 * kXSlots + i); }

  // The narrowest compiled width that holds what is left of a tile.
  __device__ __forceinline__ static int fit(int width, int left) {
    int fitting = 0;
    const auto consider = [&](int w) { fitting = fitting == 0 && w >= min(width, left) ? w : fitting; };
    (consider(kWidths), ...);
    return fitting;
  }
};
// [/shape]

template <int kWords> struct Words;
template <> struct Words<4> { using type = uint4; };
template <> struct Words<2> { using type = uint2; };
template <> struct Words<1> { using type = u32; };

__device__ __forceinline__ u32 hmul2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// [unpack]
// A lane's weights of one unit: rows g and g + 8 of two row tiles.
struct Unit {
  using Vector = typename Words<kGroupSteps>::type;
  Vector words[2][2][kUnitGroups];  // [row tile][row g, row g + 8][group]
  u32 raw[2][kUnitGroups];          // scales, row g in the low half
  u32 scale[2][2], sixteenth[2][2], offset[2][2];  // of the group in work, in both halves

  // The second row tile lies `apart` bytes after the first.
  __device__ __forceinline__ void load(const u8* slots, int apart, int first_block, int present) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int group = 0; group < kUnitGroups; ++group) {
        const u8* slot = slots + m * apart;
        const Vector* codes = reinterpret_cast<const Vector*>(slot + codes_at(first_block + group)) + lane_id();
        words[m][0][group] = codes[0];
        words[m][1][group] = codes[kWarp];
        const u32 scales = *reinterpret_cast<const u32*>(slot + scales_at(first_block + group) + lane_id() / 4 * 4);
        raw[m][group] = kUnitGroups == 1 || group < present ? scales : 0;  // K's padding: weights of zero, whatever bytes lie there
      }
  }

  // Fragments of word step i: [product][row tile][register]. Two ways to the same bits. With kRoomy a pair that lies four bits higher stays there and is
  // multiplied with a sixteenth of the scale: 9 instructions for eight weights, and four registers. Else it is shifted: 11.
  template <bool kRoomy>
  __device__ __forceinline__ void unpack(int i, u32 (&a)[2][2][4], u32 up_a, u32 up_b) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      if (i % kGroupSteps == 0) {
        const u32 both = hmul2(hmul2(raw[m][i / kGroupSteps], up_a), up_b);
        scale[m][0] = int4::prmt(both, both, 0x1010);
        scale[m][1] = int4::prmt(both, both, 0x3232);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          sixteenth[m][r] = hmul2(scale[m][r], 0x2C002C00u);  // 1/16
          offset[m][r] = hmul2(scale[m][r], 0x80088008u);     // -8 * 2^-24
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const u32 word = reinterpret_cast<const u32*>(&words[m][r][i / kGroupSteps])[i % kGroupSteps];
        u32 bits[4];
        if constexpr (kRoomy) int4::unpack_subnormal(word, bits);
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          if constexpr (!kRoomy) bits[pair] = int4::and_xor(word >> 4 * pair, 0x000F000Fu, 0x00080008u);
          a[pair / 2][m][pair % 2 * 2 + r] = int4::hfma2(bits[pair], kRoomy && pair % 2 ? sixteenth[m][r] : scale[m][r], offset[m][r]);
        }
      }
    }
  }
};
// [/unpack]

// Where a consumer stands.
template <class Shape>
struct Consumer {
  Ring<Shape::kWeightStages> weights;
  Ring<Shape::kXSlots> x;
  int staged = 0;

  __device__ __forceinline__ static int warpgroup() { return static_cast<int>(warp_id()) / 4 - 1; }
  __device__ __forceinline__ static int warp() { return static_cast<int>(warp_id()) % 4; }

  // The slot that came `back` before the current one.
  __device__ __forceinline__ int before(int back) const { return x.stage >= back ? x.stage - back : x.stage - back + Shape::kXSlots; }

  // [main_loop]
  // acc = W . X^T over `count` units of K, in which `groups` groups exist. With kHold the last two slabs stay taken.
  template <int kN, bool kHold>
  __device__ __forceinline__ void multiply(float (&acc)[2][kN / 2], int count, int groups, const Operands& o) {
    constexpr bool kRoomy = kN <= 32;
    const u8* const mine = gemm_shared + Shape::kWeightsAt + (warpgroup() * 8 + warp()) * Shape::kSlotBytes;
    Unit unit;
    const auto load = [&](int u) {
      if (u % kStageUnits == 0) patient_wait(Shape::w_full(weights.stage), weights.parity);
      unit.load(mine + weights.stage * Shape::kStageBytes, 4 * Shape::kSlotBytes, u % kStageUnits * kUnitGroups, groups - u * kUnitGroups);
      if (u % kStageUnits == kStageUnits - 1 || u == count - 1) {
        dawdle(0);
        __syncwarp();  // every lane has read its words
        if (lane_id() == 0) arrive(Shape::w_empty(weights.stage));
        weights.advance();
      }
    };
    const auto give_back = [&](int slot) {
      dawdle(1);
      if (lane_id() == 0) arrive(Shape::x_empty(slot));
    };

#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) acc[m][i] = 0.0f;
    u32 a[2][2][2][4];  // [buffer][product][row tile][register]
    load(0);
    unit.template unpack<kRoomy>(0, a[0], o.up_a, o.up_b);
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) pin(acc[m][i]);

    for (int u = 0; u < count; ++u) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i % 2 == 0) patient_wait(Shape::x_full(x.stage), x.parity);
        const u64 b = b_descriptor(Shape::x(x.stage)) + i % 2 * 4;
#pragma unroll
        for (int k = 0; k < 16; ++k) pin(a[i % 2][k / 8][k / 4 % 2][k % 4]);
        wgmma_fence();
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int m = 0; m < 2; ++m) wgmma(acc[m], a[i % 2][h][m], b + 2 * h);
        wgmma_commit();
        dawdle(2);
        wgmma_wait<1>();  // the word step before this one is done: its fragments, and every second time its slab, are free
        if (i == 0 && u > 0 || i == 2 && (!kHold || u < count - 1)) give_back(before(1));
        if (i < 3) unit.template unpack<kRoomy>(i + 1, a[(i + 1) % 2], o.up_a, o.up_b);
        if (i == 2 && u + 1 < count) load(u + 1);
        if (i == 3 && u + 1 < count) unit.template unpack<kRoomy>(0, a[0], o.up_a, o.up_b);
        if (i % 2 == 1) x.advance();
      }
    }
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) pin(acc[m][i]);
    if (!kHold) give_back(before(1));
  }
  // [/main_loop]
};

// The same value, but the compiler does not know it: what follows from it is computed here and not kept in registers over the main loop, where
// they are scarce.
__device__ __forceinline__ int fresh(int value) {
  asm volatile("" : "+r"(value)::"memory");
  return value;
}

// Where a thread's results belong.
struct Place {
  int warpgroup, warp, g, t, token, limit, split, row, tiles;  // token: the tile's first; limit: tokens of the chunk
  float undo;
};

template <class Shape, class Epilogue, int kN>
__device__ __forceinline__ void run_item(Consumer<Shape>& me, int index, int count, int groups, const Work& work, const Operands& o, const Epilogue& epilogue) {
  float acc[2][kN / 2];
  me.template multiply<kN, Epilogue::kHold>(acc, count, groups, o);
  const Item item = item_of(work, fresh(index));
  const int thread = fresh(threadIdx.x), warp = thread / 32 - 4;
  const Place place{warp / 4, warp % 4, thread % 32 / 4, thread % 4, item.token, work.n, item.split, item.row, work.tiles, o.undo};
  if constexpr (Epilogue::kHold) {
    dawdle(3);
    named_barrier<1, 32 * Shape::kConsumerWarps>();  // all consumers: nobody's product reads the held slabs
    epilogue.template stage<kN>(acc, place, make_uint2(Shape::x(me.before(2)), Shape::x(me.before(1))));
    fence_for_copies();
    dawdle(4);
    __syncwarp();
    if (lane_id() == 0) arrive(Shape::staged(me.staged));
    me.staged = (me.staged + 1) % kStagedRing;
  } else {
    epilogue.template finish<kN>(acc, place);
  }
}

template <int kN, int... kWider, class Shape, class Epilogue>
__device__ __forceinline__ void run_width(int width, Consumer<Shape>& me, int index, int count, int groups, const Work& work, const Operands& o, const Epilogue& epilogue) {
  if constexpr (sizeof...(kWider) == 0) {
    run_item<Shape, Epilogue, kN>(me, index, count, groups, work, o, epilogue);
  } else if (width == kN) {
    run_item<Shape, Epilogue, kN>(me, index, count, groups, work, o, epilogue);
  } else {
    run_width<kWider...>(width, me, index, count, groups, work, o, epilogue);
  }
}

template <class Epilogue, int kGroups, int kW, int kX, int kT, int... kWidths>
__device__ __forceinline__ void gemm_int4(const Work& work, const Operands& o, const Epilogue& epilogue, GemmShape<kGroups, kW, kX, kT, kWidths...> shape) {
  using Shape = GemmShape<kGroups, kW, kX, kT, kWidths...>;
  if (threadIdx.x == 0) {
    if (shared_address(gemm_shared) % 1024) asm volatile("trap;");
    const auto init = [](u32 barrier, u32 arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory"); };
    for (int s = 0; s < kW; ++s) init(shape.w_full(s), 1), init(shape.w_empty(s), Shape::kConsumerWarps);
    for (int s = 0; s < kX; ++s) init(shape.x_full(s), 1), init(shape.x_empty(s), Shape::kConsumerWarps);
    for (int i = 0; i < kStagedRing; ++i) init(shape.staged(i), Shape::kConsumerWarps);
    fence_barrier_init();
  }
  allow_next_kernel();
  __syncthreads();

  if (threadIdx.x < 128) {
    fewer_registers<Shape::kProducerRegisters>();
    if (warp_id() == 0) {
      // [weights]
      // Weights do not depend on the kernel before this one: no wait.
      const int lane = lane_id();
      Ring<kW> ring;
      for (int index = blockIdx.x; index < work.items; index += gridDim.x) {
        const Item item = item_of(work, index);
        const int tile = lane < Shape::kTiles ? epilogue.row_tile(work.tiles, item.row, lane / 8, lane / 4 % 2, lane % 4) : -1;
        const int present = __popc(__ballot_sync(kFullMask, tile >= 0));
        for (int unit = item.first; unit < item.last; unit += kStageUnits) {
          const int group = unit * kUnitGroups, count = min(min(kStageUnits, item.last - unit) * kUnitGroups, work.groups - group);
          patient_wait(shape.w_empty(ring.stage), ring.parity ^ 1);
          if (lane == 0) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shape.w_full(ring.stage)), "r"(present * count * kBlockBytes) : "memory");
          dawdle(5);
          __syncwarp();
          if (tile >= 0) {
            const u32 block = tile * work.groups + group;
            const u32 to = shape.weights(ring.stage) + lane * Shape::kSlotBytes;
            const auto copy = [&](u32 shared, const u8* from, u32 bytes) {
              asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
                  "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shape.w_full(ring.stage)) : "memory");
            };
            if constexpr (!kBundled) {
              copy(to, codes_of(o.blocks, block), count * kBlockBytes);
            } else {
              for (int done = 0; done < count;) {
                const int run = min(kBundleBlocks - static_cast<int>((block + done) % kBundleBlocks), count - done);
                copy(to + codes_at(done), codes_of(o.blocks, block + done), run * kCodeBytes);
                copy(to + scales_at(done), scales_of(o.blocks, block + done), run * kScaleBytes);
                done += run;
              }
            }
          }
          ring.advance();
        }
      }
      // [/weights]
    } else if (warp_id() == 1) {
      if (lane_id() == 0) {
        wait_for_previous_kernel();
        Ring<kX> ring;
        for (int index = blockIdx.x; index < work.items; index += gridDim.x) {
          const Item item = item_of(work, index);
          const u32 bytes = min(item.width, (work.n - item.token + 7) / 8 * 8) * 2 * kSlab;
          for (int slab = 2 * item.first; slab < 2 * item.last; ++slab, ring.advance()) {
            patient_wait(shape.x_empty(ring.stage), ring.parity ^ 1);
            dawdle(6);
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shape.x_full(ring.stage)), "r"(bytes) : "memory");
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shape.x(ring.stage)),
                "l"(__cvta_generic_to_global(o.x + (static_cast<size_t>(slab) * o.tokens + item.token) * kSlab)), "r"(bytes), "r"(shape.x_full(ring.stage)) : "memory");
          }
        }
      }
    } else if (warp_id() == 2) {
      if constexpr (Epilogue::kHold) {
        if (lane_id() == 0) {
          wait_for_previous_kernel();
          int slabs = 0, staged = 0;  // slabs that X has brought up to the end of the item
          for (int index = blockIdx.x; index < work.items; index += gridDim.x, ++staged) {
            const Item item = item_of(work, index);
            slabs += 2 * (item.last - item.first);
            const int first = (slabs - 2) % kX, second = (slabs - 1) % kX;
            patient_wait(shape.staged(staged % kStagedRing), staged / kStagedRing & 1);
            dawdle(7);
            epilogue.store(item.row, item.token, min(item.width, (work.n - item.token + 7) / 8 * 8), shape.x(first), shape.x(second));
            bulk_store_commit();
            bulk_store_wait_read();
            dawdle(8);
            arrive(shape.x_empty(first), Shape::kConsumerWarps);
            arrive(shape.x_empty(second), Shape::kConsumerWarps);
          }
          bulk_store_wait();
        }
      }
    }
  } else {
    more_registers<Shape::kConsumerRegisters>();
    Consumer<Shape> me;
    wait_for_previous_kernel();
    for (int index = blockIdx.x; index < work.items; index += gridDim.x) {
      const Item item = item_of(work, index);
      const int width = Shape::fit(item.width, work.n - item.token);
      run_width<kWidths...>(width, me, index, item.last - item.first, work.groups - item.first * kUnitGroups, work, o, epilogue);
    }
  }
}

}  // namespace nanoqwen
