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
//   work       items = row tiles x token tiles, whole or shared by several CTAs (gemm_work.cuh). Persistent, no counter, no atomics, no CTA waits
//              for another.
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

#include "gemm_unit.cuh"
#include "wgmma.cuh"

namespace nanoqwen {

constexpr int kStageUnits = 2, kStageBlocks = kStageUnits * kUnitGroups;
constexpr int kStagedRing = 4;

// [shape]
// kGroups consumer warpgroups. Shared memory: X slots (aligned to 1024, the swizzle's period), weight stages, barriers. kWidths: the tile widths
// compiled, ascending.
template <int kGroups, int kWeightStages_, int kXSlots_, int kSlotTokens, int... kWidths>
struct GemmShape {
  static constexpr int kWeightStages = kWeightStages_, kXSlots = kXSlots_;
  static constexpr int kTiles = 8 * kGroups, kConsumerWarps = 4 * kGroups, kThreads = 128 * (1 + kGroups);
  static constexpr int kConsumerRegisters = kGroups == 2 ? 232 : 160, kProducerRegisters = kGroups == 2 ? 40 : 32;
  static_assert(kGroups == 2 || kGroups == 3, "together not more than the launch allocated, 384 * 168 or 512 * 128: else setmaxnreg waits for ever");
  static constexpr int kXBytes = kSlotTokens * 2 * kSlab, kSlotBytes = kStageBlocks * Int4Block::kBytes, kStageBytes = kTiles * kSlotBytes;
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
};
// [/shape]

// Where a consumer stands.
template <class Shape>
struct Consumer {
  Ring<Shape::kWeightStages> weights;
  Ring<Shape::kXSlots> x;
  int staged = 0;

  // The two row tiles of this warp: slots 2 pair and 2 pair + 1 of a stage.
  __device__ __forceinline__ static int pair() { return static_cast<int>(warp_id()) - 4; }

  // The slot that came `back` before the current one.
  __device__ __forceinline__ int before(int back) const { return x.stage >= back ? x.stage - back : x.stage - back + Shape::kXSlots; }

  // [main_loop]
  // acc = W . X^T over `count` units of K, in which `groups` groups exist. With kHold the last two slabs stay taken.
  template <int kN, bool kHold>
  __device__ __forceinline__ void multiply(float (&acc)[2][kN / 2], int count, int groups, const Operands& o) {
    constexpr bool kRoomy = kN <= 32;  // wider tiles were measured faster with fewer registers than with fewer instructions
    const u8* const mine = gemm_shared + Shape::kWeightsAt + 2 * pair() * Shape::kSlotBytes;
    Unit unit;
    const auto load = [&](int u) {
      if (u % kStageUnits == 0) patient_wait(Shape::w_full(weights.stage), weights.parity);
      unit.load(mine + weights.stage * Shape::kStageBytes, Shape::kSlotBytes, u % kStageUnits * kUnitGroups, groups - u * kUnitGroups);
    };
    const auto give_back_weights = [&](int u) {  // behind a word step, when its loads need no wait any more
      if (u % kStageUnits == kStageUnits - 1 || u == count - 1) {
        dawdle(0);
        const u32 zero = zero_behind(loaded_words(unit.words) | loaded_words(unit.raw));
        fence_of_reader<kReadersFence>();
        __syncwarp();  // every lane has read its words
        if (lane_id() == 0) barrier_arrive(Shape::w_empty(weights.stage) + zero);
        weights.advance();
      }
    };
    const auto give_back = [&](int slot) {
      dawdle(1);
      if (lane_id() == 0) barrier_arrive(Shape::x_empty(slot));
    };

#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) acc[m][i] = 0.0f;
    u32 a[2][2][2][4];  // [buffer][product][row tile][register]
    load(0);
    unit.template unpack<kRoomy>(0, a[0], o.up_a, o.up_b);
    give_back_weights(0);
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
        if (i == 3 && u + 1 < count) {
          unit.template unpack<kRoomy>(0, a[0], o.up_a, o.up_b);
          give_back_weights(u + 1);
        }
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

template <class Shape, class Epilogue, int kN>
__device__ __forceinline__ void run_item(Consumer<Shape>& me, int at, int count, int groups, const Work& work, const Operands& o, const Epilogue& epilogue) {
  float acc[2][kN / 2];
  me.template multiply<kN, Epilogue::kHold>(acc, count, groups, o);
  const Item item = item_at(work, fresh(at));
  const int thread = fresh(threadIdx.x);
  const Place place{thread / 32 - 4, thread % 32 / 4, thread % 4, item.token, work.n, item.slot, item.row, work.tiles, o.undo};
  if constexpr (Epilogue::kHold) {
    dawdle(3);
    named_barrier<1, 32 * Shape::kConsumerWarps>();  // all consumers: nobody's product reads the held slabs
    epilogue.template stage<kN>(acc, place, make_uint2(Shape::x(me.before(2)), Shape::x(me.before(1))));
    fence_for_copies();
    dawdle(4);
    __syncwarp();
    if (lane_id() == 0) barrier_arrive(Shape::staged(me.staged));
    me.staged = (me.staged + 1) % kStagedRing;
  } else {
    epilogue.template finish<kN>(acc, place);
  }
}

template <int kN, int... kWider, class Shape, class Epilogue>
__device__ __forceinline__ void run_width(int width, Consumer<Shape>& me, int at, int count, int groups, const Work& work, const Operands& o, const Epilogue& epilogue) {
  if constexpr (sizeof...(kWider) == 0) {
    run_item<Shape, Epilogue, kN>(me, at, count, groups, work, o, epilogue);
  } else if (width == kN) {
    run_item<Shape, Epilogue, kN>(me, at, count, groups, work, o, epilogue);
  } else {
    run_width<kWider...>(width, me, at, count, groups, work, o, epilogue);
  }
}

template <class Epilogue, int kGroups, int kW, int kX, int kT, int... kWidths>
__device__ __forceinline__ void gemm_int4(const Work& work, const Operands& o, const Epilogue& epilogue, GemmShape<kGroups, kW, kX, kT, kWidths...> shape) {
  using Shape = GemmShape<kGroups, kW, kX, kT, kWidths...>;
  if (threadIdx.x == 0) {
    if (shared_address(gemm_shared) % 1024) asm volatile("trap;");
    for (int s = 0; s < kW; ++s) barrier_init(shape.w_full(s), 1), barrier_init(shape.w_empty(s), Shape::kConsumerWarps);
    for (int s = 0; s < kX; ++s) barrier_init(shape.x_full(s), 1), barrier_init(shape.x_empty(s), Shape::kConsumerWarps);
    for (int i = 0; i < kStagedRing; ++i) barrier_init(shape.staged(i), Shape::kConsumerWarps);
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
      for (int at = first_position(work); at < last_position(work); at = next_position(work, at)) {
        const Item item = item_at(work, at);
        const int tile = lane < Shape::kTiles ? epilogue.row_tile(work.tiles, item.row, lane / 2, lane % 2) : -1;
        const int present = __popc(__ballot_sync(kFullMask, tile >= 0));
        for (int unit = item.first; unit < item.last; unit += kStageUnits) {
          const int group = unit * kUnitGroups, count = min(min(kStageUnits, item.last - unit) * kUnitGroups, work.groups - group);
          patient_wait(shape.w_empty(ring.stage), ring.parity ^ 1);
          fence_for_copies();
          if (lane == 0) barrier_arrive_expect(shape.w_full(ring.stage), present * count * Int4Block::kBytes);
          dawdle(5);
          __syncwarp();
          if (tile >= 0)
            bulk_copy(shape.weights(ring.stage) + lane * Shape::kSlotBytes, o.blocks + static_cast<u32>(tile * work.groups + group) * Int4Block::kBytes,
                      count * Int4Block::kBytes, shape.w_full(ring.stage));
          ring.advance();
        }
      }
      // [/weights]
    } else if (warp_id() == 1) {
      if (lane_id() == 0) {
        wait_for_previous_kernel();
        Ring<kX> ring;
        for (int at = first_position(work); at < last_position(work); at = next_position(work, at)) {
          const Item item = item_at(work, at);
          const u32 bytes = min(item.width, (work.n - item.token + 7) / 8 * 8) * 2 * kSlab;
          for (int slab = 2 * item.first; slab < 2 * item.last; ++slab, ring.advance()) {
            patient_wait(shape.x_empty(ring.stage), ring.parity ^ 1);
            dawdle(6);
            barrier_arrive_expect(shape.x_full(ring.stage), bytes);
            bulk_copy(shape.x(ring.stage), o.x + (static_cast<size_t>(slab) * o.tokens + item.token) * kSlab, bytes, shape.x_full(ring.stage));
          }
        }
      }
    } else if (warp_id() == 2) {
      if constexpr (Epilogue::kHold) {
        if (lane_id() == 0) {
          wait_for_previous_kernel();
          int slabs = 0, staged = 0;  // slabs that X has brought up to the end of the item
          for (int at = first_position(work); at < last_position(work); at = next_position(work, at), ++staged) {
            const Item item = item_at(work, at);
            slabs += 2 * (item.last - item.first);
            const int first = (slabs - 2) % kX, second = (slabs - 1) % kX;
            patient_wait(shape.staged(staged % kStagedRing), staged / kStagedRing & 1);
            dawdle(7);
            epilogue.store(item.row, item.token, min(item.width, (work.n - item.token + 7) / 8 * 8), shape.x(first), shape.x(second));
            bulk_store_commit();
            bulk_store_wait_read();
            dawdle(8);
            arrive_all(shape.x_empty(first), Shape::kConsumerWarps);
            arrive_all(shape.x_empty(second), Shape::kConsumerWarps);
          }
          bulk_store_wait();
        }
      }
    }
  } else {
    more_registers<Shape::kConsumerRegisters>();
    Consumer<Shape> me;
    wait_for_previous_kernel();
    for (int at = first_position(work); at < last_position(work); at = next_position(work, at)) {
      const Item item = item_at(work, at);
      const int width = fitting_width<kWidths...>(item.width, work.n - item.token);
      run_width<kWidths...>(width, me, at, item.last - item.first, work.groups - item.first * kUnitGroups, work, o, epilogue);
    }
  }
}

}  // namespace nanoqwen
