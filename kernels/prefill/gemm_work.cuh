// How a matrix product of prefill is cut among CTAs, and where the parts of its sums lie: for the products and for those who read them.
//
//   item       some 16-row tiles of W x some tokens: a tile of the result
//   whole      items [0, whole) are multiplied by one CTA each, in turn: CTA c takes c, c + gridDim.x, ... They keep pace, so that what two of them
//              read lies in L2.
//   shared     the others would fill a round only in part. Their K, cut into quanta and laid end to end, is one line that `sharers` CTAs divide
//              evenly: an item may begin in one CTA and end in the next but one, and no CTA has more than one quantum more than another.
//   parts      a CTA leaves its sums of an item in FP32 in the slot that says how many CTAs before it have quanta of that item; the reader
//              adds the slots in that order. Both compute the number from the cut: no table, no atomics, and two runs give the same bits.
//
//   parts      [slot][token][rows in part order]: 32 rows, the two row tiles of a warp, are 128 bytes of a token, of which a lane of the tensor
//              core's result holds 16: row 8 r + g of the 32 is element 4 g + r.
#pragma once

#include "constants.cuh"
#include "ptx.cuh"
#include "tiled_x.cuh"

namespace nanoqwen {

constexpr int kUnitGroups = kUnit / kGroup;

// [work]
// What a launch has to do; the host plans it (nanoqwen/cuda/prefill_plan.py). Rows of items [0, main_rows) have their tokens cut main_width wide, the
// others tail_width: only where all items are whole, and narrower tiles fill the last round. What follows from other fields is here too, so that it
// lies in constant memory and not in a register.
struct Work {
  int tiles;                     // 16-row tiles of W in an item, an even number: two a warp
  int n;                         // tokens
  int main_rows;                 // rows of items whose tokens are cut main_width wide
  int main_width, tail_width;    // tokens a tile; the last of a row of tiles may be narrower
  int main_tokens, tail_tokens;  // token tiles: ceil(n / width)
  int main_items, items;         // main_rows * main_tokens; all
  int groups;                    // of K
  int whole;                     // items that are not shared: a multiple of the grid, or all
  int quantum, quanta;           // units of K in a quantum (the last of an item may be shorter); quanta of an item
  int total, sharers;            // quanta of all shared items; CTAs that share them, not more than quanta
};

struct Item {
  int row, token, width, slot, first, last;  // K in units
};

// The first shared quantum of CTA c.
__device__ __forceinline__ int share_begin(const Work& w, int c) { return c < w.sharers ? w.total * c / w.sharers : w.total; }

// The CTA that has shared quantum q.
__device__ __forceinline__ int share_owner(const Work& w, int q) { return ((q + 1) * w.sharers - 1) / w.total; }

// A CTA's way through its items is one number: a whole item's index, or `whole` and the next shared quantum.
__device__ __forceinline__ int first_position(const Work& w) { return static_cast<int>(blockIdx.x) < w.whole ? blockIdx.x : w.whole + share_begin(w, blockIdx.x); }
__device__ __forceinline__ int last_position(const Work& w) { return w.whole + share_begin(w, blockIdx.x + 1); }

__device__ __forceinline__ int next_position(const Work& w, int at) {
  if (at >= w.whole) return min(at + w.quanta - (at - w.whole) % w.quanta, last_position(w));
  at += gridDim.x;
  return at < w.whole ? at : w.whole + share_begin(w, blockIdx.x);
}

__device__ __forceinline__ Item item_at(const Work& w, int at) {
  Item item;
  item.slot = item.first = 0;
  item.last = (w.groups + kUnitGroups - 1) / kUnitGroups;
  if (at >= w.whole) {
    const int q = at - w.whole, of = q / w.quanta, in = q - of * w.quanta;
    item.first = in * w.quantum;
    item.last = min(item.last, (in + share_begin(w, blockIdx.x + 1) - q) * w.quantum);
    item.slot = static_cast<int>(blockIdx.x) - share_owner(w, q - in);
    at = w.whole + of;
  }
  if (at < w.main_items) {
    item.row = at / w.main_tokens;
    item.token = (at - item.row * w.main_tokens) * w.main_width;
    item.width = w.main_width;
  } else {
    at -= w.main_items;
    const int row = at / w.tail_tokens;
    item.row = w.main_rows + row;
    item.token = (at - row * w.tail_tokens) * w.tail_width;
    item.width = w.tail_width;
  }
  return item;
}
// [/work]

// [parts]
// For readers: how many parts the sums of a 16-row tile and a token come in (all rows of items are cut main_width wide there).
__device__ __forceinline__ int part_count(const Work& w, int row_tile, int token) {
  const int item = row_tile / w.tiles * w.main_tokens + token / w.main_width;
  if (item < w.whole) return 1;
  const int q = (item - w.whole) * w.quanta;
  return share_owner(w, q + w.quanta - 1) - share_owner(w, q) + 1;
}

// Four rows lie side by side: 32 (four / 8) + four % 8 and those 8, 16 and 24 behind it.
__device__ __forceinline__ int part_row(int four) { return four / 8 * 32 + four % 8; }

// sums[p] += the parts of rows four[p] of a token, of which there are count[p], in the order of their slots. kAtOnce slots of all p are asked for before the first
// of them is added: a read from L2 takes longer than everything else here, and there should be one of them to wait for. parts [slot][n][rows]. What
// is added for a slot that is not there is +0, and no sum is -0: same bits as without it.
template <int kAtOnce, int kCount>
__device__ __forceinline__ void add_parts(const float* parts, const Work& w, int rows, int token, const int (&four)[kCount], const int (&count)[kCount], float4 (&sums)[kCount]) {
  int most = 0;
#pragma unroll
  for (int p = 0; p < kCount; ++p) most = max(most, count[p]);
  const float4* const row = reinterpret_cast<const float4*>(parts + static_cast<size_t>(token) * rows);
  const size_t apart = static_cast<size_t>(w.n) * (rows / 4);
#pragma unroll 1
  for (int first = 0; first < most; first += kAtOnce) {
    float4 more[kAtOnce][kCount];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
#pragma unroll
      for (int p = 0; p < kCount; ++p) {
        more[k][p] = make_float4(0, 0, 0, 0);
        if (first + k < count[p]) more[k][p] = row[(first + k) * apart + four[p]];
      }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
#pragma unroll
      for (int p = 0; p < kCount; ++p) {
        const float4 a = sums[p], b = more[k][p];
        sums[p] = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
      }
  }
}
// [/parts]

}  // namespace nanoqwen
