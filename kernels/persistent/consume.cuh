// The consumers: each warp gets its x, multiplies its blocks of every unit of its pair (products.cuh), and gets the next.
#pragma once

#include "embedding.cuh"
#include "products.cuh"

namespace nanoqwen {

struct Consumer : Products {
  using Products::Products;

  // Gate and up by turns (plan.cuh): a unit of each tile is this pair's, so a tile is a unit. In between, the inner vector: piece p of a
  // warp is chunk warp + p * kConsumers; all warps' pieces p lie in tiles that all CTAs have left behind after step ready(p). kEarly steps
  // later their words are here, as a rule; if not, this warp waits for a CTA that is more than kEarly - 1 steps behind, which waits for none
  // as far ahead as this one: there is no circle. Returns how many pieces are done.
  __device__ __forceinline__ static int ready(int piece) { return min((piece + 1) * kConsumers * 128 / kTile, kInnerTiles) - 1; }  // the last tile
  __device__ __forceinline__ int inner_element(int piece) const { return (warp + piece * kConsumers) * 128 + 4 * lane; }

  template <int kHeld>
  __device__ __forceinline__ void prefetch_strided(Stock<OwnBlocks, kHeld>& stock) {
    stock.next = Place::of(s, at + pair());
    stock.mine = OwnBlocks::mine(half());
#pragma unroll
    for (int h = 0; h < kHeld; ++h) take<true>(stock.held[h], stock.next, stock.mine, true);  // a CTA has two at least: one of gate, one of up
  }

  template <int kHeld>
  __device__ __forceinline__ int multiply_strided(Stock<OwnBlocks, kHeld>& stock, const OwnBlocks::Own& own, u32 tag) {
    static_assert(kHeld <= 2, "units in registers take turns between gate and up");
    const int count = strided_tiles(cta);
    int piece = 0;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const bool early = piece < kInnerPieces && ready(piece) < (i - kEarly + 1) * kCtas;
      const bool inside = early && inner_element(piece) < kIntermediate;
      const u32* words = a.words + kInnerAt + inner_element(piece);
      uint4 v[1] = {make_uint4(0, 0, 0, 0)};
      const u32 wanted = ask_words(v, [&](int) { return inside; }, [&](int) { return words; });
      float2 sums[2];  // gate, up
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        Held<OwnBlocks>& mine = stock.held[h % kHeld];
        sums[h] = mine.blocks.multiply(own);
        take<false>(mine, stock.next, stock.mine, h + kHeld < 2 || i + 1 < count, __float_as_uint(sums[h].x));
      }
      leave_pair<true>(sums[0], sums[1]);
      if (early) {
        settle_words(v, wanted, tag, [&](int) { return words; });
        const float4 x = as_floats(v[0]);
        const float y[4] = {x.x, x.y, x.z, x.w};
        if (inner_element(piece) - 4 * lane < kIntermediate) put_digits(y, inner_element(piece) - 4 * lane, inside, s.fixed.scratch);
        ++piece;
      }
    }
    at += static_cast<u32>(2 * count * kPairs);
    return piece;
  }

  // --------------------------------------------------------------------------------------------------------------------- x

  // Element of this lane in chunk i of the hidden vector (or the queries'), 4 a lane; chunks of a warp are neighbours.
  template <int kPieces>
  __device__ __forceinline__ int element(int i) const { return (warp * kPieces + i) * 128 + 4 * lane; }
  // Is it there? Where all warps have whole chunks of the vector, the compiler need not ask, and mixes what a warp does with its chunks.
  template <int kPieces, int kElements>
  __device__ __forceinline__ static bool has(int e) { return kPieces * kConsumers * 128 == kElements || e < kElements; }

  // residual += the parts of a projection.
  template <class TheCut>
  __device__ __forceinline__ void add_parts(float4 (&residual)[kHiddenPieces], int words_at, u32 tag) {
    at_wait(kAtWords, words_at);
    constexpr int kParts = TheCut::kParts, kCount = kHiddenPieces * kParts;
    uint4 v[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = make_uint4(0, 0, 0, 0);
    const auto needs = [&](int i) {
      const int e = element<kHiddenPieces>(i / kParts);
      return has<kHiddenPieces, kHidden>(e) && (i % kParts == 0 || i % kParts < TheCut::parts(e / kTile));
    };
    read_words<kCount>(v, tag, needs, [&](int i) { return a.words + words_at + i % kParts * kHidden + element<kHiddenPieces>(i / kParts); });
#pragma unroll
    for (int i = 0; i < kHiddenPieces; ++i) {
      float4 sum = as_floats(v[i * kParts]);
#pragma unroll
      for (int p = 1; p < kParts; ++p) {
        const float4 more = as_floats(v[i * kParts + p]);
        sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
      }
      residual[i] = make_float4(residual[i].x + sum.x, residual[i].y + sum.y, residual[i].z + sum.z, residual[i].w + sum.w);
    }
  }

  struct Gain {
    uint2 weight[kHiddenPieces];
  };
  __device__ __forceinline__ void load_gain(Gain& gain, const u16* from) const {
#pragma unroll
    for (int i = 0; i < kHiddenPieces; ++i) gain.weight[i] = has<kHiddenPieces, kHidden>(element<kHiddenPieces>(i)) ? *reinterpret_cast<const uint2*>(from + element<kHiddenPieces>(i)) : make_uint2(0, 0);
  }

  // Of this lane's elements; the publisher adds up all of them.
  __device__ __forceinline__ void lane_squares(const float4 (&residual)[kHiddenPieces]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kHiddenPieces; ++i) sum += residual[i].x * residual[i].x + residual[i].y * residual[i].y + residual[i].z * residual[i].z + residual[i].w * residual[i].w;
    squares = sum;
    squares_left = false;
  }

  template <bool kOwn>
  __device__ __forceinline__ void share_records(OwnBlocks::Own& own) {
    if constexpr (kOwn) {
      __syncwarp();
      own = OwnBlocks::own(s.fixed.records + 2 * warp * kRecordBytes);
      __syncwarp();
    } else {
      sync();  // all consumers: the records are complete
    }
  }

  // x of q/k/v or gate/up: residual * gain as digits. 1 / rms follows after the sums (publisher), so nothing here waits for other warps.
  template <bool kOwn>
  __device__ __forceinline__ void normed_digits(const float4 (&residual)[kHiddenPieces], const Gain& gain, OwnBlocks::Own& own) {
    if constexpr (!kOwn) sync();  // all consumers: nobody still reads the records of the stage before
    lane_squares(residual);
#pragma unroll
    for (int i = 0; i < kHiddenPieces; ++i) {
      const int e = element<kHiddenPieces>(i), first = e - 4 * lane;
      if (!has<kHiddenPieces, kHidden>(first)) continue;  // the whole warp
      const float y[4] = {residual[i].x * low_half(gain.weight[i].x), residual[i].y * high_half(gain.weight[i].x),
                          residual[i].z * low_half(gain.weight[i].y), residual[i].w * high_half(gain.weight[i].y)};
      put_digits(y, first, has<kHiddenPieces, kHidden>(e), s.fixed.records);
    }
    share_records<kOwn>(own);
  }

  // x of o: attention's result.
  template <bool kOwn>
  __device__ __forceinline__ void vector_digits(u32 tag, OwnBlocks::Own& own) {
    if constexpr (!kOwn) sync();
    uint4 v[kQPieces];
#pragma unroll
    for (int i = 0; i < kQPieces; ++i) v[i] = make_uint4(0, 0, 0, 0);
    if (!kNoAttention)
      read_words<kQPieces>(v, tag, [&](int i) { return has<kQPieces, kQSize>(element<kQPieces>(i)); }, [&](int i) { return a.words + kVectorAt + element<kQPieces>(i); });
#pragma unroll
    for (int i = 0; i < kQPieces; ++i) {
      const int e = element<kQPieces>(i), first = e - 4 * lane;
      if (!has<kQPieces, kQSize>(first)) continue;
      const float4 x = as_floats(v[i]);
      const float y[4] = {x.x, x.y, x.z, x.w};
      put_digits(y, first, has<kQPieces, kQSize>(e), s.fixed.records);
    }
    share_records<kOwn>(own);
  }

  // x of down: every CTA reads and quantises the whole inner vector, a chunk of 128 a warp at a time, kInnerBatch chunks on their way.
  // The first pieces may be done (multiply_strided).
  __device__ __forceinline__ void inner_digits(u32 tag, int first_piece) {
    at_wait(kAtWords, kInnerAt);
#pragma unroll 1
    for (int base = first_piece; base < kInnerPieces; base += kInnerBatch) {
      uint4 v[kInnerBatch];
#pragma unroll
      for (int i = 0; i < kInnerBatch; ++i) v[i] = make_uint4(0, 0, 0, 0);
      const auto at = [&](int i) { return inner_element(base + i); };
      read_words<kInnerBatch>(v, tag, [&](int i) { return at(i) < kIntermediate; }, [&](int i) { return a.words + kInnerAt + at(i); });
#pragma unroll
      for (int i = 0; i < kInnerBatch; ++i) {
        const int first = at(i) - 4 * lane;
        if (first >= kIntermediate) continue;  // the whole warp
        const float4 x = as_floats(v[i]);
        const float y[4] = {x.x, x.y, x.z, x.w};
        put_digits(y, first, at(i) < kIntermediate, s.fixed.scratch);
      }
    }
    sync();  // all consumers: the records are complete
  }

  // x of the head: the normalised residual as two halves, [slice of 32][high, low][32].
  __device__ __forceinline__ void head_halves(const float4 (&residual)[kHiddenPieces], const Gain& gain) {
    float* of_warp = reinterpret_cast<float*>(s.fixed.records);  // free: nobody reads records of hidden vectors any more
    sync();                                                      // all consumers: in the last layer's down, all have read them
    lane_squares(residual);
    const float mine = warp_sum(squares);
    squares_left = true;  // they do not go to the publisher: the head's x is normalised before it is multiplied
    if (lane == 0) of_warp[warp] = mine;
    sync();  // all consumers: every warp's sum is there, and nobody reads the inner vector's records any more
    const float scale = rsqrtf(warp_sum(lane < kConsumers ? of_warp[lane] : 0.0f) / kHidden + kRmsEps);
    u16* halves = reinterpret_cast<u16*>(s.fixed.scratch);
#pragma unroll
    for (int i = 0; i < kHiddenPieces; ++i) {
      const int e = element<kHiddenPieces>(i);
      if (!has<kHiddenPieces, kHidden>(e)) continue;
      u32 high[2], low[2];
      split_pair(residual[i].x * scale * low_half(gain.weight[i].x), residual[i].y * scale * high_half(gain.weight[i].x), high[0], low[0]);
      split_pair(residual[i].z * scale * low_half(gain.weight[i].y), residual[i].w * scale * high_half(gain.weight[i].y), high[1], low[1]);
      u16* slice = halves + e / 32 * 64 + e % 32;
      *reinterpret_cast<uint2*>(slice) = make_uint2(high[0], high[1]);
      *reinterpret_cast<uint2*>(slice + 32) = make_uint2(low[0], low[1]);
    }
    sync();  // all consumers: the halves are complete
  }

  __device__ __forceinline__ void embed(float4 (&residual)[kHiddenPieces], int token) const {
#pragma unroll
    for (int i = 0; i < kHiddenPieces; ++i) {
      const int e = element<kHiddenPieces>(i);
      residual[i] = make_float4(0, 0, 0, 0);
      if (!has<kHiddenPieces, kHidden>(e)) continue;
      const u32 front = embedding_pair(a.embedding, token, e), back = embedding_pair(a.embedding, token, e + 2);
      residual[i] = make_float4(low_half(front), high_half(front), low_half(back), high_half(back));
    }
  }
};

}  // namespace nanoqwen
