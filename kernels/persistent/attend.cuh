// Attention inside the persistent decoder: the CTAs that have a split; the others go on to the output projection and wait there.
//
// Pages come through the same ring as the weights, asked for before the queries exist. A pair of warps takes a page as in
// paged_attention.cu: both all of its scores, each half of V's dimensions. One unit is the K slice, the next the V slice.
//   1  a warp a head: sum the parts of q (k, v at the split with the tail), bias, RoPE. q goes to shared memory as FP16 pairs
//      high + low; k and v go into their page in global memory and into the page's copy in the ring
//   2  pairs: scores, online softmax, weighted V over their pages; sums to shared memory
//   3  all consumers: join the pairs; publish the split's sums, maxima, denominators
//   4  join the splits, each split's CTA its share of the head group's dimensions; publish the finished vector
#pragma once

#include "consume.cuh"
#include "head.cuh"
#include "page_fragments.cuh"

namespace nanoqwen {

constexpr int kHalfTiles = kHeadDim / 16, kDimSteps = kHeadDim / 16, kTurns = divided_up(kHeadDim, 128);  // two neighbouring elements a lane and turn, and those half a head later

struct Attention {
  Consumer& c;
  const Args& a;
  AttentionScratch& scratch;
  const Split& split;
  const int position, lane;

  __device__ __forceinline__ Attention(Consumer& consumer, const Split& s, int at)
      : c(consumer), a(consumer.a), scratch(*reinterpret_cast<AttentionScratch*>(consumer.s.fixed.scratch)), split(s), position(at), lane(consumer.lane) {}

  // Row `row` of the tail page's copy and, behind it, zeros: the copy may hold anything there. Its page in memory gets the row, and
  // the zeros too when the page is new (page_open.cu's duty). The copy's slice is unit n.
  __device__ __forceinline__ void append(u16* page, u32 n, const u32 (&front)[kTurns], const u32 (&back)[kTurns]) {
    const int row = position % kPageTokens;
    u16* copy = reinterpret_cast<u16*>(const_cast<u8*>(c.wait_unit(n)));
#pragma unroll
    for (int p = 0; p < kTurns; ++p) {
      const int i = 2 * (lane + p * 32);  // elements i, i + 1 and the two half a head later
      if (i >= kHeadDim / 2) continue;
      const int at_front = row * kHeadDim + swizzled(i, row), at_back = row * kHeadDim + swizzled(i + kHeadDim / 2, row);
      *reinterpret_cast<u32*>(copy + at_front) = front[p], *reinterpret_cast<u32*>(copy + at_back) = back[p];
      *reinterpret_cast<u32*>(page + at_front) = front[p], *reinterpret_cast<u32*>(page + at_back) = back[p];
    }
    for (int i = (row + 1) * kHeadDim / 8 + lane; i < kSliceHalves / 8; i += 32) {
      reinterpret_cast<uint4*>(copy)[i] = make_uint4(0, 0, 0, 0);
      if (row == 0) reinterpret_cast<uint4*>(page)[i] = make_uint4(0, 0, 0, 0);
    }
    fence_copies();  // the unit is written by a copy again
  }

  // Step 1. Lane l holds elements 2 l, 2 l + 1 (+ 64 p) of a head and those half a head later.
  struct Ready {  // what does not wait for the projection
    float2 bias_front[kTurns], bias_back[kTurns];
    float4 turn[kTurns];  // cosine, sine of the pairs' angles
  };
  __device__ __forceinline__ bool has_head() const { return c.warp < kGqa + (split.has_tail() ? 2 : 0); }
  __device__ __forceinline__ Head head() const {
    return Head(c.warp < kGqa ? split.head * kGqa + c.warp : (c.warp == kGqa ? kNumHeads + split.head : kNumHeads + kNumKvHeads + split.head));
  }

  __device__ __forceinline__ void prepare(Ready& ready, const LayerPointers& w) const {
#pragma unroll
    for (int p = 0; p < kTurns; ++p) {
      ready.bias_front[p] = ready.bias_back[p] = make_float2(0, 0);
      ready.turn[p] = make_float4(1, 0, 1, 0);
    }
    if (!has_head()) return;
    const Head h = head();
    const u16* bias = h.bias(w.q_bias, w.k_bias, w.v_bias);
#pragma unroll
    for (int p = 0; p < kTurns; ++p) {
      const int i = 2 * (lane + p * 32);
      if (i >= kHeadDim / 2) continue;
      const u32 front = *reinterpret_cast<const u32*>(bias + i), back = *reinterpret_cast<const u32*>(bias + i + kHeadDim / 2);
      ready.bias_front[p] = make_float2(low_half(front), high_half(front));
      ready.bias_back[p] = make_float2(low_half(back), high_half(back));
      ready.turn[p] = *reinterpret_cast<const float4*>(a.rope + static_cast<size_t>(position) * (kHeadDim / 2) + i);
    }
  }

  // Where the layer's keys or values begin.
  __device__ __forceinline__ u16* pages(int layer, int values) const { return a.pool + (static_cast<size_t>(2 * layer + values) * a.pool_pages) * kPageHalves; }

  __device__ __forceinline__ void queries(const Ready& ready, int layer, u32 tag) {
    constexpr int kParts = QkvCut::kParts, kCount = 2 * kTurns * kParts;
    if (!has_head()) return;
    const Head h = head();
    uint2 v[kCount];  // [turn][front, back][part]
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = make_uint2(0, 0);
    const auto row = [&](int i) { return h.index * kHeadDim + i / kParts % 2 * (kHeadDim / 2) + 2 * (lane + i / (2 * kParts) * 32); };
    const auto inside = [&](int i) { return 2 * (lane + i / (2 * kParts) * 32) < kHeadDim / 2; };
    read_words<kCount>(v, tag, [&](int i) { return inside(i) && (i % kParts == 0 || i % kParts < QkvCut::parts(row(i) / kTile)); },
                       [&](int i) { return a.words + kQkvAt + i % kParts * kQkvRows + row(i); });
    u32 k_front[kTurns], k_back[kTurns];
#pragma unroll
    for (int p = 0; p < kTurns; ++p) {
      float x[2][2];  // [front, back][element]
#pragma unroll
      for (int f = 0; f < 2; ++f) {
        x[f][0] = as_float(v[(2 * p + f) * kParts].x), x[f][1] = as_float(v[(2 * p + f) * kParts].y);
#pragma unroll
        for (int part = 1; part < kParts; ++part) {
          x[f][0] += as_float(v[(2 * p + f) * kParts + part].x);
          x[f][1] += as_float(v[(2 * p + f) * kParts + part].y);
        }
      }
      x[0][0] += ready.bias_front[p].x, x[0][1] += ready.bias_front[p].y, x[1][0] += ready.bias_back[p].x, x[1][1] += ready.bias_back[p].y;
      if (h.is_q || h.is_k) {
        rotate(x[0][0], x[1][0], make_float2(ready.turn[p].x, ready.turn[p].y));
        rotate(x[0][1], x[1][1], make_float2(ready.turn[p].z, ready.turn[p].w));
      }
      const int i = 2 * (lane + p * 32);
      if (h.is_q && i < kHeadDim / 2) {
        constexpr float kLog2e = 1.4426950408889634f;
        const float scale = rsqrtf(static_cast<float>(kHeadDim)) * kLog2e;  // exp becomes exp2
#pragma unroll
        for (int f = 0; f < 2; ++f) {
          u32 high, low;
          split_pair(x[f][0] * scale, x[f][1] * scale, high, low);
          *reinterpret_cast<u32*>(&scratch.queries[c.warp][i + f * (kHeadDim / 2)]) = high;
          *reinterpret_cast<u32*>(&scratch.queries[c.warp + 8][i + f * (kHeadDim / 2)]) = low;
        }
      }
      k_front[p] = pack_half2(x[0][0], x[0][1]), k_back[p] = pack_half2(x[1][0], x[1][1]);
    }
    if (!h.is_q) {
      const u32 n = c.at + (h.is_k ? 0 : 1);  // pages come last first: the tail's slices are the stage's first units
      append(pages(layer, !h.is_k) + page_row(a.block_table[position / kPageTokens], split.head, 0), n, k_front, k_back);
    }
  }

  // Step 2: this pair's pages.
  __device__ __forceinline__ void pages_of_pair() {
    float acc[kHalfTiles][4] = {};
    float maximum = -infinity(), denominator = 0.0f;
    const int g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int i = c.pair(); i < split.last - split.first; i += kPairs) {
      const int page = split.last - 1 - i;
      const u32 n = c.at + static_cast<u32>(2 * i);
      const u16* k_page = reinterpret_cast<const u16*>(c.wait_unit(n));
      float scores[2][4] = {};
#pragma unroll
      for (int k = 0; k < kDimSteps; ++k) {
        u32 q[4], b[4];
        ldmatrix(q, &scratch.queries[lane % 16][16 * k + lane / 16 * 8]);
        key_fragments(b, k_page, k);
        mma_f16(scores[0], q[0], q[1], q[2], q[3], b[0], b[1]);
        mma_f16(scores[1], q[0], q[1], q[2], q[3], b[2], b[3]);
      }

      float p[2][2], largest = -infinity();
      const int valid = position + 1 - page * kPageTokens;
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float score = scores[tile][j] + scores[tile][j + 2];
          p[tile][j] = 8 * tile + 2 * t + j < valid ? score : -infinity();
          largest = fmaxf(largest, p[tile][j]);
        }
      c.release_unit(n, __float_as_uint(largest));  // made from all scores, and they from all keys
      largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, 2));
      const float now = fmaxf(maximum, largest);
      const float correction = exp2f(maximum - now);
      maximum = now;
      float sum = 0.0f;
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int j = 0; j < 2; ++j) sum += p[tile][j] = exp2f(p[tile][j] - now);
      sum += __shfl_xor_sync(kFullMask, sum, 1);
      sum += __shfl_xor_sync(kFullMask, sum, 2);
      denominator = denominator * correction + sum;
#pragma unroll
      for (int m = 0; m < kHalfTiles; ++m)
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[m][j] *= correction;

      u32 pa[4];
      split_pair(p[0][0], p[0][1], pa[0], pa[1]);
      split_pair(p[1][0], p[1][1], pa[2], pa[3]);
      const u16* v_page = reinterpret_cast<const u16*>(c.wait_unit(n + 1));
      u32 read = 0;
#pragma unroll
      for (int m = 0; m < kHalfTiles; m += 2) {
        u32 b[4];
        value_fragments(b, v_page, c.half() * kHalfTiles + m);
        mma_f16(acc[m], pa[0], pa[1], pa[2], pa[3], b[0], b[1]);
        mma_f16(acc[m + 1], pa[0], pa[1], pa[2], pa[3], b[2], b[3]);
        read |= b[0];  // a load brings all four
      }
      c.release_unit(n + 1, read);
    }
    if (g < kGqa && split.first + c.pair() < split.last) {
#pragma unroll
      for (int m = 0; m < kHalfTiles; ++m)
        *reinterpret_cast<float2*>(&scratch.sums[c.pair()][g][8 * (c.half() * kHalfTiles + m) + 2 * t]) = make_float2(acc[m][0] + acc[m][2], acc[m][1] + acc[m][3]);
      if (t == 0 && c.half() == 0) {  // both halves have the same
        scratch.maxima[c.pair()][g] = maximum;
        scratch.denominators[c.pair()][g] = denominator;
      }
    }
  }

  // Step 3: this split's result, relative to its maximum as the others will read it.
  __device__ __forceinline__ void publish_split(u32 tag) {
    const int pairs = min(split.last - split.first, kPairs);
    for (int i = c.warp * 32 + lane; i < kGroupDims; i += kConsumerThreads) {
      const int head = i / kHeadDim, dim = i % kHeadDim;
      float top = -infinity(), sum = 0.0f, total = 0.0f, maxima[kPairs];
#pragma unroll
      for (int w = 0; w < kPairs; ++w) top = fmaxf(top, maxima[w] = w < pairs ? scratch.maxima[w][head] : -infinity());
      const u32 word = tagged(top, tag);
      top = as_float(word);
#pragma unroll
      for (int w = 0; w < kPairs; ++w) {
        if (w >= pairs) break;  // what lies there is of another use
        const float weight = exp2f(maxima[w] - top);
        sum += weight * scratch.sums[w][head][dim];
        total += weight * scratch.denominators[w][head];
      }
      const int out = split.index * kNumHeads + split.head * kGqa + head;
      store_relaxed(a.words + kSplitSumAt + out * kHeadDim + dim, tagged(sum, tag));
      if (dim == 0) {
        store_relaxed(a.words + kSplitMaxAt + out, word);
        store_relaxed(a.words + kSplitDenAt + out, tagged(total, tag));
      }
    }
  }

  // Step 4: eight lanes join the splits of two neighbouring dimensions; a warp has eight dimensions at a time.
  __device__ __forceinline__ void join_splits(u32 tag) {
    constexpr int kRounds = divided_up(kMostSplits, 8);
    const int lo = split.dims_lo, hi = split.dims_hi;
#pragma unroll 1
    for (int base = lo + 8 * c.warp; base < hi; base += 8 * kConsumers) {
      const int i = base + lane / 8 * 2, of = lane % 8;
      const int head = split.head * kGqa + i / kHeadDim;
      uint2 sum[kRounds];
      u32 scalar[2 * kRounds];  // maximum, denominator
#pragma unroll
      for (int k = 0; k < kRounds; ++k) sum[k] = make_uint2(0, 0), scalar[2 * k] = __float_as_uint(-infinity()), scalar[2 * k + 1] = 0;
      const auto needs = [&](int k) { return i < hi && of + 8 * k < split.active; };
      const auto sum_at = [&](int k) { return a.words + kSplitSumAt + (of + 8 * k) * kQSize + split.head * kGroupDims + i; };
      const auto scalar_at = [&](int k) { return a.words + (k % 2 ? kSplitDenAt : kSplitMaxAt) + (of + k / 2 * 8) * kNumHeads + head; };
      const u32 sums_wanted = ask_words(sum, needs, sum_at);
      const u32 scalars_wanted = ask_words(scalar, [&](int k) { return needs(k / 2); }, scalar_at);
      settle_words(sum, sums_wanted, tag, sum_at);
      settle_words(scalar, scalars_wanted, tag, scalar_at);
      float top = -infinity();
#pragma unroll
      for (int k = 0; k < kRounds; ++k) top = fmaxf(top, as_float(scalar[2 * k]));
#pragma unroll
      for (int step = 4; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(kFullMask, top, step));
      float x = 0.0f, y = 0.0f, total = 0.0f;
#pragma unroll
      for (int k = 0; k < kRounds; ++k) {
        const float weight = needs(k) ? exp2f(as_float(scalar[2 * k]) - top) : 0.0f;
        x += weight * as_float(sum[k].x), y += weight * as_float(sum[k].y);
        total += weight * as_float(scalar[2 * k + 1]);
      }
#pragma unroll
      for (int step = 4; step > 0; step /= 2) {
        x += __shfl_xor_sync(kFullMask, x, step);
        y += __shfl_xor_sync(kFullMask, y, step);
        total += __shfl_xor_sync(kFullMask, total, step);
      }
      if (of == 0 && i < hi) store_relaxed2(a.words + kVectorAt + split.head * kGroupDims + i, tagged(x / total, tag), tagged(y / total, tag));
    }
  }

  // Plain exchange only: wait for a count with one thread, all consumers behind it.
  __device__ __forceinline__ void plain_wait(const u32* count, u32 target) {
    if constexpr (!kValidate) {
      if (c.warp == 0 && lane == 0)
        while (!reached(count, target)) {}
      c.sync();
    }
  }

  __device__ __forceinline__ void run(int layer, const Turn& turn, const LayerPointers& w) {
    Ready ready;
    prepare(ready, w);
    plain_wait(turn.counts + kQkvCount * kLineWords, kCtas);
    queries(ready, layer, turn.tag);
    c.sync();  // all consumers: the queries and the tail's rows are in shared memory
    if (c.warp == 0 && lane == 0) stamp(a, layer, kHaveQuery);
    pages_of_pair();
    c.sync();  // all consumers: the pairs' results are in shared memory
    jitter<kJitter>();
    publish_split(turn.tag);
    if (c.warp == 0 && lane == 0) stamp(a, layer, kSplitDone);
    if constexpr (!kValidate) {
      u32* count = turn.counts + (kSplitCount + split.head) * kLineWords;
      c.sync();  // all consumers have published
      if (c.warp == 0 && lane == 0) add_release(count, 1);
      plain_wait(count, split.active);
    }
    join_splits(turn.tag);
    u32* count = turn.counts + (kVectorCount + split.head) * kLineWords;
    if constexpr (!kValidate) {
      c.sync();
      if (c.warp == 0 && lane == 0) add_release(count, kConsumers);
    } else if (kHint) {
      __syncwarp();
      if (lane == 0) add_relaxed(count, 1);
    }
    if (c.warp == 0 && lane == 0) stamp(a, layer, kVectorDone);
    c.at += static_cast<u32>(2 * (split.last - split.first));
  }
};

// A split that has no pages in this token: its words look as if it had written them in every layer, once a token. With an even number of
// layers they do anyway: whoever writes them in all layers of a token leaves the tag that was there before.
__device__ __forceinline__ void idle_split(const Args& a, int cta, const Split& split, u32 last_tag, int thread) {
  if (!kValidate || kLayers % 2 == 0 || cta >= kMostSplits * kNumKvHeads || split.mine()) return;
  const int first_head = split.index * kNumHeads + split.head * kGqa;
  for (int i = thread; i < kGroupDims; i += kConsumerThreads) store_relaxed(a.words + kSplitSumAt + first_head * kHeadDim + i, last_tag);
  if (thread < kGqa) {
    store_relaxed(a.words + kSplitMaxAt + first_head + thread, last_tag);
    store_relaxed(a.words + kSplitDenAt + first_head + thread, last_tag);
  }
}

}  // namespace nanoqwen
