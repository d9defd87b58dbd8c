// y = W . x at batch 1: stream W once, keep everything else out of the way.
//
// Work is cut into blocks of 16 rows x one slice of the input dimension, 1 KiB of INT4 codes (16 x 128) or of
// FP16 (16 x 32), numbered row tile by row tile. CTA c of n takes blocks [total * c / n, total * (c + 1) / n), its
// warps cut that range the same way. No CTA and no warp has more than one block more than another, whatever the shape.
// Cut by whole tiles, the 224 tiles of the 7B's down projection would leave most of 132 SMs idle for half of the time.
//
//   warp        loads the words of a block straight into registers (16 bytes a lane and row), kPrefetch blocks ahead,
//               multiplies with tensor cores, keeps 2 FP32 sums a lane, writes 16 sums to shared memory at each row tile's end
//   CTA         adds its warps' parts of each row tile, in warp order
//   grid        a row tile may be shared by several CTAs. The one that begins it writes part 0, the next one part 1, and so on up to
//               kParts, which follows from the shapes. A part that no CTA writes stays the zero it was set to at start. The reader
//               adds all parts, in order. No atomics: two runs give the same bits.
//
// x            the slices of x that a CTA needs are copied to shared memory once, in one go. Read from global memory inside the loop,
//              each would be an L2 round trip in the way of the products wherever a warp meets a slice only once, as in the down
//              projection.
//
// Barriers     two __syncthreads, reached by all threads: x is in shared memory; all partial sums are in shared memory.
// Shared       kWarps * kMaxTiles * 64 bytes of partial sums and kMaxSlices records of x, static.
//
// A `Weights` policy says how a block is loaded and multiplied:
//   kRows, kBlocks (slices a row tile), kRecord (bytes of x a slice, contiguous from `activations` on), Fragment (registers of a block),
//   load(block) -> Fragment, and multiply(fragment, record, top, bottom): add the products of row g of the tile to `top`
//   and of row g + 8 to `bottom`, where g = lane / 4, the same on all four lanes of a quad.
#pragma once

#include "ptx.cuh"

namespace nanoqwen {

constexpr int kTileRows = 16;

// [shape]
// What a launch on kCtas CTAs of kWarps warps looks like. nanoqwen/cuda/constants.py computes kGrid and kParts too; static_asserts
// in the kernels compare.
template <class Weights, int kCtas, int kWarps>
struct StreamShape {
  static constexpr int kTiles = Weights::kRows / kTileRows;
  static constexpr int kTotal = kTiles * Weights::kBlocks;
  static constexpr int kGrid = kTotal / kWarps >= kCtas ? kCtas : (kTotal / kWarps > 0 ? kTotal / kWarps : 1);  // a block a warp at least
  static constexpr int kFewest = kTotal / kGrid, kMost = (kTotal + kGrid - 1) / kGrid;                            // blocks of a CTA
  // A tile's blocks meet at most so many ranges of at least kFewest blocks.
  static constexpr int kParts = (Weights::kBlocks - 1 + kFewest - 1) / kFewest + 1;
  static constexpr int kMaxTiles = ((kMost + kWarps - 1) / kWarps) / Weights::kBlocks + 2;  // row tiles that one warp touches
  static constexpr int kMaxSlices = kMost < Weights::kBlocks ? kMost : Weights::kBlocks;    // slices of x that one CTA needs
  static_assert(Weights::kRows % kTileRows == 0, "rows are padded to whole tiles when the weights are uploaded");
  static_assert(Weights::kRecord % 16 == 0, "records of x are copied 16 bytes at a time");
};
// [/shape]

// [stream_gemv]
// out[kParts][rows]. gridDim.x is kGrid.
template <class Weights, int kCtas, int kWarps, int kPrefetch>
__device__ __forceinline__ void stream_gemv(const Weights& weights, float* __restrict__ out) {
  using Shape = StreamShape<Weights, kCtas, kWarps>;
  constexpr int kBlocks = Weights::kBlocks, kTotal = Shape::kTotal, kRecord = Weights::kRecord;
  __shared__ float partial[kWarps][Shape::kMaxTiles][kTileRows];
  __shared__ __align__(16) u8 records[Shape::kMaxSlices * kRecord];

  const int g = lane_id() / 4, t = lane_id() % 4;
  const int cta_begin = static_cast<int>(static_cast<long long>(kTotal) * blockIdx.x / gridDim.x);
  const int cta_end = static_cast<int>(static_cast<long long>(kTotal) * (blockIdx.x + 1) / gridDim.x);
  const auto warp_begin = [&](int w) { return cta_begin + (cta_end - cta_begin) * w / kWarps; };
  const int begin = warp_begin(warp_id()), end = warp_begin(warp_id() + 1);

  // Weights do not depend on the kernel before this one: ask for the first of them before waiting for it.
  typename Weights::Fragment ahead[kPrefetch] = {};
#pragma unroll
  for (int j = 0; j < kPrefetch; ++j)
    if (begin + j < end) ahead[j] = weights.load(begin + j);
  wait_for_previous_kernel();
  allow_next_kernel();

  // Slice cta_begin % kBlocks comes first; a range that passes the end of a row tile goes on with slice 0.
  const int first_slice = cta_begin % kBlocks, slices = min(cta_end - cta_begin, kBlocks);
  for (int i = threadIdx.x; i < slices * (kRecord / 16); i += kWarps * kWarp) {
    const int at = i / (kRecord / 16), from = at + first_slice - (at + first_slice >= kBlocks ? kBlocks : 0);
    reinterpret_cast<uint4*>(records)[i] = reinterpret_cast<const uint4*>(weights.activations + from * kRecord)[i % (kRecord / 16)];
  }
  __syncthreads();

  float top = 0.0f, bottom = 0.0f;
  int slice = begin % kBlocks, tiles_done = 0;
  const auto write_tile = [&] {
    if (t == 0) {
      partial[warp_id()][tiles_done][g] = top;
      partial[warp_id()][tiles_done][g + 8] = bottom;
    }
    top = bottom = 0.0f;
    ++tiles_done;
  };
  for (int base = begin; base < end; base += kPrefetch) {
#pragma unroll
    for (int j = 0; j < kPrefetch; ++j) {
      const int block = base + j;
      if (block < end) {
        const int at = slice - first_slice + (slice < first_slice ? kBlocks : 0);
        weights.multiply(ahead[j], records + at * kRecord, top, bottom);
        if (block + kPrefetch < end) ahead[j] = weights.load(block + kPrefetch);
        if (++slice == kBlocks) {
          write_tile();
          slice = 0;
        }
      }
    }
  }
  if (slice != 0 && begin < end) write_tile();
  __syncthreads();

  const int first_tile = cta_begin / kBlocks, last_tile = (cta_end - 1) / kBlocks;
  for (int i = threadIdx.x; i < (last_tile - first_tile + 1) * kTileRows; i += kWarps * kWarp) {
    const int tile = first_tile + i / kTileRows, row = i % kTileRows;
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) {
      const int from = warp_begin(w), to = warp_begin(w + 1);
      if (from < to && from < (tile + 1) * kBlocks && to > tile * kBlocks) sum += partial[w][tile - from / kBlocks][row];
    }
    // The CTA that holds the tile's first block: its range begins at or before it. (The estimate is exact or one too high.)
    int owner = static_cast<int>(static_cast<long long>(tile) * kBlocks * gridDim.x / kTotal) + 1;
    while (static_cast<long long>(kTotal) * owner / gridDim.x > tile * kBlocks) --owner;
    const int part = static_cast<int>(blockIdx.x) - owner;
    out[part * Weights::kRows + tile * kTileRows + row] = sum;
  }
}
// [/stream_gemv]

}  // namespace nanoqwen
