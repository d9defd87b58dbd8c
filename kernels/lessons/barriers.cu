// barriers: paged attention in small, with its barriers in the right place and in wrong ones. Chapter 05 runs it; the runtime does not.
//
// Computes   softmax(q . K) . V for one query head and one KV head over at most kPages pages, in FP32. Same arithmetic in every kernel
//            of this file: only barriers and waits differ.
// Launch     2 CTAs of 5 warps. CTA 0 computes. CTA 1 is a watchdog: when CTA 0 does not finish in time, it says so in memory of the
//            host and traps, which ends the kernel with an error. Nothing in CTA 0 knows of it, so its barriers are what they would be alone.
// Warps      0 producer: copies pages; 1..4 consumers: token t of a page belongs to consumer t % 4.
// Shared     every page has a place of its own and nothing is reused, so a wrong number can have one cause only: it was read too early.
//            All of it is poisoned with NaN before the first copy. Plain order within a row: there is no ldmatrix here.
//
// What the barrier rule of chapter 05 says of each kernel, at a partial last page (with full pages only, all but two are right):
//
//   right             the consumers wait for the bytes at the page's mbarrier                                      right
//   branch_join       __syncthreads in the producer's branch; the consumers come to one later, to join their sums  reads stale bytes
//   branch_exit       the same, and the consumers leave without any further barrier                                reads stale bytes
//   branch_named      the same, and the consumers meet at a named barrier of their own                             reads stale bytes
//   branch_lane       the same as branch_join, but one lane alone goes to the barrier                              nobody promises anything
//   branch_signal     after it the producer signals an mbarrier, for which the consumers wait                      hangs
//   branch_two        after it the producer comes to a second barrier, at which the consumers wait                 hangs
//   branch_each       the producer does it after each page; the consumers wait for bytes                           hangs from two pages on
//   paired            a __syncthreads in either branch: equal numbers                                              right, and undefined by the book
//   uneven            two in the consumers' branch, one in the producer's                                          sums are read too early
//   token_branch      a __syncthreads inside if (token < length)                                                   sums are read too early
//   leavers           consumers without a token leave before a __syncthreads of the others                         right
//   fences            __syncwarp in the producer, __syncthreads for all, nobody waits for the bytes                stale at every length
//   fences_wait       the same, and the producer waits for the bytes before the barrier                            right
#include "constants.cuh"
#include "kv_page.cuh"
#include "mbarrier.cuh"

namespace nanoqwen {

constexpr int kConsumers = 4, kWarps = 1 + kConsumers, kThreads = kWarps * kWarp;
constexpr u32 kPoison = 0x7FFF7FFF;  // two NaNs; no page holds them
static_assert(kHeadDim == 4 * kWarp, "a lane holds four dimensions");

enum Place { kStarted, kCopying, kWaitsForBytes, kUsing, kInBranch, kAtTop, kAtNamed, kWaitsForSignal, kLeft };

// In memory of the host: it can be read when the kernel did not survive.
struct Record {
  int hung;                            // the watchdog's word
  int places[kWarps];                  // where each warp was last
  int stale[kConsumers][kPages];       // tokens whose row of K or V held poison
  float parts[kConsumers][kHeadDim + 2];  // of kernels that do not join: sum, maximum, denominator of each consumer
  float out[kHeadDim];                 // of kernels that do
};

struct Case {
  const float* q;
  const u16 *keys, *values;  // pages
  const int* block_table;
  u32* finished;             // warps of CTA 0 that have left
  Record* record;
  long long patience;        // cycles that the watchdog gives CTA 0
  int length;
  int supply_delay;          // cycles before a warp supplies what others must wait for: before it copies a page, before it stores sums
  int use_delay;             // cycles before a consumer uses a page
};

struct Shared {
  u16 pages[kPages][2][kSliceHalves];  // [page][K, V][token][dim]
  float sums[kConsumers][kHeadDim], maxima[kConsumers], denominators[kConsumers];
  Barrier landed[kPages], ready;
};

__device__ __forceinline__ void pause(int cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}

// Generic writes before it are seen by copies after it: the poison must not overtake the bytes that replace it.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void named_barrier(int number, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory"); }

// [cta]
// What one thread of CTA 0 knows, and the pieces of which every kernel here is made.
struct Cta {
  const Case& c;
  Shared& shared;
  const int warp = static_cast<int>(warp_id()), consumer = warp - 1, lane = static_cast<int>(lane_id());
  const bool producer = warp == 0;
  const int pages = (c.length + kPageTokens - 1) / kPageTokens, full_pages = c.length / kPageTokens;
  float4 q, acc = make_float4(0, 0, 0, 0);
  float maximum = -infinity(), denominator = 0.0f;

  __device__ __forceinline__ Cta(const Case& given, Shared& memory) : c(given), shared(memory) {
    q = reinterpret_cast<const float4*>(c.q)[lane];
    u32* words = reinterpret_cast<u32*>(&shared);
    for (u32 i = threadIdx.x; i < sizeof(Shared) / 4; i += kThreads) words[i] = kPoison;
    fence_async_proxy();
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int i = 0; i < kPages; ++i) barrier_init(&shared.landed[i], 1);
      barrier_init(&shared.ready, 1);
      fence_barrier_init();
    }
    __syncthreads();
  }

  // Note where this warp is, for the record.
  __device__ __forceinline__ void at(Place place) {
    if (lane == 0) *const_cast<volatile int*>(&c.record->places[warp]) = place;
  }

  // Producer: ask for K and V of a page. Returns at once.
  __device__ __forceinline__ void fetch(int page) {
    at(kCopying);
    if (lane == 0) {
      pause(c.supply_delay);
      const size_t slice = page_row(c.block_table[page], 0, 0);
      barrier_arrive_expect(&shared.landed[page], 2 * kSliceBytes);
      bulk_copy(shared.pages[page][0], c.keys + slice, kSliceBytes, &shared.landed[page]);
      bulk_copy(shared.pages[page][1], c.values + slice, kSliceBytes, &shared.landed[page]);
    }
    __syncwarp();
  }

  // Anyone: wait until both have landed.
  __device__ __forceinline__ void wait_for_bytes(int page) {
    at(kWaitsForBytes);
    barrier_wait(&shared.landed[page], 0);
  }

  // Consumer: take its tokens of a page into the running softmax.
  __device__ __forceinline__ void use(int page) {
    at(kUsing);
    pause(c.use_delay);
    const int valid = min(kPageTokens, c.length - page * kPageTokens);
    const float scale = rsqrtf(static_cast<float>(kHeadDim)) * 1.4426950408889634f;  // exp becomes exp2
    int stale = 0;
    for (int token = consumer; token < valid; token += kConsumers) {
      const uint2 k = reinterpret_cast<const uint2*>(shared.pages[page][0] + token * kHeadDim)[lane];
      const uint2 v = reinterpret_cast<const uint2*>(shared.pages[page][1] + token * kHeadDim)[lane];
      stale += __any_sync(kFullMask, k.x == kPoison || k.y == kPoison || v.x == kPoison || v.y == kPoison) != 0;
      const float dot = q.x * low_half(k.x) + q.y * high_half(k.x) + q.z * low_half(k.y) + q.w * high_half(k.y);
      const float score = warp_sum(dot) * scale, now = fmaxf(maximum, score);
      const float correction = exp2f(maximum - now), p = exp2f(score - now);
      acc = make_float4(acc.x * correction + p * low_half(v.x), acc.y * correction + p * high_half(v.x), acc.z * correction + p * low_half(v.y),
                        acc.w * correction + p * high_half(v.y));
      denominator = denominator * correction + p;
      maximum = now;
    }
    if (lane == 0) c.record->stale[consumer][page] = stale;
  }

  // Consumer: its share of the result, where the others can read it.
  __device__ __forceinline__ void publish() {
    pause(c.supply_delay);
    reinterpret_cast<float4*>(shared.sums[consumer])[lane] = acc;
    if (lane == 0) shared.maxima[consumer] = maximum, shared.denominators[consumer] = denominator;
  }

  // A thread: one dimension of the result, from all consumers' shares.
  __device__ __forceinline__ void combine(int dim) {
    float top = -infinity(), sum = 0.0f, total = 0.0f;
    for (int w = 0; w < kConsumers; ++w) top = fmaxf(top, shared.maxima[w]);
    for (int w = 0; w < kConsumers; ++w) {
      const float weight = exp2f(shared.maxima[w] - top);
      sum += weight * shared.sums[w][dim];
      total += weight * shared.denominators[w];
    }
    c.record->out[dim] = sum / total;
  }

  // Everybody: the end of the shipped kernel, with its two barriers.
  __device__ __forceinline__ void join() {
    at(kAtTop);
    __syncthreads();
    if (!producer) publish();
    __syncthreads();
    if (threadIdx.x < kHeadDim) combine(threadIdx.x);
  }

  // Consumer: leave its share in memory; the host joins them.
  __device__ __forceinline__ void hand_over() {
    float* part = c.record->parts[consumer];
    reinterpret_cast<float2*>(part)[2 * lane] = make_float2(acc.x, acc.y);
    reinterpret_cast<float2*>(part)[2 * lane + 1] = make_float2(acc.z, acc.w);
    if (lane == 0) part[kHeadDim] = maximum, part[kHeadDim + 1] = denominator;
  }

  // Full pages, as the kernels of the story take them, and correctly: the producer waits for the bytes, and all meet at top level.
  __device__ __forceinline__ void take_full_pages() {
    for (int page = 0; page < full_pages; ++page) {
      if (producer) {
        fetch(page);
        wait_for_bytes(page);
      }
      at(kAtTop);
      __syncthreads();
      if (!producer) use(page);
    }
  }
};
// [/cta]

// [right]
__device__ __forceinline__ void right(Cta& cta) {
  for (int page = 0; page < cta.pages; ++page) {
    if (cta.producer) {
      cta.fetch(page);
    } else {
      cta.wait_for_bytes(page);
      cta.use(page);
    }
  }
  cta.join();
}
// [/right]

// [branch_join]
__device__ __forceinline__ void branch_join(Cta& cta) {
  cta.take_full_pages();
  const int tail = cta.full_pages;
  if (tail < cta.pages) {  // the last page is partial
    if (cta.warp == 0) {
      cta.fetch(tail);
      cta.wait_for_bytes(tail);
      cta.at(kInBranch);
      __syncthreads();  // the bug: "now the page is there", said in a branch that the others do not take
    } else {
      cta.use(tail);
    }
  }
  cta.join();
}
// [/branch_join]

// [branch_exit]
__device__ __forceinline__ void branch_exit(Cta& cta) {
  cta.take_full_pages();
  const int tail = cta.full_pages;
  if (cta.warp == 0) {
    if (tail < cta.pages) {
      cta.fetch(tail);
      cta.wait_for_bytes(tail);
      cta.at(kInBranch);
      __syncthreads();
    }
  } else {
    if (tail < cta.pages) cta.use(tail);
    cta.hand_over();  // and out
  }
}
// [/branch_exit]

// [branch_named]
__device__ __forceinline__ void branch_named(Cta& cta) {
  cta.take_full_pages();
  const int tail = cta.full_pages;
  if (cta.warp == 0) {
    if (tail < cta.pages) {
      cta.fetch(tail);
      cta.wait_for_bytes(tail);
      cta.at(kInBranch);
      __syncthreads();
    }
  } else {
    if (tail < cta.pages) cta.use(tail);
    cta.publish();
    cta.at(kAtNamed);
    named_barrier(1, kConsumers * kWarp);
    cta.combine(threadIdx.x - kWarp);
  }
}
// [/branch_named]

// [branch_lane]
__device__ __forceinline__ void branch_lane(Cta& cta) {
  cta.take_full_pages();
  const int tail = cta.full_pages;
  if (tail < cta.pages) {
    if (cta.producer) cta.fetch(tail);
    if (threadIdx.x == 0) {  // one lane, where branch_join sends the warp
      cta.wait_for_bytes(tail);
      cta.at(kInBranch);
      __syncthreads();
    }
    if (!cta.producer) cta.use(tail);
  }
  cta.join();
}
// [/branch_lane]

// [branch_signal]
__device__ __forceinline__ void branch_signal(Cta& cta) {
  cta.take_full_pages();
  const int tail = cta.full_pages;
  if (tail < cta.pages) {
    if (cta.warp == 0) {
      cta.fetch(tail);
      cta.wait_for_bytes(tail);
      cta.at(kInBranch);
      __syncthreads();
      if (cta.lane == 0) barrier_arrive(&cta.shared.ready);
    } else {
      cta.at(kWaitsForSignal);
      barrier_wait(&cta.shared.ready, 0);
      cta.use(tail);
    }
  }
  cta.join();
}
// [/branch_signal]

// [branch_two]
__device__ __forceinline__ void branch_two(Cta& cta) {
  cta.take_full_pages();
  const int tail = cta.full_pages;
  if (tail < cta.pages) {
    if (cta.warp == 0) {
      cta.fetch(tail);
      cta.wait_for_bytes(tail);
      cta.at(kInBranch);
      __syncthreads();
    }
    cta.at(cta.producer ? kInBranch : kAtNamed);
    named_barrier(1, kThreads);  // all five warps
    if (!cta.producer) cta.use(tail);
  }
  cta.join();
}
// [/branch_two]

// [branch_each]
__device__ __forceinline__ void branch_each(Cta& cta) {
  for (int page = 0; page < cta.pages; ++page) {
    if (cta.warp == 0) {
      cta.fetch(page);
      cta.at(kInBranch);
      __syncthreads();
    } else {
      cta.wait_for_bytes(page);
      cta.use(page);
    }
  }
  cta.join();
}
// [/branch_each]

// [paired]
__device__ __forceinline__ void paired(Cta& cta) {
  cta.take_full_pages();
  const int tail = cta.full_pages;
  if (tail < cta.pages) {
    if (cta.warp == 0) {
      cta.fetch(tail);
      cta.wait_for_bytes(tail);
      cta.at(kInBranch);
      __syncthreads();
    } else {
      cta.at(kInBranch);
      __syncthreads();  // another line of the program, the same barrier
      cta.use(tail);
    }
  }
  cta.join();
}
// [/paired]

// [uneven]
__device__ __forceinline__ void uneven(Cta& cta) {
  cta.take_full_pages();
  const int tail = cta.full_pages;
  if (tail < cta.pages) {
    if (cta.warp == 0) {
      cta.fetch(tail);
      cta.wait_for_bytes(tail);
      cta.at(kInBranch);
      __syncthreads();
    } else {
      cta.at(kInBranch);
      __syncthreads();
      cta.use(tail);
      __syncthreads();  // one more than the producer has
    }
  }
  cta.join();
}
// [/uneven]

// [token_branch]
__device__ __forceinline__ void token_branch(Cta& cta) {
  for (int page = 0; page < cta.pages; ++page) {
    if (cta.producer) {
      cta.fetch(page);
      cta.wait_for_bytes(page);
    }
    cta.at(kAtTop);
    __syncthreads();
    if (cta.producer || page * kPageTokens + cta.consumer < cta.c.length) {
      if (!cta.producer) cta.use(page);
      cta.at(kInBranch);
      __syncthreads();  // every warp that has a token
    }
  }
  cta.join();
}
// [/token_branch]

// [leavers]
__device__ __forceinline__ void leavers(Cta& cta) {
  cta.take_full_pages();
  const int tail = cta.full_pages;
  if (tail < cta.pages) {
    if (!cta.producer && tail * kPageTokens + cta.consumer >= cta.c.length) return cta.hand_over();  // nothing left to do here
    if (cta.producer) {
      cta.fetch(tail);
      cta.wait_for_bytes(tail);
    }
    cta.at(kAtTop);
    __syncthreads();
    if (!cta.producer) cta.use(tail);
  }
  if (!cta.producer) cta.hand_over();
}
// [/leavers]

// [fences]
__device__ __forceinline__ void fences(Cta& cta) {
  for (int page = 0; page < cta.pages; ++page) {
    if (cta.producer) cta.fetch(page);  // ends with __syncwarp
    __syncthreads();                    // at top level; it orders threads, and the copy is none
    if (!cta.producer) cta.use(page);
  }
  cta.join();
}
// [/fences]

// [fences_wait]
__device__ __forceinline__ void fences_wait(Cta& cta) {
  for (int page = 0; page < cta.pages; ++page) {
    if (cta.producer) {
      cta.fetch(page);
      cta.wait_for_bytes(page);
    }
    __syncthreads();
    if (!cta.producer) cta.use(page);
  }
  cta.join();
}
// [/fences_wait]

// [watch]
__device__ __forceinline__ void watch(const Case& c) {
  if (threadIdx.x != 0) return;
  const long long start = clock64();
  while (*const_cast<volatile u32*>(c.finished) < kWarps) {
    if (clock64() - start > c.patience) {
      *const_cast<volatile int*>(&c.record->hung) = 1;
      __threadfence_system();
      __trap();
    }
  }
}

template <typename Body>
__device__ __forceinline__ void run(const Case& c, Body body) {
  __shared__ __align__(128) Shared shared;
  if (blockIdx.x == 1) return watch(c);
  Cta cta(c, shared);
  body(cta);
  cta.at(kLeft);
  __threadfence_system();
  if (lane_id() == 0) atomicAdd(c.finished, 1u);
}
// [/watch]

}  // namespace nanoqwen

using namespace nanoqwen;

#define LESSON(name) \
  extern "C" __global__ void __launch_bounds__(kThreads) lesson_##name(const Case c) { run(c, [](Cta& cta) { name(cta); }); }

LESSON(right)
LESSON(branch_join)
LESSON(branch_exit)
LESSON(branch_named)
LESSON(branch_lane)
LESSON(branch_signal)
LESSON(branch_two)
LESSON(branch_each)
LESSON(paired)
LESSON(uneven)
LESSON(token_branch)
LESSON(leavers)
LESSON(fences)
LESSON(fences_wait)
