// persistent: whole tokens in one kernel, from the embedding to the next token's id. See README.md.
//
// Launch     cooperative, kCtas CTAs of kThreads threads, sizeof(Shared) bytes of dynamic shared memory: one CTA an SM, all resident or
//            refused by the driver.
// Warps      0..13 consumers, 14 producer (kLanes lanes), 15 publisher.
// Barriers   name            arrivals           who arrives                     who waits            means
//            full            1 + bytes          producer (expect_tx)            both warps of a pair, the unit has landed
//                                                                               producer (in flight)
//            empty           2                  lane 0 of both warps            producer             nobody reads the unit any more
//            tile_full[r]    14                 lane 0 of each consumer warp    publisher            all parts of a row tile are there
//            tile_empty[r]   1                  lane 0 of the publisher         consumer warps       the parts have been added
//            go              1                  lane 0 of the publisher         consumer warps       token is known / look for x now
//            begun           1                  lane 0 of the publisher         producer             the token before has ended everywhere
//            named barrier 1 448                all lanes of the consumers      the same             scratch changes hands
#include "attend.cuh"
#include "consume.cuh"
#include "publish.cuh"
#include "stream.cuh"

namespace nanoqwen {

extern __shared__ __align__(128) u8 persistent_shared[];

// `HiddenBlocks` of the matrices whose x may stay in registers. (A template: what is left out must fit the others' types no more than it runs.)
template <class HiddenBlocks>
__device__ __forceinline__ void consume(const Args& a, Shared& s) {
  Consumer c(a, s);
  const auto mark = [&](int layer, Event e) {
    if (kStamps && threadIdx.x == 0) stamp(a, layer, e);
  };
  float4 residual[kHiddenPieces];
  Consumer::Gain gain;
  OwnBlocks::Own own = {};  // live over the whole loop anyway; a value on every path keeps it that way without copies

#pragma unroll 1
  while (c.went() < static_cast<u32>(a.tokens) * kGoesAToken) {
    c.wait_go();
    // The token's scalars stay in shared memory: registers are what this kernel lacks.
    idle_split(a, c.cta, s.fixed.split, tag_of(s.fixed.serial, kLayers - 1), c.warp * 32 + c.lane);
    c.embed(residual, s.fixed.token);

#pragma unroll 1
    for (int layer = 0; layer < kLayers; ++layer) {
      const LayerPointers& w = s.fixed.layers[layer];
      const u32 tag = tag_of(s.fixed.serial, layer);
      mark(layer, kLayerBegins);

      {  // q/k/v
        c.forget();
        const Range r = QkvCut::range(c.cta);
        Stock<HiddenBlocks> stock;
        c.load_gain(gain, w.input_norm);
        c.prefetch(stock, r);
        if (layer > 0) {
          c.wait_exchange();
          c.add_parts<DownCut>(residual, kDownAt, tag ^ 1);
        }
        mark(layer, kHaveX);
        c.normed_digits<kOwnX>(residual, gain, own);
        mark(layer, kHaveDigits);
        c.multiply<QkvCut, kOwnX>(r, stock, own, s.fixed.records);
        mark(layer, kQkvDone);
      }

      if (!kNoAttention) {
        c.forget();
        if (s.fixed.split.mine()) Attention(c, s.fixed.split, s.fixed.position).run(layer, Turn{tag, counts_of(a, s.fixed.serial, layer)}, w);
      }

      {  // o
        c.forget();
        const Range r = OCut::range(c.cta);
        Stock<HiddenBlocks> stock;
        c.prefetch(stock, r);
        c.load_gain(gain, w.post_norm);
        c.wait_exchange();
        c.vector_digits<kOwnX>(tag, own);
        mark(layer, kHaveVector);
        c.multiply<OCut, kOwnX>(r, stock, own, s.fixed.records);
        mark(layer, kODone);
      }

      int early = 0;  // pieces of the inner vector that this warp has quantised already
      {  // gate and up, one x
        c.forget();
        Stock<HiddenBlocks, kHeldGate> stock;
        if constexpr (kStrided) c.prefetch_strided(stock);
        else c.prefetch(stock, InnerCut::range(c.cta));
        c.wait_exchange();
        c.add_parts<OCut>(residual, kOAt, tag);
        mark(layer, kHaveO);
        c.normed_digits<kOwnX>(residual, gain, own);
        if constexpr (kStrided) {
          early = c.multiply_strided(stock, own, tag);
        } else {
#pragma unroll 1
          for (int which = 0; which < 2; ++which) {
            const Range r = which ? up_range(c.cta) : InnerCut::range(c.cta);
            if (which) c.prefetch(stock, r);
            c.multiply<InnerCut, kOwnX>(r, stock, own, s.fixed.records);
          }
        }
        mark(layer, kGateUpDone);
      }

      {  // down
        c.forget();
        const Range r = DownCut::range(c.cta);
        Stock<Both<WeightBlock>> stock;
        c.prefetch(stock, r);
        c.wait_exchange();
        mark(layer, kHaveInner);
        c.inner_digits(tag, early);
        mark(layer, kInnerDigits);
        c.multiply<DownCut, false>(r, stock, own, s.fixed.scratch);
        mark(layer, kDownDone);
      }
    }

    {  // the head
      c.forget();
      const Range r = HeadCut::range(c.cta);
      Stock<Both<HeadBlock>, 1> stock;  // every stage's registers are those of the one that needs most
      c.load_gain(gain, a.final_norm);
      c.prefetch(stock, r);
      c.wait_exchange();
      c.add_parts<DownCut>(residual, kDownAt, tag_of(s.fixed.serial, kLayers - 1));
      c.head_halves(residual, gain);
      c.multiply<HeadCut, false>(r, stock, own, s.fixed.scratch);
    }
  }
}

}  // namespace nanoqwen

using namespace nanoqwen;

// For the host, which has no other way to see these constants (nanoqwen/cuda/persistent.py: SIZES). One thread.
extern "C" __global__ void __launch_bounds__(32) persistent_sizes(int* out) {
  const int sizes[] = {kExchangeWords, kCountWords, static_cast<int>(sizeof(Args)), static_cast<int>(sizeof(Shared)), kUnits, kCtas, kThreads, kEvents, kMostSplits, kOwnX,
                       kQkvAt, kVectorAt, kOAt, kInnerAt, kDownAt, QkvCut::kParts, OCut::kParts, DownCut::kParts};
  if (threadIdx.x == 0)
    for (int i = 0; i < static_cast<int>(sizeof(sizes) / sizeof(int)); ++i) out[i] = sizes[i];
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) persistent(const __grid_constant__ Args a) {
  Shared& s = *reinterpret_cast<Shared*>(persistent_shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kUnits; ++i) barrier_init(&s.units[i].full, 1), barrier_init(&s.units[i].empty, 2 * kWarpArrivals);
    for (int i = 0; i < kTileRing; ++i) barrier_init(&s.fixed.tile_full[i], kConsumers * kWarpArrivals), barrier_init(&s.fixed.tile_empty[i], kWarpArrivals);
    barrier_init(&s.fixed.go, kWarpArrivals), barrier_init(&s.fixed.begun, 1);
    fence_barrier_init();
  }
  if (threadIdx.x < kConsumers) s.fixed.goes[threadIdx.x] = 0;
  constexpr int kPointers = kLayers * static_cast<int>(sizeof(LayerPointers)) / 8;
  for (int i = threadIdx.x; i < kPointers; i += kThreads) reinterpret_cast<u64*>(s.fixed.layers)[i] = reinterpret_cast<const u64*>(a.layers)[i];
  if constexpr (kStamps) {
    u64* clocks = reinterpret_cast<u64*>(a.stamps + kCtas * kLayers * kEvents) + blockIdx.x * 4;
    if (threadIdx.x == 0) clocks[0] = nanoseconds(), clocks[1] = cycles();
  }
  __syncthreads();  // all threads: barriers, counts and pointers are there

  const int warp = static_cast<int>(warp_id());
  if (warp < kConsumers) {
    consume<BlocksOf<kOwnX>::type>(a, s);
  } else if (warp == kProducer) {
    Producer(a, s).run();
  } else {
    Publisher(a, s).run();
    if constexpr (kStamps) {
      u64* clocks = reinterpret_cast<u64*>(a.stamps + kCtas * kLayers * kEvents) + blockIdx.x * 4;
      if (lane_id() == 0) clocks[2] = nanoseconds(), clocks[3] = cycles();
    }
  }
}
