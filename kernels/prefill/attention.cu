// prefill_attention: the queries of a chunk against the paged cache, causal, on warpgroup tensor cores.
//
// Computes   softmax(q . K / sqrt(head_dim)) . V of one query head over all tokens up to each query's own. Online softmax and all sums in FP32; q and
//            the shares are rounded to FP16 once, for the tensor cores (attention_tile.cuh).
// Moves      every page of the head's group once a tile of queries, mostly from L2.
// Kernels    prefill_attention         (heads, ceil(length / 128)) CTAs: a tile of 128 queries, 64 a warpgroup
//            prefill_attention_spread  (heads, ceil(length / 64), 4), clusters of 4 along z: 64 queries, which all eight warpgroups of the cluster have;
//                                      a CTA takes a quarter of the steps, its two warpgroups every other one of them
//            Few queries over many pages would leave most SMs idle and the others with a long way to go: nanoqwen/cuda/attention_plan.py chooses.
//            `length` is what the launch was made for, n <= length what the span says: tiles behind n end at once.
//
//   warps 0-3  warp 0 is the producer; the others are there because registers move between whole warpgroups (40 each)
//   warps 4-11 two consumer warpgroups (232 registers), a warp 16 queries
//
// Step       64 tokens, four pages, from the last to the first: only the first one or two steps of a tile hold tokens that a query must not see.
//
// Barriers   name         arrivals    who arrives                      who waits           means
//            k.full[s]    1 + bytes   producer lane 0 (expect_tx)      consumer warps      the step's keys have landed
//            k.empty[s]   8, or 4     lane 0 of each warp that takes   all producer lanes  no product reads them any more
//                                     the step
//            v.full, v.empty          the same for values
//            bar 1        256         all consumers, no producer       all consumers       (spread) nobody reads pages any more; weights are there
//            bar 2, 3     256         the warpgroup that waits, the    128 consumers       (plain) it is this warpgroup's turn to issue products
//                                     other one that passes; no producer
//            cluster      all         all threads of the cluster,      the same            (spread) results are there; they have been read
//                                     producer warps too, twice
//            One __syncthreads, all threads, after the barriers are initialised. The producer waits for consumers and for nobody else.
//
// Async      Pages are written by tensor copies and read by wgmma: both belong to the async proxy, and no thread reads or writes a page itself. A stage is
//            given back by warps that have waited for their products (wgmma_wait), so the copy that follows overwrites nothing that is still read. The spread
//            kernel writes results over the pages, after bar 1: every copy was waited for by a consumer, every product by its warpgroup.
//
// Tail       pages are copied whole. Tokens that a query must not see get a share of exactly 0, and 0 * NaN is NaN: their value rows must be
//            finite. Rows behind the chunk's end in its last page are zeros (DevicePages.clear_tail), rows before it belong to the sequence.
//
// Tried and lost: q and the shares as two FP16 parts each, 22 bits: slower, and the hidden states are rounded to FP16 in front of every product anyway.
//            Both warpgroups on the same 64 queries without a cluster: never the fastest. Products issued without turns: slower.
#include "attention_results.cuh"

namespace nanoqwen {

extern __shared__ __align__(1024) u8 attention_shared[];  // swizzles count from multiples of 1024

template <int kCluster>
__device__ __forceinline__ void run_attention(const AttentionArguments& a) {
  AttentionShared& shared = *reinterpret_cast<AttentionShared*>(attention_shared);
  constexpr bool kPaired = Part<kCluster>::kPaired;
  if (threadIdx.x == 0) {
    constexpr u32 kReaders = kPaired ? 4 : 8;  // warps that take a step
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&shared.k_full[i], 1);
      barrier_init(&shared.v_full[i], 1);
      barrier_init(&shared.k_empty[i], kReaders);
      barrier_init(&shared.v_empty[i], kReaders);
    }
    fence_barrier_init();
    prefetch_map(a.keys);
    prefetch_map(a.values);
  }
  allow_next_kernel();
  const Part<kCluster> part(*a.span);
  __syncthreads();  // all threads: nobody may touch a barrier before it exists

  if (part.empty()) {  // of the whole CTA, and of the whole cluster
    wait_for_previous_kernel();
    return;
  }
  if (threadIdx.x < kGroupThreads) {
    fewer_registers<kProducerRegisters>();
    if (warp_id() == 0) bring_pages(shared, a, part);
    if constexpr (kPaired) {
      cluster_barrier();
      cluster_barrier();
    }
    return;
  }

  more_registers<kConsumerRegisters>();
  wait_for_previous_kernel();
  const int warpgroup = (threadIdx.x - kGroupThreads) / kGroupThreads, first_query = part.tile * part.kTile + (kPaired ? 0 : warpgroup * kQueries);
  const int row = first_query + static_cast<int>(warp_id()) % 4 * 16 + static_cast<int>(lane_id()) / 4;
  QueryTile mine;
  mine.load(a.q, part.n, part.head, row);
  attend(shared, part, warpgroup, first_query, mine);
  const float denominator[2] = {quad_sum(mine.denominator[0]), quad_sum(mine.denominator[1])};
  if constexpr (kPaired) {
    join_results(shared, a, part, warpgroup, mine, denominator);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (row + 8 * half < part.n) store_row(a, part.head, row + 8 * half, mine.sums, half, 1.0f / denominator[half]);
  }
}

}  // namespace nanoqwen

using namespace nanoqwen;

// q FP32 [length][heads][head_dim]; keys, values: maps of the layer's pools (tensor_map.cuh); tiled_out FP16 in the order of tiled_x.cuh, `capacity`
// tokens a slab.
#define NANOQWEN_ATTENTION(name, cluster, bounds)                                                                                            \
  extern "C" __global__ void bounds __launch_bounds__(kAttentionThreads, 1)                                                                  \
  name(const float* q, const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values, const int* block_table,             \
       const Span* span, u16* tiled_out, int capacity) {                                                                                     \
    run_attention<cluster>(AttentionArguments{q, &keys, &values, block_table, span, tiled_out, capacity});                                   \
  }

NANOQWEN_ATTENTION(prefill_attention, 1, )
NANOQWEN_ATTENTION(prefill_attention_spread, kSpread, __cluster_dims__(1, 1, kSpread))
