// y = W . x at batch 1: stream W once, keep everything else out of the way.
//
// Work is cut into blocks of 16 rows x one slice of the input dimension: a kilobyte of INT4 codes with 16 scales (16 x 128), or of
// FP16 (16 x 32), numbered row tile by row tile. Four consecutive blocks are a bundle, contiguous in memory and a whole number of
// 128-byte lines. CTA c of n takes bundles [total * c / n, total * (c + 1) / n), its warps cut that range the same way. No CTA and no
// warp has more than one bundle more than another, whatever the shape. Cut by whole tiles, the 224 tiles of the 7B's down projection
// would leave most of 132 SMs idle for half of the time.
//
//   warp        owns a ring of kStages bundles in shared memory and is its own producer: lane 0 asks for a bundle with one bulk copy as
//               soon as all lanes hold the one that lay there in registers. Warps never wait for each other inside the loop. A warp
//               multiplies with tensor cores, keeps 2 FP32 sums a lane, and leaves 16 sums in shared memory at each row tile's end.
//   CTA         one on each SM, never two: its shared memory is more than half of an SM's. Where two fit, the scheduler sometimes puts
//               both of one GEMV on an SM while another SM has none, and everybody waits for that SM. So the next GEMV's CTA begins to
//               fill its rings when this one's leaves the SM, long before the grid has finished. A CTA adds its warps' parts of each row
//               tile, in warp order.
//   grid        a row tile may be shared by several CTAs. The one that begins it writes part 0, the next one part 1, and so on up to
//               kParts, which follows from the shapes. A part that no CTA writes stays the zero it was set to at start. The reader
//               adds all parts, in order. No atomics: two runs give the same bits.
//
// x            all of its records (one a slice) are in shared memory before the loop; gemv_input.cuh says how they get there.
//
// Barriers     name           arrivals    who arrives                     who waits          means
//              full[w][s]     1 + bytes   lane 0 of warp w (expect_tx)    warp w             the bundle of stage s has landed
//              input          1 + bytes   thread 0 (expect_tx)            all threads        x has landed (CopiedInput)
//              __syncthreads x 2 and those of the input, reached by all threads: the barriers exist and the partial sums are zero;
//              all partial sums are in shared memory.
//              There is no `empty` barrier: who refills a stage is a lane of the warp that read it, so __syncwarp is enough.
// Shared       (dynamic) rings, records of x, partial sums, barriers: StreamShape::kShared bytes or more.
// Lost         the same stream held in registers, two blocks a lane ahead, 4 CTAs of 8 warps on an SM: the CTAs fill the register file, so
//              the next kernel's loads cannot begin before this one's CTAs leave, and every GEMV pays the ramp of memory anew.
//              Bundles of two blocks (2,112 bytes, not whole lines): slower than four. Two CTAs on an SM: see above.
//              Filling the ring one stage after the other before x exists, to keep the queues in front of L2 short for the kernels in
//              between: the pauses cost more than the queues.
//
// A `Weights` policy says how a block is held and multiplied:
//   kRows, kBlocks (slices a row tile), kBundleBytes, kRecord (bytes of x a slice, contiguous from `activations` on), bundles (address
//   of the first), Fragment (registers of a block), load(shared bundle, j) -> Fragment of block j, and multiply(fragment, record) ->
//   float2: the products of row g of the tile (x) and of row g + 8 (y), where g = lane / 4, the same on all four lanes of a quad. With
//   kLaneParts each lane returns its own part instead, and the four are added at the tile's end (kernels/lessons: no tensor cores).
#pragma once

#include "mbarrier.cuh"
#include "ptx.cuh"

namespace nanoqwen {

constexpr int kTileRows = 16, kBundle = 4;

// [shape]
// What a launch on kCtas CTAs of kWarps warps looks like. nanoqwen/cuda/constants.py computes kGrid, kParts and kShared too;
// static_asserts in the kernels compare.
template <class Weights, int kCtas, int kWarps, int kStages>
struct StreamShape {
  static constexpr int kTotal = Weights::kRows / kTileRows * Weights::kBlocks;  // blocks
  static constexpr int kBundles = (kTotal + kBundle - 1) / kBundle;             // the last one may be padded
  static constexpr int kGrid = kBundles < kCtas ? kBundles : kCtas;             // a CTA has one at least
  static constexpr int kFewest = kBundles / kGrid * kBundle, kMost = (kBundles + kGrid - 1) / kGrid * kBundle;  // blocks of a CTA
  // A tile's blocks meet at most so many ranges of at least kFewest blocks.
  static constexpr int kParts = (Weights::kBlocks - 1 + kFewest - 1) / kFewest + 1;
  static constexpr int kMaxTiles = kMost / Weights::kBlocks + 2;  // row tiles that one CTA touches
  // And so many of its warps meet one tile.
  static constexpr int kWarpFewest = kBundles / kGrid / kWarps * kBundle;
  static constexpr int kMeet = kWarpFewest ? (Weights::kBlocks - 1 + kWarpFewest - 1) / kWarpFewest + 1 : kWarps;
  static constexpr int kSlots = kMeet < kWarps ? kMeet : kWarps;

  static constexpr int kRecordsAt = kWarps * kStages * Weights::kBundleBytes;
  static constexpr int kPartialAt = kRecordsAt + Weights::kBlocks * Weights::kRecord;
  static constexpr int kBarriersAt = kPartialAt + (kMaxTiles * kSlots * kTileRows + 32) * 4;  // 32 floats for the input's own use
  static constexpr int kShared = kBarriersAt + (kWarps * kStages + 1) * 8;
  static_assert(Weights::kRows % kTileRows == 0, "rows are padded to whole tiles when the weights are uploaded");
  static_assert(Weights::kRecord % 16 == 0, "bulk copies move multiples of 16 bytes");
  static_assert(Weights::kBundleBytes % 128 == 0, "a bundle is whole lines");

  // First bundle of CTA c.
  __device__ __forceinline__ static int begin(int c) { return static_cast<int>(static_cast<long long>(kBundles) * c / kGrid); }
};
// [/shape]

extern __shared__ __align__(128) u8 stream_shared[];

// [stream_gemv]
// out[kParts][rows]. gridDim.x is kGrid, dynamic shared memory kShared or more. `make_input(barrier)` gives the input.
template <class Weights, int kCtas, int kWarps, int kStages, class MakeInput>
__device__ __forceinline__ void stream_gemv(const Weights& weights, const MakeInput& make_input, float* __restrict__ out) {
  using Shape = StreamShape<Weights, kCtas, kWarps, kStages>;
  constexpr int kBlocks = Weights::kBlocks, kTotal = Shape::kTotal;
  u8* const ring_memory = stream_shared + warp_id() * kStages * Weights::kBundleBytes;
  u8* const records = stream_shared + Shape::kRecordsAt;
  float* const partial = reinterpret_cast<float*>(stream_shared + Shape::kPartialAt);  // [tile of the CTA][kSlots][kTileRows]
  Barrier* const barriers = reinterpret_cast<Barrier*>(stream_shared + Shape::kBarriersAt);
  Barrier* const full = barriers + 1 + warp_id() * kStages;
  auto input = make_input(barriers);

  const int g = lane_id() / 4, t = lane_id() % 4;
  const int cta_first = Shape::begin(blockIdx.x), cta_last = Shape::begin(blockIdx.x + 1);  // in bundles
  const auto warp_begin = [&](int w) { return cta_first + (cta_last - cta_first) * w / kWarps; };
  const int warp = static_cast<int>(warp_id()), begin = warp_begin(warp), end = warp_begin(warp + 1);
  const int first_block = cta_first * kBundle, first_tile = first_block / kBlocks;
  const int tiles = (min(cta_last * kBundle, kTotal) - 1) / kBlocks - first_tile + 1;

  const u64 policy = evict_first_policy();
  const auto fill = [&](int stage, int bundle) {  // lane 0 alone
    barrier_arrive_expect(&full[stage], Weights::kBundleBytes);
    bulk_copy(ring_memory + stage * Weights::kBundleBytes, weights.bundles + static_cast<size_t>(bundle) * Weights::kBundleBytes,
              Weights::kBundleBytes, &full[stage], policy);
  };

  // Weights do not depend on the kernel before this one: ask for the first of them before waiting for it.
  if (lane_id() == 0) {
    for (int s = 0; s < kStages; ++s) barrier_init(&full[s], 1);
    if (warp_id() == 0) barrier_init(barriers, 1);
    fence_barrier_init();
    for (int s = 0; s < kStages; ++s)
      if (begin + s < end) fill(s, begin + s);
  }
  allow_next_kernel();
  input.prepare();
  for (int i = threadIdx.x; i < tiles * Shape::kSlots * kTileRows; i += kWarps * kWarp) partial[i] = 0.0f;
  // The part that this CTA writes of its first tile: how many CTAs before it have blocks of that tile. Later tiles begin in it: part 0.
  int first_part = 0;
  while (static_cast<int>(blockIdx.x) > first_part && Shape::begin(blockIdx.x - first_part) * kBundle > first_tile * kBlocks) ++first_part;
  // In the same way, the slot for this warp's sums of its first tile.
  const int warp_tile = begin * kBundle / kBlocks;
  int slot = 0;
  while (warp > slot && warp_begin(warp - slot) * kBundle > warp_tile * kBlocks) ++slot;
  __syncthreads();
  wait_for_previous_kernel();
  input.deliver(records, partial + Shape::kMaxTiles * Shape::kSlots * kTileRows);

  float top = 0.0f, bottom = 0.0f;
  int slice = begin * kBundle % kBlocks, tile = warp_tile - first_tile;
  const auto write_tile = [&] {
    if constexpr (Weights::kLaneParts) top = quad_sum(top), bottom = quad_sum(bottom);
    if (t == 0) {
      float* mine = partial + (tile * Shape::kSlots + slot) * kTileRows;
      mine[g] = top;
      mine[g + 8] = bottom;
    }
    top = bottom = 0.0f;
    ++tile;
    slice = slot = 0;
  };
  Ring<kStages> ring;
  for (int bundle = begin; bundle < end; ++bundle, ring.advance()) {
    barrier_wait(&full[ring.stage], ring.parity);  // all lanes: each must see the landed bytes
    const u8* landed = ring_memory + ring.stage * Weights::kBundleBytes;
    typename Weights::Fragment held[kBundle];
#pragma unroll
    for (int j = 0; j < kBundle; ++j) held[j] = weights.load(landed, j);
    const int next = bundle + kStages + static_cast<int>(zero_behind(loaded_words(held)));
    fence_for_copies();
    __syncwarp();  // all lanes hold the bundle: its place may be filled again
    if (lane_id() == 0 && next < end) fill(ring.stage, next);
#pragma unroll
    for (int j = 0; j < kBundle; ++j) {
      if (kTotal % kBundle == 0 || bundle * kBundle + j < kTotal) {
        const float2 sums = weights.multiply(held[j], records + slice * Weights::kRecord);
        top += sums.x;
        bottom += sums.y;
        if (++slice == kBlocks) write_tile();
      }
    }
  }
  if (slice != 0 && begin < end) write_tile();
  __syncthreads();

  for (int i = threadIdx.x; i < tiles * kTileRows; i += kWarps * kWarp) {
    const int at = i / kTileRows, row = i % kTileRows;
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < Shape::kSlots; ++k) sum += partial[(at * Shape::kSlots + k) * kTileRows + row];
    out[(at == 0 ? first_part : 0) * Weights::kRows + (first_tile + at) * kTileRows + row] = sum;
  }
}
// [/stream_gemv]

}  // namespace nanoqwen
