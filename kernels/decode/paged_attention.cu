// paged_attention: one new token's queries against the paged KV cache, split over the sequence.
//
// Computes   for KV head h = blockIdx.x and split s = blockIdx.y: softmax(q . K) . V over the pages of that split, for the kGqa query
//            heads that share h. Online softmax and all sums in FP32. Writes the split's unnormalised sum, its running maximum and its
//            denominator; attention_combine joins the splits.
// Moves      4 KiB of K and 4 KiB of V a page and KV head (7B), each once: the 7 heads of a group share what was read.
// Launch     (kv_heads, splits) CTAs of 7 warps. Splits without a page leave at once.
//
// Warps      0       producer: one lane issues bulk copies, up to kStages stages ahead
//            1..6    consumers: two take one page of a stage, each all of its scores and half of the dimensions of V. (One warp a page would
//                    need twice the ring for as many warps, and a GEMV's ring has to fit beside it: stream_gemv.cuh.)
//
// Barriers   name      arrivals      who arrives                      who waits             means
//            full[i]   1 + bytes     producer lane (expect_tx)        consumer warps        the stage's pages have landed
//            empty[i]  6             lane 0 of each consumer warp     producer lane         nobody reads the stage any more
//            __syncthreads x 3       all 224 threads: after the barriers are initialised; when all pages are read, because the results take
//                                    their memory; when the results are there.
//            The producer never waits inside a consumer's branch nor the other way round: every __syncthreads stands at top level.
//
// Shared     offset                      bytes                   what
//            0                           kStages * 3 * 2 slices  K and V pages: [stage][page][K, V][token][dim]   (72 KiB for the 7B)
//            (the same)                  3 * 8 * (dim + 2) * 4   the pairs' sums after the loop, over the pages
//            after the pages             2 * kStages * 8         full, empty
//
// Tensor     m16n8k16, FP16 in, FP32 sums. Rows 0..7 of A are the high parts of the group's queries (or probabilities), rows 8..15 the low
// cores      parts (x = high + low, 22 bits), so no precision of q or p is lost, and a lane finds both sums of a head in its own registers.
//
// Tail       a page is copied whole. Tokens past the end get a score of -infinity and so a probability of exactly 0. Their V rows must be
//            finite: page_open.cu clears a page when a sequence takes it, so it holds nothing but zeros and this sequence's own rows.
#include "constants.cuh"
#include "kv_page.cuh"
#include "mbarrier.cuh"
#include "page_fragments.cuh"
#include "step.cuh"

namespace nanoqwen {

constexpr int kGqa = kNumHeads / kNumKvHeads;
constexpr int kConsumers = 6, kStages = 3, kStagePages = kSplitPages;
static_assert(kConsumers == 2 * kStagePages, "two warps a page");
constexpr int kAttentionThreads = (1 + kConsumers) * kWarp;
constexpr int kHalfTiles = kHeadDim / 16, kDimSteps = kHeadDim / 16;  // a warp's share of V; steps of q . K
static_assert(kGqa <= 8, "the heads of a group are the eight rows of half a tile");

// [shared]
struct AttentionShared {
  union {
    u16 pages[kStages][kStagePages][2][kSliceHalves];  // [stage][page][K, V]
    struct {
      float sums[kStagePages][8][kHeadDim];
      float maxima[kStagePages][8], denominators[kStagePages][8];
    } joined;
  };
  Barrier full[kStages], empty[kStages];
};
// [/shared]

}  // namespace nanoqwen

using namespace nanoqwen;

// sums[split][head][dim], maxima and denominators [split][head]; scores are kept in units of log2.
extern "C" __global__ void __launch_bounds__(kAttentionThreads, 1)
paged_attention(const float* q, const u16* keys, const u16* values, const int* block_table, const Step* step,
                float* sums, float* maxima, float* denominators) {
  extern __shared__ __align__(128) u8 raw[];
  AttentionShared& shared = *reinterpret_cast<AttentionShared*>(raw);
  const int kv_head = blockIdx.x, split = blockIdx.y;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&shared.full[i], 1);
      barrier_init(&shared.empty[i], kConsumers);
    }
    fence_barrier_init();
  }
  allow_next_kernel();
  __syncthreads();  // all 224 threads: nobody may touch a barrier before it exists

  // Position and block table change between steps only, and so do all pages but the one that holds the position: all that may be read
  // before the kernels in front of this one have finished.
  const int length = step->position + 1;
  const int pages = (length + kPageTokens - 1) / kPageTokens;
  const int active = active_splits(pages, gridDim.y);  // attention_combine joins as many
  if (split >= active) return;                                 // the whole CTA
  const int first_page = static_cast<int>(static_cast<long long>(pages) * split / active);
  const int last_page = static_cast<int>(static_cast<long long>(pages) * (split + 1) / active);

  const int warp = static_cast<int>(warp_id()) - 1;  // consumer index; -1 is the producer
  const int pair = warp / 2, half = warp % 2;        // page of a stage, half of the dimensions
  float acc[kHalfTiles][4] = {};
  float maximum = -infinity(), denominator = 0.0f;

  if (warp < 0) {
    // [producer]
    if (lane_id() == 0) {
      Ring<kStages> ring;
      for (int page = first_page; page < last_page; page += kStagePages, ring.advance()) {
        const int count = min(kStagePages, last_page - page);
        if (page + count == pages) wait_for_previous_kernel();  // rope_append writes the new token into the last page
        barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
        fence_for_copies();
        barrier_arrive_expect(&shared.full[ring.stage], count * 2 * kSliceBytes);
        for (int i = 0; i < count; ++i) {
          const size_t slice = page_row(block_table[page + i], kv_head, 0);
          bulk_copy(shared.pages[ring.stage][i][0], keys + slice, kSliceBytes, &shared.full[ring.stage]);
          bulk_copy(shared.pages[ring.stage][i][1], values + slice, kSliceBytes, &shared.full[ring.stage]);
        }
      }
    }
    // [/producer]
  } else {
    // [consumer]
    wait_for_previous_kernel();  // q
    const int g = lane_id() / 4, t = lane_id() % 4;
    // Queries, scaled so that exp becomes exp2, as A fragments: rows g are the high parts of head g, rows g + 8 the low parts.
    constexpr float kLog2e = 1.4426950408889634f;
    const float scale = rsqrtf(static_cast<float>(kHeadDim)) * kLog2e;
    u32 a[kDimSteps][4];
#pragma unroll
    for (int k = 0; k < kDimSteps; ++k) {
      const float* row = q + (kv_head * kGqa + g) * kHeadDim + 16 * k + 2 * t;
      const float2 front = g < kGqa ? *reinterpret_cast<const float2*>(row) : make_float2(0, 0);
      const float2 back = g < kGqa ? *reinterpret_cast<const float2*>(row + 8) : make_float2(0, 0);
      split_pair(front.x * scale, front.y * scale, a[k][0], a[k][1]);
      split_pair(back.x * scale, back.y * scale, a[k][2], a[k][3]);
    }

    Ring<kStages> ring;
    for (int base = first_page; base < last_page; base += kStagePages, ring.advance()) {
      const int page = base + pair;
      u32 read = 0;
      barrier_wait(&shared.full[ring.stage], ring.parity);  // all lanes: each must see the landed bytes
      if (page < last_page) {
        const u16* k_page = shared.pages[ring.stage][pair][0];
        const u16* v_page = shared.pages[ring.stage][pair][1];

        // Scores of 16 tokens as two 8-token tiles; B fragments are rows of K, one ldmatrix for both tiles.
        float s[2][4] = {};
#pragma unroll
        for (int k = 0; k < kDimSteps; ++k) {
          u32 b[4];
          key_fragments(b, k_page, k);
          mma_f16(s[0], a[k][0], a[k][1], a[k][2], a[k][3], b[0], b[1]);
          mma_f16(s[1], a[k][0], a[k][1], a[k][2], a[k][3], b[2], b[3]);
        }

        // Head g, tokens 2t, 2t + 1 of either tile: the high row and the low row together are the score.
        float p[2][2], largest = -infinity();
        const int valid = length - page * kPageTokens;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const float score = s[tile][j] + s[tile][j + 2];
            p[tile][j] = 8 * tile + 2 * t + j < valid ? score : -infinity();
            largest = fmaxf(largest, p[tile][j]);
          }
        largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, 2));
        const float now = fmaxf(maximum, largest);  // finite: a page that is read holds a valid token
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
        for (int n = 0; n < kHalfTiles; ++n)
#pragma unroll
          for (int j = 0; j < 4; ++j) acc[n][j] *= correction;

        // The scores' registers are already an A fragment: rows are heads, columns tokens.
        u32 pa[4];
        split_pair(p[0][0], p[0][1], pa[0], pa[1]);
        split_pair(p[1][0], p[1][1], pa[2], pa[3]);
#pragma unroll
        for (int n = 0; n < kHalfTiles; n += 2) {
          u32 b[4];
          value_fragments(b, v_page, half * kHalfTiles + n);
          mma_f16(acc[n], pa[0], pa[1], pa[2], pa[3], b[0], b[1]);
          mma_f16(acc[n + 1], pa[0], pa[1], pa[2], pa[3], b[2], b[3]);
          read |= b[0];
        }
        read |= __float_as_uint(denominator);  // all scores, and so all keys, went into it
      }
      const u32 zero = zero_behind(read);
      fence_of_reader<kReadersFence>();
      __syncwarp();  // all lanes have read the stage before lane 0 says so
      if (lane_id() == 0) barrier_arrive(shared_address(&shared.empty[ring.stage]) + zero);
    }
    // [/consumer]
  }

  // The pages are read and every copy has landed (each was waited for): their memory may hold the warps' results.
  __syncthreads();  // all 224 threads, the producer too: nobody still reads a page
  if (warp >= 0) {
    const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int n = 0; n < kHalfTiles; ++n)
      *reinterpret_cast<float2*>(&shared.joined.sums[pair][g][8 * (half * kHalfTiles + n) + 2 * t]) = make_float2(acc[n][0] + acc[n][2], acc[n][1] + acc[n][3]);
    if (t == 0 && half == 0) {  // both halves have the same
      shared.joined.maxima[pair][g] = maximum;
      shared.joined.denominators[pair][g] = denominator;
    }
  }
  __syncthreads();  // all 224 threads: every pair's results are there
  for (int i = threadIdx.x; i < kGqa * kHeadDim; i += kAttentionThreads) {
    const int head = i / kHeadDim, dim = i % kHeadDim;
    float top = -infinity(), sum = 0.0f, total = 0.0f;
    for (int w = 0; w < kStagePages; ++w) top = fmaxf(top, shared.joined.maxima[w][head]);
    for (int w = 0; w < kStagePages; ++w) {
      const float weight = exp2f(shared.joined.maxima[w][head] - top);  // 0 for a pair that saw no page
      sum += weight * shared.joined.sums[w][head][dim];
      total += weight * shared.joined.denominators[w][head];
    }
    const int out = split * kNumHeads + kv_head * kGqa + head;
    sums[static_cast<size_t>(out) * kHeadDim + dim] = sum;
    if (dim == 0) {
      maxima[out] = top;
      denominators[out] = total;
    }
  }
}
